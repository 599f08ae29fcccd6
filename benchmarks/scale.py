"""How rounds scale: with the number of devices, with ranks on this machine, and, modelled from that, with hosts.

1. Round time and memory of one process against the number of devices: what one more device costs.
2. One and two ranks of one thread each, and the engine with two threads in one process.
3. A model of the round on K hosts from what was measured: every host takes N/K devices, then all sum the gradients of
   the common layers in a ring, 2 (K − 1)/K of their bytes each. The network's numbers are options, not measurements.

python benchmarks/scale.py --out docs/results     (writes scale.md and scale.json; a few minutes on an idle machine)
"""

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from adaptsfl.models import SplitModel, build, split
from adaptsfl.training import Batch, Engine, OptimizerSettings, TrainingPlan
from adaptsfl.training.ranks import Ranks, joined

BATCH_SIZE, DEEPEST, INTERVAL = 16, 2, 5
HOSTS = (1, 2, 4, 8, 16, 32, 64)


def make_model() -> SplitModel:
    """Return a small VGG for 32 × 32 images."""
    torch.manual_seed(0)
    built = build("vgg16", width=0.25)
    assert built.example_input is not None
    return split(built.module, built.example_input)


def rounds_s(devices: int, rounds: int, ranks: Ranks) -> list[float]:
    """Return the seconds of every round, without the first."""
    engine = Engine(make_model(), TrainingPlan((DEEPEST,) * devices, INTERVAL), OptimizerSettings(), ranks=ranks)
    torch.manual_seed(1)
    batch: Batch = (torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(0, 10, (BATCH_SIZE,)))
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        engine.round([batch] * len(engine.mine))
        times.append(time.perf_counter() - started)
    return times[1:]


def memory_mib(field: str) -> float:
    """Return the memory that this process holds now (VmRSS) or held at its peak (VmHWM)."""
    (found,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) / 1024


def be(connection: Connection, rank: int, size: int, port: int, threads: int, devices: int, rounds: int) -> None:
    """Measure as one of `size` ranks, and send the median round and the memory that it took."""
    torch.set_num_threads(threads)
    if size > 1:
        named = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in named.items()})
    with joined() as ranks:
        before = memory_mib("VmRSS")
        times = rounds_s(devices, rounds, ranks)
    connection.send((statistics.median(times), memory_mib("VmHWM") - before))


def measured(devices: int, rounds: int, *, size: int = 1, threads: int = 1) -> tuple[float, float]:
    """Return the seconds of the median round and the peak memory in MiB, of the slowest and largest rank."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=be, args=(sender, rank, size, port, threads, devices, rounds))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    found = [receiver.recv() for receiver in receivers]
    for process in processes:
        process.join()
    return max(one[0] for one in found), max(one[1] for one in found)


def common_bytes() -> int:
    """Return the bytes of the common layers' gradients."""
    pieces = make_model().pieces[DEEPEST:]
    return sum(tensor.numel() * tensor.element_size() for piece in pieces for tensor in piece.parameters())


def modelled_s(hosts: int, devices: int, per_device_s: float, fixed_s: float, args: argparse.Namespace) -> float:
    """Return the seconds of a round on that many hosts: the most devices of one, and the ring that sums gradients."""
    exchange = 2 * (hosts - 1) * (args.latency_us * 1e-6 + common_bytes() / hosts / (args.gbps * 1e9 / 8))
    return fixed_s + -(-devices // hosts) * per_device_s + exchange


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return what a device costs and what remains without any, by a line through the first and the last point."""
    (few, short), (many, long) = points[0], points[-1]
    per_device = (long - short) / (many - few)
    return per_device, max(0.0, short - few * per_device)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table of numbers."""
    made = Table(title=title)
    for column in columns:
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    return made


def markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the same as text."""
    cells = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    lines = [columns, ["---:"] * len(columns), *cells]
    return f"## {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[20, 100, 500, 2000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranked", type=int, default=100, help="devices in the comparison of ranks and threads")
    parser.add_argument("--gbps", type=float, default=10.0, help="of a host's network, for the model")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a message, for the model")
    parser.add_argument("--out", type=Path, help="a folder for scale.md and scale.json")
    args = parser.parse_args()
    alone = {devices: measured(devices, args.rounds) for devices in args.devices}
    per_device_s, fixed_s = fitted([(devices, seconds) for devices, (seconds, _) in alone.items()])
    ways = {
        "one rank, one thread": measured(args.ranked, args.rounds)[0],
        "one rank, two threads": measured(args.ranked, args.rounds, threads=2)[0],
        "two ranks, one thread each": measured(args.ranked, args.rounds, size=2)[0],
    }
    most = max(args.devices)
    hosts = {count: modelled_s(count, most, per_device_s, fixed_s, args) for count in HOSTS}
    tables = [
        (
            "One process, one thread",
            ["devices", "round s", "ms per device", "peak MiB", "MiB per device"],
            [[n, s, 1e3 * s / n, mib, mib / n] for n, (s, mib) in alone.items()],
        ),
        (
            f"Two cores, {args.ranked} devices",
            ["way", "round s", "speed-up"],
            [[way, s, ways["one rank, one thread"] / s] for way, s in ways.items()],
        ),
        (
            f"Modelled: {most} devices, one rank of one thread per host, {args.gbps:g} Gbit/s",
            ["hosts", "round s", "speed-up", "MB sent by a host"],
            [[k, s, hosts[1] / s, 2 * (k - 1) / k * common_bytes() / 1e6] for k, s in hosts.items()],
        ),
    ]
    for title, columns, rows in tables:
        Console().print(table(title, columns, rows))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        content = {"alone": alone, "ways": ways, "hosts": hosts, "options": {**vars(args), "out": str(args.out)}}
        (args.out / "scale.json").write_text(json.dumps(content, indent=1) + "\n")
        (args.out / "scale.md").write_text("# Scale\n\n" + "\n".join(markdown(*one) for one in tables))


if __name__ == "__main__":
    main()
