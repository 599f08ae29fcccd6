"""How rounds scale: with the number of devices, with ranks on this machine, and, modelled from that, with hosts.

1. One process of one thread against the number of devices N: seconds and memory that one more device costs.
2. Ways to use two cores: one thread, the engine with two threads, and two ranks of one thread each.
3. A model of the round on K hosts of one rank each, from what was measured in 1 and 2: the host with the most devices
   computes, then all sum the gradients of the common layers in a ring, 2 (K − 1)/K of their bytes each, every round,
   and one copy of the client-specific layers every I rounds. The network's numbers are options, not measurements.

    python benchmarks/scale.py                                                       # about ten minutes, quiet machine
    python benchmarks/scale.py --devices 4 8 --ranked 4 --repeats 1 --out /tmp/scale   # does it work?
    python benchmarks/scale.py --width 1 --devices 4 20 --ranked 20                  # the full VGG-16

Every case has processes of its own that take turns, after a first round each that does not count; a turn is as many
rounds as it takes to train as many devices as the largest case has. Times are those of a clock on the wall, the mean of
a turn's rounds, the least of all turns; CPU seconds are beside them: where they are far apart, the machine was busy.
Rounds are timed without averaging, which is timed by itself: the mean of all copies, and the copying after it.
Mini-batches are 20 random ones in turn, so that memory is that of training, not of data.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.models import SplitModel, build, split
from adaptsfl.training import Batch, Engine, OptimizerSettings
from adaptsfl.training.ranks import BUCKET_BYTES, Ranks, joined
from adaptsfl.training.sharding import Sharding
from adaptsfl.training.stack import merge

BATCH_SIZE, DEEPEST = 16, 2
HOSTS = (1, 2, 4, 8, 16, 32, 64)
TURN_DEVICES = 200  # rounds of a turn times devices, at least
SMALL_SUMS = 100  # of one number, for a message's latency


def make_model(width: float) -> SplitModel:
    """Return VGG-16 for 32 × 32 images."""
    torch.manual_seed(0)
    built = build("vgg16", width=width)
    assert built.example_input is not None
    return split(built.module, built.example_input)


def parameter_bytes(model: SplitModel) -> tuple[int, int]:
    """Return the bytes of the client-specific and of the common layers' parameters."""
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in piece.parameters()) for piece in model.pieces]
    return sum(sizes[:DEEPEST]), sum(sizes[DEEPEST:])


def memory_mib(field: str) -> float:
    """Return the memory that this process holds now (VmRSS) or held at its peak (VmHWM)."""
    (found,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) / 1024


class Worker:
    """What one process measures when it is asked to."""

    def __init__(self, ranks: Ranks, devices: int, width: float) -> None:
        self.ranks = ranks
        model = make_model(width)
        torch.manual_seed(1)
        self.batches: list[Batch] = [
            (torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(0, 10, (BATCH_SIZE,))) for _ in range(20)
        ]
        warm = Engine(model, Decision((DEEPEST,), None), OptimizerSettings())
        warm.round(self.batches[:1])  # libraries set themselves up
        with suppress(OSError):  # the peak from here on, where Linux allows it
            Path("/proc/self/clear_refs").write_text("5")
        self.before_mib = memory_mib("VmRSS")
        sharding = Sharding.of(devices, ranks)
        self.engine = Engine(model, Decision((DEEPEST,) * devices, None), OptimizerSettings(), sharding=sharding)

    def round(self) -> float:
        """Return the seconds of a round without averaging."""
        given = [self.batches[device % len(self.batches)] for device in self.engine.batch_devices]
        return self._timed(lambda: self.engine.round(given))

    def average(self) -> float:
        """Return the seconds in which all copies are averaged and made anew."""
        layers = self.engine.layers[:DEEPEST]

        def average() -> None:
            merge(layers, self.engine.weights, "average")
            for layer in layers:
                layer.spread()

        return self._timed(average)

    def exchange(self) -> tuple[float, float, float]:
        """Return the seconds to sum the common gradients, to copy them to and fro only, and to sum one number."""
        gradients = [zero for layer in self.engine.layers[DEEPEST:] for zero in layer.zeros()]

        def copy() -> None:
            flat = torch.cat([tensor.reshape(-1) for tensor in gradients])
            for tensor, part in zip(gradients, flat.split_with_sizes([t.numel() for t in gradients]), strict=True):
                tensor.copy_(part.view(tensor.shape))

        def small() -> None:
            number: Tensor = torch.zeros(1)
            for _ in range(SMALL_SUMS):
                self.ranks.all_reduce_sum([number])

        small()
        return (
            self._timed(lambda: self.ranks.all_reduce_sum(gradients)),
            self._timed(copy),
            self._timed(small) / SMALL_SUMS,
        )

    def cpu(self) -> float:
        """Return the CPU seconds of all threads since the process began."""
        return time.process_time()

    def memory(self) -> float:
        """Return the MiB that training added at its peak."""
        return memory_mib("VmHWM") - self.before_mib

    def _timed(self, what: Callable[[], object]) -> float:
        self.ranks.sum_numbers([0.0])  # all begin together
        started = time.perf_counter()
        what()
        return time.perf_counter() - started


