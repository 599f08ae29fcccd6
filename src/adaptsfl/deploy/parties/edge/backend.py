"""The backend of `runs` for a real fleet: the training loop has a thread of its own, beside the event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.decisions import Decision
from adaptsfl.deploy.parties.edge.resources import MeasuredFleet
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import FIXED, RATES, Fleet, Server
from adaptsfl.latency import part_size
from adaptsfl.policies import Policy, make_policy
from adaptsfl.runs.backend import Order, Scene, Trained
from adaptsfl.runs.record import Block

LONGEST_BLOCK = 1000  # most rounds that a planner may choose between averagings; a crash loses at most these
ENDING_S = 5.0  # timeout for the loop's thread to end; a policy that is still planning may take longer
T = TypeVar("T")


class Conducting(Protocol):
    """The party that carries out orders, on the event loop."""

    async def observe(self) -> Scene:
        """Return the connected devices, once they are enough."""
        ...

    async def train(self, order: Order, scene: Scene) -> Trained:
        """Train one block of rounds, and have the layers of devices averaged."""
        ...


class DeployedBackend:
    """Implements the backend interface of `runs` for a conductor.

    Its methods are called in the loop's thread and wait there, so that neither a slow policy nor a slow disk blocks the
    event loop.

    Args:
        mixes_samples: whether the model normalises over mini-batches, so that it matters into what parts these are
            divided.
    """

    measures = False
    compares = True

    def __init__(
        self,
        conductor: Conducting,
        terms: Terms,
        measured: MeasuredFleet,
        policy: Policy,
        *,
        mixes_samples: bool = False,
    ) -> None:
        self.conductor, self.terms, self.measured, self.policy = conductor, terms, measured, policy
        ghosts = getattr(terms.recipe.training, "ghost_batches", False)
        self.undivided = mixes_samples and not ghosts
        self.recipe = terms.recipe.model_copy(update={"run": terms.run})
        self.seed, self.devices, self.layers = terms.seed, terms.devices, measured.nominal.layers
        self.planning_limit_s: float | None = terms.recipe.deploy.plan_deadline_s
        allowed = [k for k in self.recipe.planner.allowed_cuts or range(1, self.layers + 1) if k >= terms.floor]
        given = self.recipe.planner
        longest = max(given.interval or 1, min(given.max_interval or LONGEST_BLOCK, LONGEST_BLOCK))
        limits: dict[str, object] = {"allowed_cuts": allowed, "max_interval": longest}
        if given.micro_batches == "auto" and self.undivided:
            limits["micro_batches"] = 1
        self.limits = given.model_copy(update=limits)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._called: Future[Any] | None = None
        self._stopped = threading.Event()

    # --- the backend interface of `runs` ---

    def observe(self, round_: int) -> Scene:
        """Wait until enough devices are connected; return them and their resources."""
        return self._call(self.conductor.observe())

    def check(self, decision: Decision) -> None:
        """Reject decisions that devices and the fed server cannot carry out."""
        if decision.interval is None or decision.layer_intervals or decision.placed is not None:
            problem = f"{self.policy.title} averages some layers at other times than others, or never"
            raise InvalidInput("run.policies", problem, "A deployment averages all client-specific layers together")
        part_size(self.terms.batch_size, decision.micro_batches)  # it has to divide mini-batches
        if decision.micro_batches > 1 and self.undivided:
            problem = f"is {decision.micro_batches}, but batch-norm would normalise every part by itself"
            remedy = "Give 1, set training.ghost_batches, or choose another norm for the model"
            raise InvalidInput("decision.micro_batches", problem, remedy)
        if decision.wire_dtype not in (None, *WIRE_DTYPES):
            problem = f"is {decision.wire_dtype!r}"
            raise InvalidInput("decision.wire_dtype", problem, f"Choose one of: {', '.join(WIRE_DTYPES)}")
        if min(decision.cuts) < self.terms.floor:
            problem = f"is {self.terms.floor}, but {self.policy.title} cuts at {min(decision.cuts)}"
            raise InvalidInput("deploy.cut_floor", problem, "Lower it, or give cuts from it on")

    def block_rounds(self, decision: Decision) -> int:
        """Return the interval: a run can resume after every averaging, so every averaging ends a block."""
        assert decision.interval is not None
        return decision.interval

    def train(self, order: Order, scene: Scene) -> Trained:
        """Train one block, and have it averaged."""
        return self._call(self.conductor.train(order, scene))

    def scene_of(self, block: Block) -> Scene:
        """Return the scene of a block that an earlier process has recorded."""
        kept, names = block.restart, self.terms.names
        members = tuple(device for device, rate in enumerate(block.resources[RATES[0]]) if not np.isnan(rate))
        recorded = (*RATES, *(name for name in FIXED if name in block.resources))
        rates = {name: np.array([block.resources[name][device] for device in members]) for name in recorded}
        forward, backward = (np.array(kept[name]) for name in ("forward_flops", "backward_flops"))
        costs = replace(self.measured.nominal, forward_flops=forward, backward_flops=backward)
        fleet = Fleet(**rates, server=Server(**kept["server"]), names=tuple(names[device] for device in members))
        return Scene(members, fleet, costs, kept["epoch_rounds"])

    # --- two threads ---

    async def beside(self, work: Callable[[], T], interrupt: Callable[[], None] = lambda: None) -> T:
        """Do some work in the loop's thread; on cancellation, end the call that it waits for, and then the thread.

        Args:
            interrupt: called on cancellation, to end any other wait of the work.
        """
        self._event_loop, done = asyncio.get_running_loop(), Future[T]()

        def answer() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=answer, name="run", daemon=True).start()
        waiting = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._stopped.set()
            interrupt()
            if self._called is not None:
                self._called.cancel()
            await asyncio.wait([waiting], timeout=ENDING_S)
            if waiting.done():
                waiting.exception()  # retrieved only because asyncio warns of errors that were never retrieved
            raise

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._event_loop is not None
        if self._stopped.is_set():
            work.close()
            raise asyncio.CancelledError
        self._called = called = asyncio.run_coroutine_threadsafe(work, self._event_loop)
        if self._stopped.is_set():  # it may have been set meanwhile
            called.cancel()
        return called.result()


def deployed_policy(terms: Terms) -> Policy:
    """Return the one policy that a deployment follows."""
    run = terms.run
    if len(run.policies) != 1:
        raise InvalidInput("run.policies", f"names {len(run.policies)}", "A deployment follows one: give one")
    name = run.policies[0]
    policy = make_policy(name, **run.options.get(name, {}))
    if policy.trainer != "engine":
        problem = f"{name} trains devices in turns, or without them"
        raise InvalidInput("run.policies", problem, "Give one that trains all devices at once, such as adaptsfl")
    return policy
