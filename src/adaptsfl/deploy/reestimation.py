"""Before an evaluation: batch-norm's statistics, estimated on the last mini-batches, are merged over all devices.

The moments of a device's own layers go to the fed server; those of the layers that run at the edge server are measured
there, on activations that devices send for it. The fed server merges both, and hands back to each what it evaluates
with. Whatever is lost on the way costs one evaluation, and training goes on.
"""

import math
import time
from collections.abc import Awaitable, Callable

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.block import Estimation, OpenBlock
from adaptsfl.deploy.edge_model import EdgeModel, Spoilt
from adaptsfl.deploy.fed_client import PatientFed
from adaptsfl.deploy.roster import Roster
from adaptsfl.deploy.service import NotNow
from adaptsfl.deploy.sessions import Arrival, Member, Shapes
from adaptsfl.errors import BadMessage
from adaptsfl.training.statistics import Moments, Norm


class Reestimation:
    """Carries out estimations.

    Args:
        compute: lets the edge server's model do some work.
        deadline_s: after which those who have not sent are not waited for.
        blame: called with a device whose activations came to no numbers.
    """

    def __init__(
        self,
        roster: Roster,
        fed: PatientFed,
        shapes: Shapes,
        edge_model: EdgeModel,
        compute: Callable[..., Awaitable[dict[Norm, Moments]]],
        deadline_s: Callable[[], float],
        blame: Callable[[OpenBlock, Member], None],
    ) -> None:
        self.roster, self.fed, self.shapes, self.edge_model = roster, fed, shapes, edge_model
        self.compute, self.deadline_s, self.blame = compute, deadline_s, blame

    def take(self, block: OpenBlock, member: Member, arrival: Arrival) -> bool:
        """Take in what a device sent for an estimation; return whether it is of use."""
        estimation = block.estimation
        if estimation is None or arrival.told.round != estimation.round:
            raise BadMessage(f"activations of round {arrival.told.round} came for an estimation that nobody asked for")
        member.late = False
        if estimation.closed:
            return False
        estimation.sent[member.number] = arrival.activations
        self.roster.wake()
        return True

    async def carry_out(self, block: OpenBlock, next_round: int) -> bool:
        """Merge the statistics of the model with which a block begins, and let devices evaluate with them.

        Returns whether it came to that. If not, devices are told to go on with the next round.
        """
        estimation = block.estimation
        assert estimation is not None
        try:
            estimation.merged = await self._merge(block, estimation)
        except NotNow:  # the fed server was restarted, and has no moments of this block any more
            estimation.merged = False
        estimation.closed = True
        if estimation.merged:
            message = wire.ToDevice(evaluate=wire.Evaluate(attempt=block.attempt))
        else:
            message = wire.ToDevice(skip=wire.Skip(next_round=next_round))
            self.roster.say("batch-norm's statistics could not be re-estimated: no evaluation this time")
        for member in self.roster.here():
            if member.session is not None and member.session.planned == block.attempt:
                member.session.send(message)
        return estimation.merged

    async def _merge(self, block: OpenBlock, estimation: Estimation) -> bool:
        own = await self._own_moments(block, estimation)
        if own is None:
            return False
        cuts = {device: block.cuts[device] for device in estimation.sent}
        weights = {self.roster.by_number[device].name: self.roster.weight(device) for device in sorted(cuts)}
        block.bits += sum(8 * self.shapes.size(cut) for cut in cuts.values())
        here, known = range(min(cuts.values()) + 1, block.deepest + 1), range(min(cuts.values()) + 1, block.known + 1)
        brought = {norm: own[norm] for norm in self.fed.moments.norms(known)}
        if brought:
            await self.fed.patiently(lambda: self.fed.bring_moments(block.attempt, "", known, brought))
        if self.fed.moments.norms(range(1, block.known + 1)):
            missing = await self.fed.patiently(lambda: self.fed.merge_moments(block.attempt, weights))
            if missing:
                self._accuse(missing)
                return False
        merged = await self.fed.patiently(lambda: self.fed.fetch_moments(block.attempt, here)) if here else {}
        self.edge_model.take_statistics({**own, **merged})
        return True

    async def _own_moments(self, block: OpenBlock, estimation: Estimation) -> dict[Norm, Moments] | None:
        """Return the moments of the layers that run here, once devices have sent; None if too few have."""
        while True:
            await self._arrivals(block, estimation)
            if len(estimation.sent) < self.roster.quorum:
                return None
            weights = {device: self.roster.weight(device) for device in estimation.sent}
            try:
                return await self.compute(self.edge_model.estimate, dict(sorted(estimation.sent.items())), weights)
            except Spoilt as error:
                for member in [self.roster.by_number[device] for device in error.devices]:
                    del estimation.sent[member.number]
                    self.blame(block, member)
                    if member.session is not None:
                        member.session.close(BadMessage("activations came that lead to no numbers"))
                self.roster.check()

    async def _arrivals(self, block: OpenBlock, estimation: Estimation) -> None:
        """Wait until all who are there have sent, or the deadline has passed."""
        deadline = time.monotonic() + self.deadline_s()
        while True:
            here = [member for member in self.roster.here() if member.attempt == block.attempt]
            waiting = [m for m in here if m.number not in estimation.sent and not m.late]
            enough = len(estimation.sent) >= self.roster.quorum
            if (enough and not waiting) or time.monotonic() >= deadline:
                for member in waiting:
                    member.late = True
                return
            await self.roster.change(max(0.0, min(deadline - time.monotonic(), math.inf)))

    def _accuse(self, names: list[str]) -> None:
        """Send those away whose moments are not where they said."""
        for member in [self.roster.members[name] for name in names if name in self.roster.members]:
            member.failed_to_deliver()
            if member.session is not None:
                member.session.close(BadMessage("it said that its moments are at the fed server, and none are"))
