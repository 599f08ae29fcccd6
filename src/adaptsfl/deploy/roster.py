"""The devices of a run as the edge server knows them: who is here, whether they are enough, what people see of them."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from adaptsfl.deploy.resources import MeasuredFleet
from adaptsfl.deploy.service import NotNow
from adaptsfl.deploy.sessions import Member
from adaptsfl.deploy.status import Board, State


class Roster:
    """All devices of the fleet.

    Args:
        names: of all devices, in the fleet's order.
        quorum: how many are enough to go on.
        by_size: whether a device counts by its samples in all means, or as much as any other.
        measured: what is known of their resources.
        board: what people see while the run goes on.
        say: called with what people may want to know.

    Attributes:
        members: by name.
        by_number: in the fleet's order.
    """

    def __init__(
        self,
        names: Sequence[str],
        quorum: int,
        *,
        by_size: bool,
        measured: MeasuredFleet,
        board: Board,
        say: Callable[[str], None],
    ) -> None:
        self.members = {name: Member(k, name) for k, name in enumerate(names)}
        self.by_number = list(self.members.values())
        self.quorum, self.by_size, self.measured, self.board, self.say = quorum, by_size, measured, board, say
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self.tell_of(*self.by_number)

    def here(self) -> list[Member]:
        """Return the devices that are connected and ready, in the order of the fleet."""
        return [member for member in self.by_number if member.session is not None and not member.session.closed]

    async def enough(self, patience_s: float = math.inf) -> bool:
        """Wait until enough devices are here; return whether they are after so many seconds."""
        deadline = time.monotonic() + patience_s
        while len(self.here()) < self.quorum:
            if time.monotonic() >= deadline:
                return False
            self.wait_for(f"devices: {len(self.here())} of {self.quorum} that are needed")
            await self.change(deadline - time.monotonic())
        return True

    def give_up(self, error: Exception) -> None:
        """Let whoever waits for a change raise this."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Let whoever waits for a change look again."""
        self._changed.set()

    async def change(self, timeout: float) -> bool:
        """Wait until something has happened; return whether it did before the time was over."""
        self.check()
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), None if timeout == math.inf else timeout)
        self.check()
        return self._changed.is_set()

    def check(self) -> None:
        """Raise what was given up with, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def weight(self, device: int) -> float:
        """Return how much a device counts."""
        return float(self.by_number[device].samples) if self.by_size else 1.0

    def shares(self, present: Sequence[int]) -> list[float]:
        """Return how much each of these devices counts, of one."""
        weights = [self.weight(device) for device in present]
        return [weight / sum(weights) for weight in weights]

    def send_away(self, member: Member) -> None:
        """End the connection of a device that is shut out, whichever of its calls was the last straw."""
        if member.quarantined and member.session is not None:
            member.session.close(NotNow(f"{member.name} is shut out: {member.last_error}"))
        self.tell_of(member)

    def tell_of(self, *members: Member) -> None:
        """Let people see how devices are."""
        self.board.update_devices({member.name: self._told(member) for member in members})

    def _told(self, member: Member) -> dict[str, Any]:
        known = self.measured.devices.get(member.number)
        rates = {} if known is None else {name: known[name].rate for name in ("uplink_bps", "downlink_bps")}
        return {
            "state": _state(member),
            "cut": member.cut or None,
            "round": member.last_round,
            "rounds": member.rounds,
            "forward_s": member.forward_s,
            "backward_s": member.backward_s,
            "violations": member.violations,
            "last_error": member.last_error,
            **rates,
        }

    def wait_for(self, what: str) -> None:
        """Let people see what is being waited for."""
        if self.board.status.waiting_for != what:
            self.board.update(waiting_for=what)
            if what != "the devices' layers":  # which is no news: they are asked for in every block
                self.say(f"waiting for {what}")


def _state(member: Member) -> State:
    """Return how a device is, in a word; it trains once it has the layers of a block."""
    if member.quarantined:
        return "quarantined"
    if member.session is None:
        return "away"
    if member.late:
        return "late"
    return "training" if member.attempt else "waiting"
