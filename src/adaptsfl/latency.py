"""Every latency term of the paper's Section V in seconds, one function each, and the bottleneck of each maximum.

`cuts` holds the cut of every device, 1-based, along its last axis: one plan of shape (N,), many plans of shape
(plans, N), or every cut of every device at once as a column of shape (L, 1). Each function returns one entry per
device, or one per plan for what a server does.

Paper: every term is work over a speed, or bits over a rate. Here: fixed seconds come on top (`fleet.FIXED`), 0 by
default. Because: on real machines and networks every pass and every message takes some time however small it is. A
transfer of nothing takes no time.

    a1 client forward      T_i^F              b1 model upload      T_{c,i}^U and T_s^U
    a2 activation upload   T_{a,i}^U          b2 aggregation       (zero in the paper)
    a3 server's turn       T_s^F + T_s^B      b3 model download    T_{c,i}^D and T_s^D
    a4 gradient download   T_{g,i}^D
    a5 client backward     T_i^B
"""

from dataclasses import dataclass

import numpy as np

from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.costs import CutCosts
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Fleet

EDGE_SERVER, FED_SERVER = "edge server", "fed server"

PHASES = {
    "a1": "client forward",
    "a2": "activation upload",
    "a3": "server's turn",
    "a4": "gradient download",
    "a5": "client backward",
    "b1": "model upload",
    "b2": "aggregation",
    "b3": "model download",
}


def transfer_s(bits: FloatArray, rate_bps: FloatArray | float, fixed_s: FloatArray | float) -> FloatArray:
    """Seconds of a transfer: fixed ones, and the bits over the rate; 0 if there is nothing to send."""
    seconds = bits / rate_bps
    return np.where(bits > 0, fixed_s + seconds, 0.0) if np.any(fixed_s) else np.asarray(seconds)


def client_forward_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """a1, T_i^F = b ρ_{cut(i)} / f_i."""
    return fleet.forward_s + batch_size * costs.forward_flops[cuts - 1] / fleet.flops


def activation_upload_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """a2, T_{a,i}^U = b ψ_{cut(i)} / r_i^U."""
    return transfer_s(batch_size * costs.activation_bits[cuts - 1], fleet.uplink_bps, fleet.uplink_s)


def server_flops(costs: CutCosts, cuts: IntArray) -> FloatArray:
    """Φ_s^F + Φ_s^B per data sample: Σ_i (ρ_L − ρ_{cut(i)}) + (ϖ_L − ϖ_{cut(i)})."""
    return np.sum(remaining_flops(costs)[cuts - 1], axis=-1)


def remaining_flops(costs: CutCosts) -> FloatArray:
    """The work that cut j leaves to the server, per data sample: (ρ_L − ρ_j) + (ϖ_L − ϖ_j), one entry per cut."""
    forward, backward = costs.forward_flops, costs.backward_flops
    return (forward[-1] - forward) + (backward[-1] - backward)


def server_turn_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """a3, T_s^F + T_s^B = b (Φ_s^F + Φ_s^B) / f_s: the server works for all devices."""
    return fleet.server.turn_s + batch_size * server_flops(costs, cuts) / fleet.server.flops


def server_turns_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """a3 where devices train one after another, and the server has one turn for each."""
    return server_turn_s(costs, fleet, cuts, batch_size) + (fleet.size - 1) * fleet.server.turn_s


def gradient_download_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """a4, T_{g,i}^D = b χ_{cut(i)} / r_i^D."""
    return transfer_s(batch_size * costs.gradient_bits[cuts - 1], fleet.downlink_bps, fleet.downlink_s)


def client_backward_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """a5, T_i^B = b ϖ_{cut(i)} / f_i."""
    return fleet.backward_s + batch_size * costs.backward_flops[cuts - 1] / fleet.flops


def to_server_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """T_i^F + T_{a,i}^U: from the start of a round until the server has device i's activations."""
    return client_forward_s(costs, fleet, cuts, batch_size) + activation_upload_s(costs, fleet, cuts, batch_size)


