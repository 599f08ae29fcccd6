"""Time accounting at the edge server: the seconds of every phase, and the record of a block."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from adaptsfl import latency
from adaptsfl.deploy.parties.edge.ledger import Ledger
from adaptsfl.deploy.parties.edge.resources import MeasuredFleet
from adaptsfl.deploy.parties.edge.sessions import Arrival, Shapes
from adaptsfl.latency import EDGE_SERVER
from adaptsfl.runs.backend import Learned, Scene, Trained


class Accounts:
    """Charges the time of blocks to phases.

    Args:
        names: the names of all devices, in the fleet's order.
    """

    def __init__(self, names: Sequence[str], shapes: Shapes, measured: MeasuredFleet) -> None:
        self.names, self.shapes, self.measured = names, shapes, measured

    def note_round(
        self, block: Ledger, number: int, arrivals: Mapping[int, Arrival], loss: float, answered: float, turn_s: float
    ) -> tuple[dict[str, float], float]:
        """Charge one round, as the device with the last activations saw it; return its phases, and its total time.

        Args:
            arrivals: the activations of all devices that took part.
            answered: when the gradients were sent.
            turn_s: the server's share of the time since the last activations arrived.
        """
        present = tuple(sorted(arrivals))
        block.present.append(present)
        block.losses.append(loss)
        block.headers |= {k: arrivals[k].header for k in present}
        block.bits += 2 * sum(8 * self.shapes.size(block.cuts[k]) for k in present)
        last = max(present, key=lambda k: arrivals[k].came)
        name, arrival, first = self.names[last], arrivals[last], number == block.first_round
        before = {"b3": self._fetch_s(block, last)} if first else self._back_s(block, last)
        phases = dict.fromkeys(("a1", "a2", "a3", "a4", "a5"), 0.0)
        phases |= block.clock.passed(arrival.came, name, a2=arrival.seconds, a1=arrival.header.forward_s, **before)
        phases |= block.clock.passed(answered, EDGE_SERVER, a3=turn_s)
        phases.pop("b3", None)
        self.measured.server_took([block.cuts[device] for device in present], phases["a3"])
        return phases, block.clock.answered(answered, first=first)

    def note_deliveries(self, block: Ledger) -> None:
        """Charge the time since the last gradients were sent, as the device that delivered last saw it."""
        if block.delivered_last is not None:
            device, at, rate = block.delivered_last
            upload_s = self.layer_bits(block.cuts[device]) / rate if rate > 0 else 0.0
            block.clock.passed(at, self.names[device], b1=upload_s, **self._back_s(block, device))

    def predicted(self, scene: Scene, cuts: Sequence[int]) -> dict[str, float]:
        """Return the seconds of every phase of one round and of one averaging, as the latency model predicts them."""
        times = latency.phase_times(scene.costs, scene.fleet, np.array(cuts), self.measured.batch_size)
        return {time.phase: time.seconds for time in times}

    def trained(
        self,
        block: Ledger,
        began_s: float,
        ended_s: float,
    ) -> Trained:
        """Return the result of a block that began and ended so many seconds after the start of the run."""
        assert block.averaged is not None
        evaluations = () if block.evaluation is None else (block.evaluation,)
        took_part = {device for present in block.present for device in present}
        everybody = all(len(present) == len(self.names) for present in block.present)
        scene = block.scene
        return Trained(
            Learned(tuple(block.losses), evaluations, block.averaged.divergence),
            cuts=tuple(cut if k in took_part else 0 for k, cut in enumerate(block.cuts)),
            time_s=ended_s,
            seconds=dict(block.clock.seconds),
            bottleneck=block.clock.bottleneck,
            bits=block.bits,
            predicted_s=block.predicted_s,
            evaluations=tuple((t, began_s, accuracy, loss) for t, accuracy, loss in evaluations),
            present=None if everybody else tuple(block.present),
            reestimated=bool(evaluations) and block.estimated,
            estimates={"predicted": block.predicted, "measured": block.clock.data()},
            restart={
                "server": asdict(scene.fleet.server),
                "forward_flops": scene.costs.forward_flops,
                "backward_flops": scene.costs.backward_flops,
                "epoch_rounds": scene.epoch_rounds,
            },
        )

    def layer_bits(self, cut: int) -> float:
        """Return the bits of the layers that a device with this cut delivers to the fed server."""
        return float(self.measured.nominal.client_model_bits[cut - 1])

    def _back_s(self, block: Ledger, device: int) -> dict[str, float]:
        """Return the seconds of a device's last download and backward pass, as it reported them."""
        header = block.headers.get(device)
        if header is None:
            return {}
        bits = 8 * self.shapes.size(block.cuts[device])
        return {"a4": bits / header.downlink if header.downlink > 0 else 0.0, "a5": header.backward_s}

    def _fetch_s(self, block: Ledger, device: int) -> float:
        """Return the estimated seconds in which a device fetches its layers."""
        return self.layer_bits(block.cuts[device]) / self.measured.devices[device]["fed_downlink_bps"].rate
