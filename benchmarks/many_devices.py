"""What many devices cost: rounds of 50, 200 and 500 light devices, and memory over thousands of rounds.

Edge server and fed server are `adaptsfl` as it is, each a process of its own. All devices are in one process, each with
its own certificate and connections (mutual TLS, loopback): they speak the protocol and compute nothing, see
light_devices.py. The model is a small MLP and messages have about a kilobyte, so that what is left is the cost of a
device, not of its bytes.

- deployed: a round from one answer to the next, as the edge server's record has it; the averaging that ends every block
  is counted apart. CPU and memory are those that /proc has of each server.
- bare: a grpc.aio server without AdaptSFL and as many clients in one process, which send and receive as many bytes.

Both are up at the same time and take turns. Last, a few devices train thousands of rounds, and memory is read on the
way: a server that runs for weeks must not grow. The first rounds are left out of the slope, in which curves on the
status page fill up to the most that they keep.

    python benchmarks/many_devices.py            # about six minutes
    python benchmarks/many_devices.py --quick    # two minutes

The tables are printed and saved as Markdown, every number beside them as JSON. With --resume, what the JSON has already
is not measured again.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from processes import Process, cpu_s, kill, memory_mb, take_turns, wait_until
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from adaptsfl.deploy.parties.local_fleet import LocalFleet, free_port
from adaptsfl.models import build, split

COUNTS, FEW = (50, 200, 500), 4
BATCH_SIZE, WIDTH, CLASSES, INTERVAL = 4, 64, 10, 10
PAYLOAD = BATCH_SIZE * (4 * WIDTH + 8)
TURN_S = 5.0
EVERY, SETTLED = 100, 1000  # rounds between two readings of memory; those before the slope
MODEL = "many_devices:model"
LIGHT, BARE = (Path(__file__).with_name(name) for name in ("light_devices.py", "bare_echo.py"))
RECIPE = f"""
name = "many devices"
[model]
name = "{MODEL}"
[training]
batch_size = {BATCH_SIZE}
learning_rate = 0.001
[data]
name = "digits"
[run]
policies = ["fixed"]
rounds = 1000000
options = {{ fixed = {{ cut = 1, interval = {INTERVAL} }} }}
evaluate_every = 1000000
[deploy]
start_deadline_s = 600.0
round_deadline_s = 600.0
"""


class Narrow(nn.Module):
    """The devices' layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many numbers as an image has pixels."""
        return self.linear(x.flatten(1)).relu()


def model() -> tuple[nn.Module, Tensor]:
    """Return a small MLP, and what it takes."""
    return nn.Sequential(Narrow(), nn.Linear(WIDTH, CLASSES)), torch.zeros(1, 1, 8, 8)


class LightFleet(LocalFleet):
    """Both servers, and all devices in one more process.

    Attributes:
        lines: what they wrote.
        block: the number of the block under way, 0 before the first.
    """

    def __init__(self, folder: Path, count: int) -> None:
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE)
        self.lines: list[str] = []
        self.block = 0
        super().__init__(recipe, count, folder / "run", self._heard, status_port=0, more=[])

    def _heard(self, party: str, text: str) -> None:
        self.lines.append(f"{party}: {text}")
        if party == "edge" and (found := re.search(r"\bblock (\d+):", text)):
            self.block = int(found[1])

    def command(self, party: str) -> list[str]:
        """Return the command line of a party; `devices` are all of them."""
        if party != "devices":
            return super().command(party)
        built = build(model)
        assert built.example_input is not None
        numbers = {"count": self.devices, "width": WIDTH, "batch-size": BATCH_SIZE, "classes": CLASSES}
        numbers["layers"] = split(built.module, built.example_input).layers
        command = [sys.executable, str(LIGHT), "--edge", self.edge, "--fed", self.fed, "--certs", str(self.certs)]
        return [*command, *(text for name, number in numbers.items() for text in (f"--{name}", str(number)))]

    def start_all(self) -> None:
        """Start all parties."""
        for party in ("fed", "edge", "devices"):
            self.start(party)

    def wait_for_block(self, number: int) -> None:
        """Wait until a block has begun."""
        wait_until(lambda: self.block >= number, f"block {number} did not begin", self.lines)

    def blocks(self) -> list[dict[str, float | list[float]]]:
        """Return the measured times of every block so far: its rounds but the first, its averaging, its whole time."""
        record = (self.folder / "edge" / "record.jsonl").read_text().splitlines()
        return [json.loads(line)["estimates"]["measured"] for line in record]


# --- many devices ---