def from_server_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """T_{g,i}^D + T_i^B: from the end of the server's turn until device i has updated its layers."""
    return gradient_download_s(costs, fleet, cuts, batch_size) + client_backward_s(costs, fleet, cuts, batch_size)


def client_model_upload_s(costs: CutCosts, fleet: Fleet, cuts: IntArray) -> FloatArray:
    """b1, T_{c,i}^U = δ_{cut(i)} / r_{i,f}^U."""
    return transfer_s(costs.client_model_bits[cuts - 1], fleet.fed_uplink_bps, fleet.fed_uplink_s)


def client_model_download_s(costs: CutCosts, fleet: Fleet, cuts: IntArray) -> FloatArray:
    """b3, T_{c,i}^D = δ_{cut(i)} / r_{i,f}^D."""
    return transfer_s(costs.client_model_bits[cuts - 1], fleet.fed_downlink_bps, fleet.fed_downlink_s)


def non_common_bits(costs: CutCosts, cuts: IntArray) -> FloatArray:
    """Λ_s = N max_i δ_{cut(i)} − Σ_i δ_{cut(i)}: per-device layers that the edge server holds and must exchange."""
    bits = costs.client_model_bits[cuts - 1]
    return np.sum(np.max(bits, axis=-1, keepdims=True) - bits, axis=-1)


def server_model_upload_s(costs: CutCosts, fleet: Fleet, cuts: IntArray) -> FloatArray:
    """b1, T_s^U = Λ_s / r_{s,f}."""
    return transfer_s(non_common_bits(costs, cuts), fleet.server.to_fed_bps, fleet.server.to_fed_s)


def server_model_download_s(costs: CutCosts, fleet: Fleet, cuts: IntArray) -> FloatArray:
    """b3, T_s^D = Λ_s / r_{f,s}."""
    return transfer_s(non_common_bits(costs, cuts), fleet.server.from_fed_bps, fleet.server.from_fed_s)


def averaging_s(costs: CutCosts, fleet: Fleet, deepest: IntArray) -> FloatArray:
    """b2: the fed server averages layers 1 … L_c of N devices, N δ_{L_c} bits. It depends on the deepest cut only."""
    server = fleet.server
    if server.averaging_bps is None:
        return np.full(np.shape(deepest), server.averaging_s)
    return server.averaging_s + fleet.size * costs.client_model_bits[deepest - 1] / server.averaging_bps


def round_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int, micro_batches: int = 1) -> FloatArray:
    """One round of split training: max_i {T_i^F + T_{a,i}^U} + T_s^F + T_s^B + max_i {T_{g,i}^D + T_i^B}.

    With k > 1 `micro_batches` the parts of a mini-batch overlap: see `pipelined_s`.
    """
    if micro_batches > 1:
        part = part_size(batch_size, micro_batches)
        terms = np.max(part_terms(costs, fleet, cuts, part, micro_batches), axis=-1)
        return pipelined_s(terms, server_turn_s(costs, fleet, cuts, part), micro_batches)
    return (
        np.max(to_server_s(costs, fleet, cuts, batch_size), axis=-1)
        + server_turn_s(costs, fleet, cuts, batch_size)
        + np.max(from_server_s(costs, fleet, cuts, batch_size), axis=-1)
    )


def activation_sending_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """b ψ_{cut(i)} / r_i^U: how long activations occupy a link, before the next ones can follow."""
    return batch_size * costs.activation_bits[cuts - 1] / fleet.uplink_bps


def gradient_sending_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """b χ_{cut(i)} / r_i^D: how long gradients occupy a link, before the next ones can follow."""
    return batch_size * costs.gradient_bits[cuts - 1] / fleet.downlink_bps


def part_size(batch_size: int, micro_batches: int) -> int:
    """b/k: the samples of one of k equal parts of a mini-batch."""
    if batch_size % micro_batches:
        problem = f"is {micro_batches}, which does not divide the batch size {batch_size}"
        raise InvalidInput("micro_batches", problem, "Give a divisor, so that all parts are equal")
    return batch_size // micro_batches


