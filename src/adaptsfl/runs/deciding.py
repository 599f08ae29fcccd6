"""Ask a policy for decisions: check its answers, explain its errors, and limit how long a run waits for it."""

import threading
import time
import traceback
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from adaptsfl.checks import short
from adaptsfl.decisions import Decision
from adaptsfl.errors import AdaptSFLError, InvalidInput, first_line
from adaptsfl.policies import Observation, Policy


def decided(policy: Policy, seen: Observation) -> Decision:
    """Return a policy's decision; an error in a user's own policy names the line of their code."""
    try:
        decision = policy.decide(seen)
    except AdaptSFLError:
        raise
    except Exception as error:
        if type(policy).__module__.startswith("adaptsfl."):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{Path(frame.filename).name}, line {frame.lineno}"
        problem = f"{policy.title} raised {type(error).__name__} in {line}: {first_line(error)}"
        raise InvalidInput("policy", problem, "Correct its decide method") from error
    if not isinstance(decision, Decision):
        raise InvalidInput("policy", f"{policy.title} decided {short(decision)}", "Return a Decision from decide")
    return decision


class Decider:
    """Asks a policy, one question at a time.

    Args:
        limit_s: how long to wait for an answer, in one call or several; None waits without a limit, and the
            policy runs in the calling thread.

    Attributes:
        asked: how often the policy was asked.
    """

    def __init__(self, policy: Policy, limit_s: float | None) -> None:
        self.policy = policy
        self.limit_s = None if limit_s is None else min(limit_s, threading.TIMEOUT_MAX)
        self.asked = 0
        self._pending: Future[Decision] | None = None
        self._pending_for: tuple[int, ...] = ()
        self._asked_at = 0.0

    def decide(self, seen: Observation, *, wait: bool) -> Decision | None:
        """Return a decision; None if it takes longer than the limit, unless `wait` is set.

        The next call uses a late answer if it is about the same devices. Until the answer arrives, the policy is not
        asked again, and the run does not wait for it.
        """
        if self._pending is None:
            self._ask(seen)
        pending = self._pending
        assert pending is not None
        if not wait and self.limit_s is not None:
            futures.wait([pending], max(0.0, self._asked_at + self.limit_s - time.monotonic()))
            if not pending.done():
                return None
        answer = pending.result()
        self._pending = None
        if self._pending_for != _devices(seen):  # the answer is about other devices
            return self.decide(seen, wait=wait)
        return answer

    @property
    def pending(self) -> bool:
        """Whether an answer has not arrived yet, or was not used yet."""
        return self._pending is not None

    def ask_again(self, seen: Observation) -> None:
        """Repeat a question from before a restart; the answer is stored until `decide` uses it."""
        self.asked += 1
        self._pending, self._pending_for = Future(), _devices(seen)
        self._pending.set_result(decided(self.policy, seen))

    def drop_answer(self) -> None:
        """Drop the stored answer: it was used before the restart."""
        self._pending = None

    def interrupt(self) -> None:
        """End the wait for an answer, from another thread."""
        if self._pending is not None:
            with suppress(futures.InvalidStateError):  # the answer has just arrived
                self._pending.set_exception(futures.CancelledError())

    def _ask(self, seen: Observation) -> None:
        self.asked += 1
        self._pending, self._pending_for, self._asked_at = Future(), _devices(seen), time.monotonic()
        if self.limit_s is None:
            self._pending.set_result(decided(self.policy, seen))
            return
        # A daemon thread: the process can end without waiting for a plan that is not needed any more.
        threading.Thread(target=self._answer, args=(self._pending, seen), name="policy", daemon=True).start()

    def _answer(self, pending: "Future[Decision]", seen: Observation) -> None:
        with suppress(futures.InvalidStateError):  # the wait was interrupted
            try:
                pending.set_result(decided(self.policy, seen))
            except Exception as error:
                pending.set_exception(error)


def _devices(seen: Observation) -> tuple[int, ...]:
    return seen.present or tuple(range(seen.devices))
