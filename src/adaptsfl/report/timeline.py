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
    """Seconds of every phase for one part of a mini-batch; entry k of each array belongs to device `devices[k]`.

    The server begins with a part when the last activations of it have arrived. With several parts, phases of a device
    overlap (see `latency.pipelined_s`).
    """

    devices: IntArray
    cuts: IntArray
    forward_s: FloatArray
    upload_s: FloatArray
    download_s: FloatArray
    backward_s: FloatArray
    uploading_s: FloatArray  # without the fixed seconds of a link, for which parts that follow one another pay once
    downloading_s: FloatArray
    server_s: float
    length_s: float  # of the round: when the last device has updated its layers
    parts: int = 1

    @property
    def server_start_s(self) -> float:
        """When the last device's first activations have arrived."""
        return float(np.max(self.forward_s + self.upload_s))

    @property
    def server_end_s(self) -> float:
        """When the server's last turn ends."""
        arrived_s = self.forward_s + self.upload_s + (self.parts - 1) * np.maximum(self.forward_s, self.uploading_s)
        return max(self.server_start_s + self.parts * self.server_s, float(np.max(arrived_s)) + self.server_s)

    @property
    def bars(self) -> FloatArray:
        """Start and end of a1, a2, a4 and a5 of every device: shape (4, 2, devices)."""
        f, u, d, g, k = self.forward_s, self.upload_s, self.download_s, self.backward_s, self.parts
        up, down, more = self.uploading_s, self.downloading_s, self.parts - 1
        first_s, last_s = self.server_start_s + self.server_s, self.server_end_s
        downloaded_s = np.maximum(last_s + d, first_s + d + more * down)
        updated_s = np.maximum(last_s + d + g, first_s + d + g + more * np.maximum(down, g))
        return np.array(
            (
                (0 * f, k * f),
                (f, f + u + more * np.maximum(f, up)),
                (first_s + 0 * d, downloaded_s),
                (np.maximum(first_s + d, k * f), np.maximum(updated_s, k * (f + g))),
            )
        )


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
    costs = costs if block.wire_dtype is None else costs.sent_as(block.wire_dtype)
    parts = block.micro_batches
    given = (costs, fleet, cuts, latency.part_size(run.batch_size, parts))
    return Timeline(
        devices=np.flatnonzero(present),
        cuts=cuts,
        forward_s=latency.client_forward_s(*given),
        upload_s=latency.activation_upload_s(*given),
        download_s=latency.gradient_download_s(*given),
        backward_s=latency.client_backward_s(*given),
        uploading_s=latency.activation_sending_s(*given),
        downloading_s=latency.gradient_sending_s(*given),
        server_s=float(latency.server_turn_s(*given)),
        length_s=float(latency.round_s(costs, fleet, cuts, run.batch_size, parts)),
        parts=parts,
    )


def _known(run: Run, block: Block) -> tuple[CutCosts, Server]:
    """Return the costs and the server that a block was planned with: a deployment measures both while it runs."""
    kept = block.restart
    if "server" not in kept:
        return run.costs, run.server
    forward, backward = (np.array(kept[name]) for name in ("forward_flops", "backward_flops"))
    return replace(run.costs, forward_flops=forward, backward_flops=backward), Server(**kept["server"])