def part_terms(costs: CutCosts, fleet: Fleet, cuts: IntArray, part: int, micro_batches: int) -> FloatArray:
    """Return the five times whose maxima over devices determine a round with k > 1 parts: shape (5, …).

    With f, u, d and g, the seconds of one part's forward pass, upload, download and backward pass, and with u' and d',
    those of u and d without the fixed seconds:

        X_1 = f + u                       the first part has reached the server
        X_k = f + u + (k−1) max(f, u')    the last part has reached the server
        Y_1 = d + g                       from the end of the server's last turn to the end of the round
        Y_k = d + g + (k−1) max(d', g)    from the end of the server's first turn to the end of the round
        Z   = k (f + g)                   the device's own work

    A link's fixed seconds are its latency above all. Parts follow one another before the first has arrived, so that
    they pay for it once. The fixed seconds of passes and turns are work, for which every part pays.
    """
    forward, upload = client_forward_s(costs, fleet, cuts, part), activation_upload_s(costs, fleet, cuts, part)
    download, backward = gradient_download_s(costs, fleet, cuts, part), client_backward_s(costs, fleet, cuts, part)
    more, first, last = micro_batches - 1, forward + upload, download + backward
    up, down = activation_sending_s(costs, fleet, cuts, part), gradient_sending_s(costs, fleet, cuts, part)
    return np.stack(
        (
            first,
            first + more * np.maximum(forward, up),
            last,
            last + more * np.maximum(down, backward),
            micro_batches * (forward + backward),
        )
    )


def pipelined_s(terms: FloatArray, turn_s: FloatArray | float, micro_batches: int) -> FloatArray:
    """One round with k > 1 parts: max {X_1 + k s + Y_1, X_k + s + Y_1, X_1 + s + Y_k, Z}.

    `terms` are the maxima over devices of `part_terms`, and s = `turn_s` is the server's turn for one part of all
    devices. A device first runs all its forward passes, then the backward passes as gradients arrive; it sends and
    receives at the same time; the server trains part p as soon as all devices have sent it. Part p of device i arrives
    at X_p = f + u + (p−1) max(f, u'). The server's turn q ends at max_{p≤q} X_p + (q−p+1) s, and from there on the last
    k−q+1 parts take Y_{k−q+1} = d + g + (k−q) max(d', g). Besides, the first backward pass waits for the last forward
    pass, which adds Z. So a round takes the maximum of Z and of

        max_i X_p + (q−p+1) s + max_i Y_{k−q+1}     over 1 ≤ p ≤ q ≤ k.

    This is convex in (p, q), as a maximum of linear functions, so that a corner of the triangle attains its maximum:
    (1, k), (k, k) or (1, 1).
    """
    return np.max(_pipeline_paths(terms, turn_s, micro_batches), axis=0)


def _pipeline_paths(terms: FloatArray, turn_s: FloatArray | float, micro_batches: int) -> FloatArray:
    """Return the four paths of which the longest is critical: limited by the server, uploads, downloads, a device."""
    first_in, last_in, last_out, first_out, own = terms
    return np.stack(
        (
            first_in + micro_batches * turn_s + last_out,
            last_in + turn_s + last_out,
            first_in + turn_s + first_out,
            own + 0.0 * turn_s,
        )
    )


def aggregation_s(costs: CutCosts, fleet: Fleet, cuts: IntArray) -> FloatArray:
    """One aggregation: max_i {T_{c,i}^U, T_s^U} + b2 + max_i {T_{c,i}^D, T_s^D}."""
    uploads = np.max(client_model_upload_s(costs, fleet, cuts), axis=-1)
    downloads = np.max(client_model_download_s(costs, fleet, cuts), axis=-1)
    return (
        np.maximum(uploads, server_model_upload_s(costs, fleet, cuts))
        + averaging_s(costs, fleet, np.max(cuts, axis=-1))
        + np.maximum(downloads, server_model_download_s(costs, fleet, cuts))
    )


def block_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int, interval: int) -> FloatArray:
    """T(I, μ): I rounds and the aggregation that ends them."""
    return interval * round_s(costs, fleet, cuts, batch_size) + aggregation_s(costs, fleet, cuts)


