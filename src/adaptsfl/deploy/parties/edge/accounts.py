"""Time accounting at the edge server: the seconds of every phase, and the record of a block."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from adaptsfl import latency
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.edge.clock import ALL
from adaptsfl.deploy.parties.edge.ledger import Ledger
from adaptsfl.deploy.parties.edge.resources import MeasuredFleet
from adaptsfl.deploy.parties.edge.sessions import Arrival, Shapes
from adaptsfl.deploy.sending import Sending
from adaptsfl.latency import EDGE_SERVER
from adaptsfl.runs.backend import Learned, Scene, Trained


@dataclass(frozen=True)
class TrainedPart:
    """A part of a round that was trained; the only one, if mini-batches are not divided.

    Attributes:
        arrivals: the activations of all devices that took part.
        answered: when the gradients were sent.
        turn_s: the server's share of the time since the last activations arrived.
        loss: the mean over devices.
        compared_s: how long types of numbers were compared before that.
    """

    arrivals: Mapping[int, Arrival]
    answered: float
    turn_s: float
    loss: float
    compared_s: float = 0.0


class Accounts:
    """Charges the time of blocks to phases.

    Args:
        names: the names of all devices, in the fleet's order.
    """

    def __init__(self, names: Sequence[str], shapes: Shapes, measured: MeasuredFleet) -> None:
        self.names, self.shapes, self.measured = names, shapes, measured

    def note_round(self, block: Ledger, number: int, parts: Sequence[TrainedPart]) -> tuple[dict[str, float], float]:
        """Charge one round, as the devices with the last activations saw it; return its phases, and its total time."""
        begin, end = parts[0], parts[-1]
        block.present.append(tuple(sorted(end.arrivals)))
        block.losses.append(sum(part.loss for part in parts) / len(parts))
        for part in parts:
            block.bits += 2 * sum(self._bits(block, number, device) for device in part.arrivals)
        first = number == block.first_round
        last = max(sorted(begin.arrivals), key=lambda k: begin.arrivals[k].came)
        came = {k: [part.arrivals[k] for part in parts if k in part.arrivals] for k in sorted(begin.arrivals)}
        way = self._fetched if first else self._way
        seconds = {k: way(block, number, k, arrivals) for k, arrivals in came.items()}
        phases = dict.fromkeys(("a1", "a2", "a3", "a4", "a5"), 0.0)
        if first and block.placed_at > begin.arrivals[last].came:  # the edge server's own layers came last
            block.clock.passed(block.placed_at, EDGE_SERVER, b3=ALL)
        else:
            phases |= block.clock.passed(begin.arrivals[last].came, self.names[last], **seconds[last])
        block.clock.passed(begin.arrivals[last].came + begin.compared_s)
        phases |= block.clock.passed(begin.answered, EDGE_SERVER, a3=begin.turn_s)
        for part in parts[1:]:
            for phase, part_s in self._pass_part(block, part).items():
                phases[phase] += part_s
        phases.pop("b3", None)
        block.tested.clear()
        block.answered = tuple(part.answered for part in parts)
        cuts = [block.cuts[device] for device in sorted(end.arrivals)]
        self.measured.server_took(cuts, phases["a3"] / len(parts), len(parts))
        return phases, block.clock.answered(end.answered, first=first)

    def _pass_part(self, block: Ledger, part: TrainedPart) -> dict[str, float]:
        """Charge the time from one part to the next: the wait for its last activations, then the server's turn."""
        last = max(sorted(part.arrivals), key=lambda k: part.arrivals[k].came)
        arrival = part.arrivals[last]
        phase = "a1" if arrival.header.forward_s > arrival.seconds else "a2"
        waited = block.clock.passed(arrival.came, self.names[last], **{phase: ALL})
        return waited | block.clock.passed(part.answered, EDGE_SERVER, a3=part.turn_s)

    def _way(self, block: Ledger, number: int, device: int, arrivals: Sequence[Arrival]) -> dict[str, float]:
        """Return the seconds of a4, a5, a1, a2 from a device's last gradients to its activations; measure its links.

        The device reports its passes, and receivers report the time from the first byte to the last. What is left is
        latency and the handling of messages; each direction gets half of it, unless test samples were in the way.
        """
        arrival, header = arrivals[0], arrivals[0].header
        up_bits, down_bits = (self._bits(block, round_, device) for round_ in (number, number - 1))
        down_s = down_bits / header.downlink if header.downlink > 0 else 0.0
        behind_s, back_s = _behind_s(block.answered, down_s), _back_s(block, number - 1, header)
        if any(device in before for before in block.present[-2:-1]) and device not in block.tested:
            whole_s = arrival.came - block.clock.answered_at
            rest_s = max(0.0, whole_s - header.forward_s - back_s - arrival.seconds - down_s - behind_s)
            down_s, up_s = down_s + rest_s / 2, arrival.seconds + rest_s / 2
            each_s = rest_s / 2 + sum(one.seconds for one in arrivals) / len(arrivals)
            for link, bits, seconds in (("uplink_bps", up_bits, each_s), ("downlink_bps", down_bits, down_s)):
                self.measured.transferred(device, link, 0.0, rest_s / 2)
                self.measured.transferred(device, link, bits, seconds)
        else:  # its gradients are of an earlier round, or its activations had to wait: as expected
            up_s = max(arrival.seconds, self.measured.transfer_s(device, "uplink_bps", up_bits))
            down_s = max(down_s, self.measured.transfer_s(device, "downlink_bps", down_bits))
        return {"a4": behind_s + down_s, "a5": back_s, "a1": header.forward_s, "a2": up_s}

    def _fetched(self, block: Ledger, number: int, device: int, arrivals: Sequence[Arrival]) -> dict[str, float]:
        """Return the seconds of b3, a1 and a2, from the plan to a device's first activations; measure its download.

        The plan's own latency is part of b3. If a device does not say how long it fetched, that is as expected.
        """
        arrival, header = arrivals[0], arrivals[0].header
        bits, layer_bits = self._bits(block, number, device), self.layer_bits(block.cuts[device])
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
        back_s = _back_s(block, block.last_round, delivered)
        back = {"a5": back_s, "b1": delivered.upload_s + self.latency_s(device, "uplink_bps")}
        block.delivered_last = device, now, back
        self.measured.transferred(device, "fed_uplink_bps", self.layer_bits(block.cuts[device]), back["b1"])
        if block.present and device in block.present[-1] and device not in block.tested and len(block.answered) == 1:
            down_s = now - block.clock.answered_at - sum(back.values())
            self.measured.transferred(device, "downlink_bps", self._bits(block, block.last_round, device), down_s)

    def note_deliveries(self, block: Ledger) -> None:
        """Charge the time since the last gradients were sent, as the device that delivered last saw it."""
        if block.delivered_last is not None:
            device, at, back = block.delivered_last
            block.clock.passed(at, self.names[device], **back, a4=ALL)

    def predicted(self, scene: Scene, cuts: Sequence[int], sending: Sending) -> dict[str, float]:
        """Return the seconds of every phase of one round and of one averaging, as the latency model predicts them."""
        costs, batch_size = scene.costs.sent_as(sending.wire_dtype), self.measured.batch_size
        times = latency.phase_times(costs, scene.fleet, np.array(cuts), batch_size, sending.micro_batches)
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
            Learned(tuple(block.losses), evaluations, block.averaged.divergence, wires=block.wires),
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

    def _bits(self, block: Ledger, round_: int, device: int) -> float:
        """Return the bits of one message of a device's activations, or gradients, in a round."""
        return 8.0 * self.shapes.size(block.cuts[device], block.sending, round_)

    def layer_bits(self, cut: int) -> float:
        """Return the bits of the layers that a device with this cut delivers to the fed server."""
        return float(self.measured.nominal.client_model_bits[cut - 1])

    def latency_s(self, device: int, link: str) -> float:
        """Return how long the smallest message over a device's link is expected to take."""
        return self.measured.transfer_s(device, link, 0.0)


def _behind_s(answered: Sequence[float], download_s: float) -> float:
    """Return how long the last gradients of a round waited until a link had carried those of the parts before."""
    last = len(answered) - 1
    carried = max((at + (last - part) * download_s for part, at in enumerate(answered)), default=0.0)
    return max(0.0, carried - answered[-1]) if answered else 0.0


def _back_s(block: Ledger, round_: int, header: wire.Activations | wire.Delivered) -> float:
    """Return a device's seconds from the arrival of a round's last gradients to its update."""
    return header.update_s if block.sending.parts(round_) > 1 else header.backward_s
