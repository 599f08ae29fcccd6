"""The seconds of one round, device by device: computed from a block's record by the formulas of `latency`."""

from dataclasses import dataclass, replace

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.costs import CutCosts
from adaptsfl.fleet import FIXED, RATES, Fleet, Server
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block


@dataclass(frozen=True)
class Timeline:
    """Seconds of every phase; entry k of each array belongs to device `devices[k]` of the run.

    The server starts when the last activations have arrived; all devices wait until it is done.
    """

    devices: IntArray
    cuts: IntArray
    forward_s: FloatArray
    upload_s: FloatArray
    download_s: FloatArray
    backward_s: FloatArray
    server_s: float

    @property
    def server_start_s(self) -> float:
        """When the last device's activations have arrived."""
        return float(np.max(self.forward_s + self.upload_s))

    @property
    def length_s(self) -> float:
        """When the last device has updated its layers."""
        return self.server_start_s + self.server_s + float(np.max(self.download_s + self.backward_s))


def round_timeline(run: Run, block: Block) -> Timeline | None:
    """Return a round of the block with the resources it was planned for; None without them or if devices take turns."""
    if run.trainer != "engine" or any(len(block.resources.get(name, ())) != len(run.devices) for name in RATES):
        return None
    rates = np.array([block.resources[name] for name in RATES])
    present = (np.array(block.cuts) > 0) & np.all(np.isfinite(rates) & (rates > 0), axis=0)
    if not present.any():
        return None
    fixed = {name: np.array(block.resources[name])[present] for name in FIXED if name in block.resources}
    costs, server = _known(run, block)
    fleet = Fleet(**dict(zip(RATES, rates[:, present], strict=True)), **fixed, server=server)
    cuts = np.array(block.cuts)[present]
    given = (costs, fleet, cuts, run.batch_size)
    return Timeline(
        devices=np.flatnonzero(present),
        cuts=cuts,
        forward_s=latency.client_forward_s(*given),
        upload_s=latency.activation_upload_s(*given),
        download_s=latency.gradient_download_s(*given),
        backward_s=latency.client_backward_s(*given),
        server_s=float(latency.server_turn_s(*given)),
    )


def _known(run: Run, block: Block) -> tuple[CutCosts, Server]:
    """Return the costs and the server that a block was planned with: a deployment measures both while it runs."""
    kept = block.restart
    if "server" not in kept:
        return run.costs, run.server
    forward, backward = (np.array(kept[name]) for name in ("forward_flops", "backward_flops"))
    return replace(run.costs, forward_flops=forward, backward_flops=backward), Server(**kept["server"])