def server_forward_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """T_s^F = b Σ_i (ρ_L − ρ_{cut(i)}) / f_s: the server's turn without the backward pass."""
    forward = costs.forward_flops[-1] - costs.forward_flops[cuts - 1]
    return fleet.server.turn_s + batch_size * np.sum(forward, axis=-1) / fleet.server.flops


def statistics_bits(costs: CutCosts, cuts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the bits of batch-norm statistics that each device, and the edge server, exchange with the fed server.

    A device sends the statistics of its own layers. The edge server sends those of the layers between the shallowest
    cut and L_c, for all devices together; it merges the statistics of the common layers by itself.
    """
    if costs.statistics_bits is None:
        return np.zeros(cuts.shape), np.zeros(cuts.shape[:-1])
    bits = costs.statistics_bits[cuts - 1]
    return bits, np.max(bits, axis=-1) - np.min(bits, axis=-1)


def reestimation_s(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> FloatArray:
    """Re-estimating batch-norm's statistics: one forward pass per device, upload and download of statistics."""
    (device_up, server_up), (device_down, server_down) = _statistics_transfers(costs, fleet, cuts)
    forward = np.max(to_server_s(costs, fleet, cuts, batch_size), axis=-1)
    return (
        forward
        + server_forward_s(costs, fleet, cuts, batch_size)
        + np.maximum(np.max(device_up, axis=-1), server_up)
        + np.maximum(np.max(device_down, axis=-1), server_down)
    )


def _statistics_transfers(
    costs: CutCosts, fleet: Fleet, cuts: IntArray
) -> tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]:
    """Return the seconds that each device, and the edge server, need to send statistics, and to receive them."""
    devices, edge = statistics_bits(costs, cuts)
    server = fleet.server
    upload = transfer_s(devices, fleet.fed_uplink_bps, fleet.fed_uplink_s)
    download = transfer_s(devices, fleet.fed_downlink_bps, fleet.fed_downlink_s)
    return (
        (upload, transfer_s(edge, server.to_fed_bps, server.to_fed_s)),
        (download, transfer_s(edge, server.from_fed_bps, server.from_fed_s)),
    )


@dataclass(frozen=True)
class PhaseTime:
    """How long one phase takes, and its bottleneck: the name of a device, or a server."""

    phase: str
    seconds: float
    bottleneck: str

    @property
    def title(self) -> str:
        """What the phase does, in words."""
        return PHASES[self.phase]

    @property
    def every_round(self) -> bool:
        """Whether the phase is part of every round (a1 to a5) or of an aggregation only (b1 to b3)."""
        return self.phase.startswith("a")


def phase_times(
    costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int, micro_batches: int = 1
) -> tuple[PhaseTime, ...]:
    """Break one round and one aggregation down: a1 to a5 add up to `round_s`, b1 to b3 to `aggregation_s`.

    The server waits for the device whose forward pass *and* upload end last, so that device is the bottleneck of
    both a1 and a2, and its own two times are the ones shown; likewise for a4 and a5. With k > 1 parts, each phase has
    the seconds that it takes on the critical path of `pipelined_s`: phases that overlap with it do not count.
    """
    rounds = _round_phases if micro_batches == 1 else _pipelined_phases
    return (
        *rounds(costs, fleet, cuts, batch_size, micro_batches),
        _slower("b1", client_model_upload_s(costs, fleet, cuts), server_model_upload_s(costs, fleet, cuts), fleet),
        PhaseTime("b2", float(averaging_s(costs, fleet, np.asarray(np.max(cuts)))), FED_SERVER),
        _slower("b3", client_model_download_s(costs, fleet, cuts), server_model_download_s(costs, fleet, cuts), fleet),
    )


def _round_phases(
    costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int, _micro_batches: int
) -> tuple[PhaseTime, ...]:
    """Return a1 to a5 of a round whose mini-batches are not divided."""
    first = int(np.argmax(to_server_s(costs, fleet, cuts, batch_size)))
    last = int(np.argmax(from_server_s(costs, fleet, cuts, batch_size)))
    forward = client_forward_s(costs, fleet, cuts, batch_size)[first]
    upload = activation_upload_s(costs, fleet, cuts, batch_size)[first]
    download = gradient_download_s(costs, fleet, cuts, batch_size)[last]
    backward = client_backward_s(costs, fleet, cuts, batch_size)[last]
    server = server_turn_s(costs, fleet, cuts, batch_size)
    return (
        PhaseTime("a1", float(forward), fleet.name(first)),
        PhaseTime("a2", float(upload), fleet.name(first)),
        PhaseTime("a3", float(server), EDGE_SERVER),
        PhaseTime("a4", float(download), fleet.name(last)),
        PhaseTime("a5", float(backward), fleet.name(last)),
    )


