"""Time accounting at the edge server: the seconds of every phase, and the record of a block."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from adaptsfl import latency
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.edge.clock import ALL
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
        block.bits += 2 * sum(8 * self.shapes.size(block.cuts[k]) for k in present)
        last = max(present, key=lambda k: arrivals[k].came)
        first = number == block.first_round
        seconds = {
            k: self._fetched(block, k, arrivals[k]) if first else self._way(block, k, arrivals[k]) for k in present
        }
        phases = dict.fromkeys(("a1", "a2", "a3", "a4", "a5"), 0.0)
        if first and block.placed_at > arrivals[last].came:  # the edge server's own layers came last
            block.clock.passed(block.placed_at, EDGE_SERVER, b3=ALL)
        else:
            phases |= block.clock.passed(arrivals[last].came, self.names[last], **seconds[last])
        phases |= block.clock.passed(answered, EDGE_SERVER, a3=turn_s)
        phases.pop("b3", None)
        block.tested.clear()
        self.measured.server_took([block.cuts[device] for device in present], phases["a3"])
        return phases, block.clock.answered(answered, first=first)

    def _way(self, block: Ledger, device: int, arrival: Arrival) -> dict[str, float]:
        """Return the seconds of a4, a5, a1, a2 from a device's last gradients to its activations; measure its links.

        The device reports its passes, and receivers report the time from the first byte to the last. What is left is
        latency and the handling of messages; each direction gets half of it, unless test samples were in the way.
        """
        header, bits = arrival.header, 8 * self.shapes.size(block.cuts[device])
        down_s = bits / header.downlink if header.downlink > 0 else 0.0
        if any(device in before for before in block.present[-2:-1]) and device not in block.tested:
            whole_s = arrival.came - block.clock.answered_at
            rest_s = max(0.0, whole_s - header.forward_s - header.backward_s - arrival.seconds - down_s)
            down_s, up_s = down_s + rest_s / 2, arrival.seconds + rest_s / 2
            for link, seconds in (("uplink_bps", up_s), ("downlink_bps", down_s)):
                self.measured.transferred(device, link, 0.0, rest_s / 2)
                self.measured.transferred(device, link, bits, seconds)
        else:  # its gradients are of an earlier round, or its activations had to wait: as expected
            up_s = max(arrival.seconds, self.measured.transfer_s(device, "uplink_bps", bits))
            down_s = max(down_s, self.measured.transfer_s(device, "downlink_bps", bits))
        return {"a4": down_s, "a5": header.backward_s, "a1": header.forward_s, "a2": up_s}

    def _fetched(self, block: Ledger, device: int, arrival: Arrival) -> dict[str, float]:
        """Return the seconds of b3, a1 and a2, from the plan to a device's first activations; measure its download.

        The plan's own latency is part of b3. If a device does not say how long it fetched, that is as expected.
        """
        header, bits = arrival.header, 8 * self.shapes.size(block.cuts[device])
        layer_bits = self.layer_bits(block.cuts[device])
        if header.fetch_s > 0:
            fetch_s = self.latency_s(device, "downlink_bps") + header.fetch_s
            self.measured.transferred(device, "fed_downlink_bps", layer_bits, fetch_s)
        else:
            fetch_s = self.measured.transfer_s(device, "fed_downlink_bps", layer_bits)
        # Where batch-norm's statistics are estimated first, how long the upload took is not known, but as expected.
        up_s = max(arrival.seconds, self.measured.transfer_s(device, "uplink_bps", bits)) if block.estimated else ALL
        return {"b3": fetch_s, "a1": header.forward_s, "a2": up_s}

    def note_delivery(self, block: Ledger, device: int, delivered: wire.Delivered, now: float) -> None:
        """Note that a device has delivered its layers; measure its upload, and the download of its last gradients."""
        back = {"a5": delivered.backward_s, "b1": delivered.upload_s + self.latency_s(device, "uplink_bps")}
        block.delivered_last = device, now, back
        self.measured.transferred(device, "fed_uplink_bps", self.layer_bits(block.cuts[device]), back["b1"])
        if block.present and device in block.present[-1] and device not in block.tested:
            down_s = now - block.clock.answered_at - sum(back.values())
            self.measured.transferred(device, "downlink_bps", 8 * self.shapes.size(block.cuts[device]), down_s)

    def note_deliveries(self, block: Ledger) -> None:
        """Charge the time since the last gradients were sent, as the device that delivered last saw it."""
        if block.delivered_last is not None:
            device, at, back = block.delivered_last
            block.clock.passed(at, self.names[device], **back, a4=ALL)

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

    def latency_s(self, device: int, link: str) -> float:
        """Return how long the smallest message over a device's link is expected to take."""
        return self.measured.transfer_s(device, link, 0.0)