@dataclass(frozen=True)
class Many:
    """What so many devices cost.

    Attributes:
        join_s: from the start of the devices' process to the first plan.
        rounds_s, bare_s: seconds of every round, deployed and bare.
        edge_cpu_s, fed_cpu_s, bare_cpu_s: CPU seconds of a server per round, averagings included.
        block_s: seconds of whole blocks, each with its averaging.
        edge_mb, fed_mb: resident memory, and how much of it is the process's own.
    """

    devices: int
    join_s: float
    rounds_s: list[float]
    bare_s: list[float]
    edge_cpu_s: float
    fed_cpu_s: float
    bare_cpu_s: float
    block_s: list[float]
    edge_mb: tuple[float, float]
    fed_mb: tuple[float, float]


def measure_many(count: int, turns: int, console: Console) -> Many:
    """Let a deployment with so many devices, and as many bare clients, take turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet, bare = LightFleet(folder, count), []
        try:
            for server in ("fed", "edge"):
                fleet.start(server)
            wait_until(lambda: sum("listening" in line for line in fleet.lines) == 2, "no server began", fleet.lines)
            began = time.perf_counter()
            fleet.start("devices")
            fleet.wait_for_block(1)
            join_s = time.perf_counter() - began
            fleet.wait_for_block(2)
            bare = _start_bare(folder, fleet.certs, count)
            wait_until((folder / "bare.json").exists, "the bare server did not begin", fleet.lines)
            return _in_turns(fleet, bare, folder / "bare.json", turns, join_s, console)
        finally:
            kill(bare)
            kill([*fleet.processes.values()])


def _start_bare(folder: Path, certs: Path, count: int) -> list[Process]:
    script = [sys.executable, str(BARE), "--certs", str(certs), "--address", f"127.0.0.1:{free_port()}"]
    script += ["--out", str(folder / "bare.json"), "--clients", str(count), "--size", str(PAYLOAD)]
    return [subprocess.Popen([*script, party]) for party in ("edge", "devices")]


def _in_turns(fleet: LightFleet, bare: list[Process], out: Path, turns: int, join_s: float, console: Console) -> Many:
    edge, fed = (fleet.processes[name] for name in ("edge", "fed"))
    before, bare_before = len(fleet.blocks()), len(json.loads(out.read_text()))
    cpu_before = [cpu_s(process) for process in (edge, fed, bare[0])]
    sides: dict[str, list[Process]] = {"bare": bare, "deployed": [*fleet.processes.values()]}
    take_turns(sides, turns, max(TURN_S, fleet.devices / 25), lambda text: console.print(text, style="dim"))
    time.sleep(0.5)  # what was done is on disk
    blocks, bare_s = fleet.blocks()[before:], json.loads(out.read_text())[bare_before:]
    if not blocks or not bare_s:
        raise RuntimeError(f"no block of {fleet.devices} devices ended in time: give it more turns")
    per = (INTERVAL * len(blocks), INTERVAL * len(blocks), len(bare_s))
    cpu = [(cpu_s(p) - b) / n for p, b, n in zip((edge, fed, bare[0]), cpu_before, per, strict=True)]
    return Many(
        devices=fleet.devices,
        join_s=join_s,
        rounds_s=[seconds for block in blocks for seconds in block["rounds_s"]],  # type: ignore[union-attr]
        bare_s=bare_s,
        edge_cpu_s=cpu[0],
        fed_cpu_s=cpu[1],
        bare_cpu_s=cpu[2],
        block_s=[float(block["wall_s"]) for block in blocks],  # type: ignore[arg-type]
        edge_mb=memory_mb(edge),
        fed_mb=memory_mb(fed),
    )


# --- growth ---


@dataclass(frozen=True)
class Growth:
    """Memory of the servers over the rounds of one run.

    Attributes:
        rounds: when it was read.
        edge_mb, fed_mb: resident memory then, without files of libraries, whose pages the system takes back at times.
    """

    devices: int
    rounds: list[int]
    edge_mb: list[float]
    fed_mb: list[float]

    @property
    def settled(self) -> int:
        """The first round that counts."""
        return min(SETTLED, self.rounds[-1] // 2)

    def slope_kb(self, server: str) -> float:
        """Return the kilobytes by which a server grows per 1,000 rounds, once it has settled: least squares."""
        memory = self.edge_mb if server == "edge" else self.fed_mb
        first = next(k for k, n in enumerate(self.rounds) if n >= self.settled)
        slope, _ = statistics.linear_regression(self.rounds[first:], memory[first:])
        return slope * 1024 * 1000


def measure_growth(rounds: int, console: Console) -> Growth:
    """Read memory every 100 rounds of one run with few devices."""
    found = Growth(FEW, [], [], [])
    with tempfile.TemporaryDirectory() as name:
        fleet = LightFleet(Path(name), FEW)
        try:
            fleet.start_all()
            while not found.rounds or found.rounds[-1] < rounds:
                at = (found.rounds[-1] if found.rounds else 0) + EVERY
                fleet.wait_for_block(at // INTERVAL + 1)
                found.rounds.append((fleet.block - 1) * INTERVAL)
                for server, memory in (("edge", found.edge_mb), ("fed", found.fed_mb)):
                    memory.append(memory_mb(fleet.processes[server])[1])
                console.print(f"{found.rounds[-1]} rounds: edge server {found.edge_mb[-1]:.1f} MB", style="dim")
        finally:
            kill([*fleet.processes.values()])
    return found


# --- results ---

COLUMNS = (
    "devices",
    "round",
    "per device",
    "× bare",
    "averaging per device",
    "edge CPU per device and round",
    "× bare",
    "edge server",
    "fed server",
    "all have joined after",
)


def line(found: Many) -> tuple[str, ...]:
    """Return the line of the table for so many devices."""
    count, middle = found.devices, statistics.median(found.rounds_s)
    bare = statistics.median(found.bare_s)
    # A block is its rounds and an averaging; its first round counts as the others.
    averaging = max(0.0, statistics.median(found.block_s) - INTERVAL * middle)
    return (
        str(count),
        f"{1e3 * middle:.0f} ms",
        f"{1e3 * middle / count:.2f} ms",
        f"{middle / bare:.2f}",
        f"{1e3 * averaging / count:.1f} ms",
        f"{1e3 * found.edge_cpu_s / count:.2f} ms",
        f"{found.edge_cpu_s / found.bare_cpu_s:.2f}",
        *(f"{resident:.0f} MB ({own:.0f} own)" for resident, own in (found.edge_mb, found.fed_mb)),
        f"{found.join_s:.0f} s",
    )


def page(many: list[Many], growth: Growth, load: float, quick: bool) -> str:
    """Return the results as a Markdown page."""
    command = "python benchmarks/many_devices.py" + (" --quick" if quick else "")
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(line(found) for found in many)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    rows = [*zip(growth.rounds, growth.edge_mb, growth.fed_mb, strict=True)]
    ends = ", ".join(
        f"{n:,}: {edge:.1f} and {fed:.1f} MB"
        for n, edge, fed in [rows[0], next(row for row in rows if row[0] >= growth.settled), rows[-1]]
    )
    return f"""# What many devices cost

