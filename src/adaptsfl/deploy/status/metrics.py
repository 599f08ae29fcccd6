"""The status of a running edge server as Prometheus metrics, read from the board at every request."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from adaptsfl.deploy.status.board import Board, DeviceStatus, RoundsBelief, State, Status
from adaptsfl.fleet import FIXED, RATES, Server
from adaptsfl.runs.beliefs import HIGH, LOW

Rows = Iterable[tuple[tuple[str, ...], float | None]]  # label values and the metric's value; None is left out


class StatusCollector(Collector):
    """Collects the metrics of the board's present status."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that has a value."""
        status = self._board.status
        of_all = (_of_run(status), _of_devices(status.devices), _of_phases(status), _of_beliefs(status))
        for family in (family for families in of_all for family in families):
            if family.samples:
                yield family


def metrics_text(board: Board) -> bytes:
    """Return the board's present status in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(board))
    return generate_latest(registry)


def _of_run(status: Status) -> Iterator[Metric]:
    yield InfoMetricFamily("adaptsfl_run", "The run that is trained.", {"run": _label(status.run)})
    yield _gauge("start_time_seconds", "When the edge server started, in seconds since 1970.", status.started_at)
    yield _gauge("round", "Rounds done.", status.round)
    yield _gauge("planned_rounds", "Rounds after which training ends.", status.rounds_planned)
    yield _gauge("block", "Blocks begun: rounds between two plans.", status.block)
    yield _gauge("interval_rounds", "I: rounds between two aggregations.", status.interval)
    yield _gauge("deepest_cut", "L_c: layers of the device that holds most of them.", status.deepest)
    yield _gauge("micro_batches", "k: parts of every mini-batch.", status.micro_batches)
    yield _gauge("waiting", "1 while the server waits for somebody, 0 while it trains.", bool(status.waiting_for))
    yield _gauge("loss", "Training loss of the last round.", _last(status.losses))
    yield _gauge("accuracy_ratio", "Test accuracy at the last evaluation, 0 to 1.", _last(status.evaluations))
    yield _gauge("round_seconds", "One round as measured, smoothed.", status.round_s)
    yield _gauge("predicted_round_seconds", "One round as predicted.", status.predicted_round_s)
    yield _counter("received_bytes", "Tensors received from devices.", [((), status.received_bytes)])
    yield _counter("sent_bytes", "Tensors sent to devices.", [((), status.sent_bytes)])


def _of_devices(devices: Sequence[DeviceStatus]) -> Iterator[Metric]:
    named = [((_label(device.name),), device) for device in devices]
    each = ("device",)
    yield _gauges("device_present", "1 if training can count on the device.", ((n, d.present) for n, d in named), each)
    yield _gauges(
        "device_state",
        "1 for the state that the device is in.",
        (((*n, state), d.state == state) for n, d in named for state in get_args(State)),
        ("device", "state"),
    )
    yield _gauges("device_cut", "Layers that the device holds.", ((n, d.cut) for n, d in named), each)
    yield _gauges("device_last_round", "The last round it took part in.", ((n, d.round) for n, d in named), each)
    yield _gauges("device_forward_seconds", "Its forward pass.", ((n, d.forward_s) for n, d in named), each)
    yield _gauges("device_backward_seconds", "Its backward pass.", ((n, d.backward_s) for n, d in named), each)
    yield _counter("device_rounds", "Rounds it took part in.", ((n, d.rounds) for n, d in named), each)
    yield _counter("device_violations", "Broken rules of the protocol.", ((n, d.violations) for n, d in named), each)


def _of_phases(status: Status) -> Iterator[Metric]:
    measured = (((phase,), measured_s) for phase, _, measured_s in status.phases)
    predicted = (((phase,), predicted_s) for phase, predicted_s, _ in status.phases)
    yield _gauges("phase_seconds", "A phase of a round (a) or aggregation (b) as measured.", measured, ("phase",))
    yield _gauges("predicted_phase_seconds", "The same as predicted.", predicted, ("phase",))


def _of_beliefs(status: Status) -> Iterator[Metric]:
    """Yield what the block was planned with: how rounds grow with the interval, and resources."""
    if status.rounds_believed is not None:
        yield from _of_rounds(status.rounds_believed)
    named = [((_label(device.name),), device.believed) for device in status.devices if device.believed is not None]
    for name in (*RATES, *FIXED):
        values = ((label, getattr(device, name)) for label, device in named)
        yield _gauges(f"device_{_in_words(name)}", f"Believed of the device: {_kind(name)}.", values, ("device",))
    if status.server is not None:
        for name in (field.name for field in dataclasses.fields(Server)):
            of = "the averaging" if name.startswith("averaging") else "the edge server"
            value = getattr(status.server, name)
            yield _gauge(f"server_{_in_words(name)}", f"Believed of {of}: {_kind(name)}.", value)


def _of_rounds(believed: RoundsBelief) -> Iterator[Metric]:
    for name, help in (
        ("kappa", "How much rounds grow with the interval."),
        ("relative_rounds", "Rounds that the current plan needs, relative to an interval of 1."),
    ):
        ends = ((str(LOW), f"{name}_low"), ("0.5", name), (str(HIGH), f"{name}_high"))
        rows = (((share,), getattr(believed, end)) for share, end in ends)
        yield _gauges(f"believed_{name}", help, rows, ("quantile",))
    yield _gauge("believed_averagings", "Averagings that this was learned from.", believed.averagings)


def _in_words(name: str) -> str:
    """Return the name of a metric of a resource: uplink_bps is uplink_bits_per_second."""
    for end, words in (("flops", "flop_per_second"), ("_bps", "_bits_per_second"), ("_s", "_fixed_seconds")):
        if name.endswith(end):
            return name.removesuffix(end) + words
    return name


def _kind(name: str) -> str:
    return "seconds besides the work or the bits" if name.endswith("_s") else "a rate besides the fixed seconds"


def _gauge(name: str, help: str, value: float | None) -> Metric:
    return _gauges(name, help, [((), value)])


def _gauges(name: str, help: str, rows: Rows, labels: Sequence[str] = ()) -> Metric:
    return _with(rows, GaugeMetricFamily(f"adaptsfl_{name}", help, labels=labels))


def _counter(name: str, help: str, rows: Rows, labels: Sequence[str] = ()) -> Metric:
    return _with(rows, CounterMetricFamily(f"adaptsfl_{name}", help, labels=labels))


def _with(rows: Rows, family: GaugeMetricFamily | CounterMetricFamily) -> Metric:
    for labels, value in rows:
        if value is not None:
            family.add_metric(labels, float(value))
    return family


def _last(points: Sequence[tuple[int, float]]) -> float | None:
    return points[-1][1] if points else None


def _label(text: str) -> str:
    """Return the text with invalid characters escaped: one odd character in a name must not hide all metrics."""
    return text.encode("utf-8", "backslashreplace").decode()