def serve(connection: Connection, rank: int, size: int, port: int, threads: int, devices: int, width: float) -> None:
    """Be one process of a case: measure what is asked for, until nothing is."""
    torch.set_num_threads(threads)
    if size > 1:
        named = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in named.items()})
    with joined() as ranks:
        worker = Worker(ranks, devices, width)
        while name := connection.recv():
            connection.send(getattr(worker, name)())


class Case:
    """The processes of one case."""

    def __init__(self, devices: int, width: float, *, size: int = 1, threads: int = 1) -> None:
        self.devices = devices
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, port, threads, devices, width))
            process.start()
            theirs.close()
            self.connections.append(mine)
            self.processes.append(process)

    def ask(self, name: str) -> list[Any]:
        """Return what every process measured."""
        for connection in self.connections:
            connection.send(name)
        return [connection.recv() for connection in self.connections]

    def slowest(self, name: str) -> float:
        """Return the seconds of the slowest process."""
        return max(self.ask(name))

    def close(self) -> None:
        """End the processes."""
        for connection in self.connections:
            connection.send("")
        for process in self.processes:
            process.join()


def in_turns(cases: Sequence[Case], repeats: int) -> list[dict[str, Any]]:
    """Return the seconds of every case's rounds and averagings, its CPU seconds per round, and its memory.

    A turn has as many rounds as it takes for all cases to train equally many devices, and its mean counts: the least
    of many short rounds would be less than the least of a few long ones.
    """
    turns: list[list[tuple[float, float, float]]] = [[] for _ in cases]
    trained = max(TURN_DEVICES, *(case.devices for case in cases))
    for repeat in range(repeats + 1):
        for k, case in enumerate(cases):
            rounds = []
            for _ in range(max(1, trained // case.devices) if repeat else 1):
                before = sum(case.ask("cpu"))
                seconds = case.slowest("round")
                rounds.append((seconds, sum(case.ask("cpu")) - before, case.slowest("average")))
            if repeat:  # the first is for warming up
                turns[k].append((fmean(r[0] for r in rounds), fmean(r[1] for r in rounds), fmean(r[2] for r in rounds)))
    return [
        {
            "devices": case.devices,
            "round_s": min(turn[0] for turn in turns[k]),
            "cpu_s": min(turn[1] for turn in turns[k]),
            "averaging_s": min(turn[2] for turn in turns[k]),
            "memory_mib": max(case.ask("memory")),
            "turns_s": [turn[0] for turn in turns[k]],
        }
        for k, case in enumerate(cases)
    ]


@dataclass(frozen=True)
class Network:
    """What a message costs."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Terms:
    """What the model of a round is made of; see `modelled_s`."""

    fixed_s: float
    device_s: float
    averaging_device_s: float
    copy_s: float
    own_bytes: int
    common_bytes: int
    interval: int

    def exchange_s(self, hosts: int, network: Network, devices: int) -> float:
        """Return the seconds of a round in which hosts send: gradients and losses, and copies every I rounds."""
        if hosts == 1:
            return 0.0
        messages = -(-self.common_bytes // BUCKET_BYTES) + 1 + 1 / self.interval
        steps = 2 * (hosts - 1)
        wire = steps * (messages * network.latency_s + self.bytes_each(devices) / hosts / network.bytes_per_s)
        return self.copy_s + wire

    def bytes_each(self, devices: int) -> float:
        """Return the bytes that are summed in a round."""
        return self.common_bytes + 8 * devices + self.own_bytes / self.interval

    def modelled_s(self, hosts: int, devices: int, network: Network) -> float:
        """Return the seconds of a round: what there is without devices, the most devices of a host, and sending."""
        each = self.device_s + self.averaging_device_s / self.interval
        return self.fixed_s + -(-devices // hosts) * each + self.exchange_s(hosts, network, devices)


def per_device(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return what a device costs, among as many as were measured, and what the fewest cost beyond that."""
    few, many = rows[0], rows[-1]
    each = many[name] / many["devices"]
    return each, max(0.0, few[name] - few["devices"] * each)


def added_mib(few: dict[str, Any], many: dict[str, Any]) -> float:
    """Return the memory of one device more."""
    added: float = many["memory_mib"] - few["memory_mib"]
    return max(0.0, added) / (many["devices"] - few["devices"])


Rows = list[list[Any]]
Section = tuple[str, list[str], Rows]


def device_section(alone: Sequence[dict[str, Any]]) -> Section:
    """Return the first table."""
    columns = [
        "devices",
        "round s",
        "ms per device",
        "CPU ms per device",
        "against the fewest",
        "averaging ms",
        "peak MiB",
        "KiB per added device",
    ]
    fewest = alone[0]
    least = fewest["round_s"] / fewest["devices"]
    rows = []
    for row in alone:
        n, s = row["devices"], row["round_s"]
        kib = "–" if row is fewest else 1024 * added_mib(fewest, row)
        each = [1e3 * s / n, 1e3 * row["cpu_s"] / n, s / n / least]
        rows.append([n, s, *each, 1e3 * row["averaging_s"], row["memory_mib"], kib])
    return "One process of one thread", columns, rows


def way_section(ways: dict[str, dict[str, Any]], modelled: float, devices: int) -> Section:
    """Return the second table."""
    one = ways["one process, one thread"]["round_s"]
    rows: Rows = [[way, found["round_s"], one / found["round_s"], found["cpu_s"]] for way, found in ways.items()]
    rows.append(["two ranks, as modelled below with what loopback was measured to do", modelled, one / modelled, "–"])
    return f"Two cores, {devices} devices", ["way", "round s", "speed-up", "CPU s"], rows


def host_section(terms: Terms, alone: Sequence[dict[str, Any]], networks: dict[str, Network]) -> Section:
    """Return the third table, for the most devices that were measured."""
    devices, added = alone[-1]["devices"], added_mib(alone[0], alone[-1])
    base = max(0.0, alone[0]["memory_mib"] - alone[0]["devices"] * added)
    columns = ["hosts", "devices each", "MB sent by each", "MiB of training each"]
    columns += [f"{what}, {name}" for name in networks for what in ("round s", "speed-up")]
    one = terms.modelled_s(1, devices, next(iter(networks.values())))
    rows = []
    for hosts in HOSTS:
        most = -(-devices // hosts)
        sent = 2 * (hosts - 1) / hosts * terms.bytes_each(devices) / 1e6
        times = [terms.modelled_s(hosts, devices, network) for network in networks.values()]
        rows.append([hosts, most, sent, base + most * added, *(x for s in times for x in (s, one / s))])
    return f"Modelled: {devices} devices, hosts of one rank with one thread, I = {terms.interval}", columns, rows


def shown(value: Any) -> str:
    """Return a cell."""
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else str(round(value) if isinstance(value, float) else value)
    )


def page(sections: Sequence[Section], about: str) -> str:
    """Return the results as Markdown."""
    text = f"# Scale\n\nWritten by `python benchmarks/scale.py`, which says what is measured.\n{about}\n"
    for title, columns, rows in sections:
        lines = [columns, ["---:"] * len(columns), *([shown(value) for value in row] for row in rows)]
        text += f"\n## {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    return text


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[20, 100, 500, 2000], help="N, rising")
    parser.add_argument("--repeats", type=int, default=2, help="of the first part; the second has twice as many")
    parser.add_argument("--ranked", type=int, default=100, help="devices in the second part")
    parser.add_argument("--width", type=float, default=0.25, help="of VGG-16")
    parser.add_argument("--interval", type=int, default=5, help="I, for the model")
    parser.add_argument("--gbps", type=float, nargs="+", default=[10.0, 1.0], help="of a host's network, for the model")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a message between hosts, for the model")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for scale.md and scale.json")
    options = parser.parse_args()
    if len(options.devices) < 2 or options.devices != sorted(set(options.devices)):
        parser.error("--devices: give two numbers at least, rising")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # processes that wait for their turn sleep
    console = Console(width=170)

    cases = [Case(devices, options.width) for devices in options.devices]
    alone = in_turns(cases, options.repeats)
    for case in cases:
        case.close()
    console.print("measured: one process against devices", style="dim")
    made = {
        "one process, one thread": Case(options.ranked, options.width),
        "one process, two threads": Case(options.ranked, options.width, threads=2),
        "two ranks of one thread": Case(options.ranked, options.width, size=2),
    }
    ways = dict(zip(made, in_turns(list(made.values()), 2 * options.repeats), strict=True))
    exchanges = [made["two ranks of one thread"].ask("exchange") for _ in range(5)]
    for case in made.values():
        case.close()

    sum_s, copy_s, small_s = (min(max(ranks[k] for ranks in found) for found in exchanges) for k in range(3))
    own_bytes, common_bytes = parameter_bytes(make_model(options.width))
    # Two ranks take two steps of half the bytes each.
    loopback = Network(small_s / 2, common_bytes / max(sum_s - copy_s - small_s, 1e-9))
    device_s, fixed_s = per_device(alone, "round_s")
    averaging_device_s, _ = per_device(alone, "averaging_s")
    terms = Terms(fixed_s, device_s, averaging_device_s, copy_s, own_bytes, common_bytes, options.interval)
    networks = {f"{gbps:g} Gbit/s": Network(options.latency_us * 1e-6, gbps * 1e9 / 8) for gbps in options.gbps}
    never = Terms(fixed_s, device_s, 0.0, copy_s, 0, common_bytes, 10**9)  # rounds are timed without averaging
    modelled = never.modelled_s(2, options.ranked, loopback)
    sections = [
        device_section(alone),
        way_section(ways, modelled, options.ranked),
        host_section(terms, alone, networks),
    ]
    about = (
        f"VGG-16 of width {options.width:g}, L_c = {DEEPEST}, mini-batches of {BATCH_SIZE}, float32; "
        f"{common_bytes / 1e6:.3g} MB of common and {own_bytes / 1e6:.3g} MB of client-specific parameters.\n"
        f"Hosts of the last table were not measured; a message between them is taken to need {options.latency_us:g} µs."
    )
    for title, columns, rows in sections:
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*map(shown, row))
        console.print(table)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    content = {
        "machine": machine,
        "options": {**vars(options), "out": str(options.out)},
        "alone": alone,
        "ways": ways,
        "terms": vars(terms),
        "loopback": vars(loopback),
        "modelled": [dict(zip(sections[-1][1], row, strict=True)) for row in sections[-1][2]],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scale.json").write_text(json.dumps(content, indent=1) + "\n")
    (options.out / "scale.md").write_text(page(sections, about))
    console.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