Written by `{command}`; every number is in many_devices.json. Light devices in one process (they speak the protocol and
compute nothing), both servers processes of their own, mutual TLS, loopback; messages of {PAYLOAD:,} bytes, a small MLP,
an averaging every {INTERVAL} rounds. Bare is a grpc.aio server that only waits for all clients and answers with as many
bytes, in turns in the same run. {os.cpu_count()} cores, shared with other work (load average {load:.1f} when it ended):
trust the ratios, not the times.

{table}

"Own" memory is without files of libraries, which processes share. Averaging is what a block takes beyond its rounds:
devices fetch and deliver their layers, the fed server averages them and writes a version to its disk.

Own memory of edge server and fed server with {growth.devices} devices after so many rounds: {ends}. From round
{growth.settled:,} on they grow by {growth.slope_kb("edge"):.0f} and {growth.slope_kb("fed"):.0f} KB per 1,000 rounds
(least squares over readings every {EVERY} rounds).
"""


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and rounds, and no 500 devices")
    parser.add_argument("--resume", action="store_true", help="keep what many_devices.json has already")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for many_devices.md and .json")
    options = parser.parse_args()
    console = Console(width=160)
    os.environ["OMP_NUM_THREADS"] = "1"  # all parties share this machine
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    options.out.mkdir(parents=True, exist_ok=True)
    place = options.out / "many_devices.json"
    before = json.loads(place.read_text()) if options.resume and place.exists() else {}
    many = {found["devices"]: Many(**found) for found in before.get("many", [])}
    growth = Growth(**before["growth"]) if "growth" in before else None

    def save() -> None:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        result = {
            "machine": {**machine, "load": os.getloadavg()[0]},
            "many": [asdict(found) for found in many.values()],
        }
        place.write_text(json.dumps(result | ({"growth": asdict(growth)} if growth else {})) + "\n")

    for count in COUNTS[:2] if options.quick else COUNTS:
        if count not in many:
            console.print(f"{count} devices")
            many[count] = measure_many(count, 2 if options.quick else 4, console)
            save()
    growth = growth or measure_growth(1000 if options.quick else 5000, console)
    save()
    table = Table(*COLUMNS)
    for found in many.values():
        table.add_row(*line(found))
    console.print(table)
    text = page([*many.values()], growth, os.getloadavg()[0], options.quick)
    (options.out / "many_devices.md").write_text(text)
    console.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
