"""Before an evaluation: batch-norm's statistics, estimated on the last mini-batches, are merged over all devices.

The moments of a device's own layers go to the fed server; those of the layers that run at the edge server are measured
there, on activations that devices send for it. The fed server merges both, and returns to each party the statistics of
its layers. If moments are lost on the way, one evaluation is skipped, and training goes on.
"""

from collections.abc import Awaitable, Callable, Mapping

from torch import Tensor

from adaptsfl.deploy.parties.edge.ledger import Ledger
from adaptsfl.deploy.parties.edge.model import EdgeModel, RejectedActivations
from adaptsfl.deploy.parties.edge.roster import Roster
from adaptsfl.deploy.parties.edge.sessions import Shapes
from adaptsfl.deploy.parties.fed.client import RetryingFedClient
from adaptsfl.deploy.protocol import events
from adaptsfl.deploy.service import NotNow
from adaptsfl.training.statistics import Moments, Norm


class Reestimation:
    """Carries out estimations.

    Args:
        compute: runs a function in the thread of the edge server's model.
    """

    def __init__(
        self,
        roster: Roster,
        fed: RetryingFedClient,
        shapes: Shapes,
        edge_model: EdgeModel,
        compute: Callable[..., Awaitable[dict[Norm, Moments]]],
    ) -> None:
        self.roster, self.fed, self.shapes, self.edge_model = roster, fed, shapes, edge_model
        self.compute = compute

    async def estimate(self, block: Ledger, sent: Mapping[int, Tensor]) -> events.Event:
        """Merge batch-norm's statistics for the model with which a block begins; return the resulting event."""
        weights = {device: self.roster.weight(device) for device in sent}
        try:
            own = await self.compute(self.edge_model.estimate, dict(sorted(sent.items())), weights)
            missing = await self._merge(block, own, sent)
        except RejectedActivations as error:
            return events.MomentsRejected(block.attempt, error.devices)
        except NotNow:  # the fed server was restarted, and has no moments of this block any more
            return events.MomentsMerged(block.attempt, merged=False)
        block.merged, members = not missing, self.roster.members
        numbers = tuple(members[name].number for name in missing if name in members)
        return events.MomentsMerged(block.attempt, block.merged, numbers)

    async def _merge(self, block: Ledger, own: dict[Norm, Moments], sent: Mapping[int, Tensor]) -> list[str]:
        """Merge the edge server's moments with those of devices; return devices whose moments the fed server lacks."""
        cuts = [block.cuts[device] for device in sent]
        block.bits += sum(8 * self.shapes.size(cut, block.sending) for cut in cuts)
        here, known = range(min(cuts) + 1, block.deepest + 1), range(min(cuts) + 1, block.known + 1)
        brought = {norm: own[norm] for norm in self.fed.moments.norms(known)}
        if brought:
            await self.fed.retry(lambda: self.fed.bring_moments(block.attempt, "", known, brought))
        if self.fed.moments.norms(range(1, block.known + 1)):
            weights = self.roster.weights(sent)
            missing = await self.fed.retry(lambda: self.fed.merge_moments(block.attempt, weights))
            if missing:
                return missing
        merged = await self.fed.retry(lambda: self.fed.fetch_moments(block.attempt, here)) if here else {}
        self.edge_model.take_statistics({**own, **merged})
        return []