def _pipelined_phases(
    costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int, micro_batches: int
) -> tuple[PhaseTime, ...]:
    """Return a1 to a5 on the critical path of a round with k > 1 parts.

    On a path that waits for the last part's arrival, the slower of forward pass and upload counts k times, without the
    fixed seconds of all uploads but one, and the other once; likewise for download and backward pass. On a device's own
    path only its passes count.
    """
    part = part_size(batch_size, micro_batches)
    terms = part_terms(costs, fleet, cuts, part, micro_batches)
    turn_s = float(server_turn_s(costs, fleet, cuts, part))
    path = int(np.argmax(_pipeline_paths(np.max(terms, axis=-1), turn_s, micro_batches)))
    slowest = np.argmax(terms, axis=-1)
    if path == 3:
        first = last = int(slowest[4])
    else:
        first, last = int(slowest[1 if path == 1 else 0]), int(slowest[3 if path == 2 else 2])
    forward = float(client_forward_s(costs, fleet, cuts, part)[first])
    upload = float(activation_upload_s(costs, fleet, cuts, part)[first])
    download = float(gradient_download_s(costs, fleet, cuts, part)[last])
    backward = float(client_backward_s(costs, fleet, cuts, part)[last])
    up = float(activation_sending_s(costs, fleet, cuts, part)[first])
    down = float(gradient_sending_s(costs, fleet, cuts, part)[last])
    more = micro_batches - 1
    if path == 3:
        passes, upload, download = (micro_batches, micro_batches), 0.0, 0.0
    else:
        by_forward, by_backward = path == 1 and forward >= up, path == 2 and backward >= down
        passes = micro_batches if by_forward else 1, micro_batches if by_backward else 1
        upload += more * up if path == 1 and not by_forward else 0.0
        download += more * down if path == 2 and not by_backward else 0.0
    turns = (micro_batches, 1, 1, 0)[path]
    return (
        PhaseTime("a1", passes[0] * forward, fleet.name(first)),
        PhaseTime("a2", upload, fleet.name(first)),
        PhaseTime("a3", turns * turn_s, EDGE_SERVER),
        PhaseTime("a4", download, fleet.name(last)),
        PhaseTime("a5", passes[1] * backward, fleet.name(last)),
    )


def reestimation_times(costs: CutCosts, fleet: Fleet, cuts: IntArray, batch_size: int) -> tuple[PhaseTime, ...]:
    """Break a re-estimation down into the phases that it has in common with rounds: they add up to `reestimation_s`."""
    first = int(np.argmax(to_server_s(costs, fleet, cuts, batch_size)))
    uploads, downloads = _statistics_transfers(costs, fleet, cuts)
    return (
        PhaseTime("a1", float(client_forward_s(costs, fleet, cuts, batch_size)[first]), fleet.name(first)),
        PhaseTime("a2", float(activation_upload_s(costs, fleet, cuts, batch_size)[first]), fleet.name(first)),
        PhaseTime("a3", float(server_forward_s(costs, fleet, cuts, batch_size)), EDGE_SERVER),
        _slower("b1", *uploads, fleet),
        _slower("b3", *downloads, fleet),
    )


def _slower(phase: str, devices_s: FloatArray, server_s: FloatArray, fleet: Fleet) -> PhaseTime:
    """Return the phase as set by the slowest device or by the edge server, whichever takes longer."""
    slowest = int(np.argmax(devices_s))
    if server_s > devices_s[slowest]:
        return PhaseTime(phase, float(server_s), EDGE_SERVER)
    return PhaseTime(phase, float(devices_s[slowest]), fleet.name(slowest))
