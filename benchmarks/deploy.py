"""What the wire costs: a round of a real deployment against a bare gRPC echo of the same bytes, in one run.

Four devices send 2 MB and get 2 MB back, every round, over loopback with mutual TLS; every party is a process.

- deployed: `adaptsfl` as it is, with a model that hardly computes: the device's layer multiplies 8×8 digits by 128
  numbers (64 samples × 128 × 8 × 8 floats are 2 MB), the server's takes means and has one linear layer. A round is
  what the edge server's record says: from one answer to the next, everything included.
- bare: a grpc.aio server and four clients without AdaptSFL, each message 2 MB of bytes in one piece. The server
  answers when all four have sent.

Both are up at the same time and take turns of a few seconds: whoever's turn it is not is stopped by a signal. Rounds
that a signal fell into are among those that the median leaves out. What torch needs for the layers is timed beforehand
in this process, the least of its repeats, and taken off the deployed round for the ratio beyond compute. CPU seconds
are those of all processes, torch's and an averaging every ten rounds among them, over the rounds that are timed, which
are nine of those ten. Last, a
device waits for a run that does not begin: its memory and CPU time are those of an idle device.

    python benchmarks/deploy.py            # about three minutes
    python benchmarks/deploy.py --quick    # one minute

The table is printed and saved as Markdown, every number beside it as JSON.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import torch
from processes import Process, cpu_s, kill, memory_mb, send, take_turns, wait_until
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from adaptsfl.deploy.parties.local_fleet import LocalFleet, free_port
from adaptsfl.models import build, split
from adaptsfl.training.timing import time_layers

DEVICES, BATCH_SIZE, CHANNELS = 4, 64, 128
TURN_S, IDLE_S = 3.0, 10.0
PAYLOAD = BATCH_SIZE * CHANNELS * 8 * 8 * 4
MODEL = "deploy:model"
BARE = Path(__file__).with_name("bare_echo.py")
RECIPE = f"""
name = "wire"
[model]
name = "{MODEL}"
[training]
batch_size = {BATCH_SIZE}
learning_rate = 0.01
[data]
name = "digits"
[run]
policies = ["fixed"]
rounds = 1000000
options = {{ fixed = {{ cut = 1, interval = 10 }} }}
evaluate_every = 100000
test_samples = 4
[deploy]
start_deadline_s = 600.0
round_deadline_s = 600.0
"""


class Widen(nn.Module):
    """A layer that makes much of little: every pixel times so many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, CHANNELS).reshape(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return 128 channels of one."""
        return x * self.scale


class Head(nn.Module):
    """The server's layer: means, and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ten numbers of every sample."""
        return self.linear(x.mean((2, 3)))


def model() -> tuple[nn.Module, Tensor]:
    """Return the model that hardly computes, and what it takes."""
    return nn.Sequential(Widen(), Head()), torch.zeros(1, 1, 8, 8)


class Trusting(LocalFleet):
    """A deployment whose devices run the model above."""

    def command(self, party: str) -> list[str]:
        """Return the command line of a party."""
        return [*super().command(party), *(["--allow", MODEL] if party.startswith("device") else [])]


# --- both in turns ---


@dataclass(frozen=True)
class Rounds:
    """Seconds of every round, and CPU seconds of all processes per round."""

    seconds: list[float]
    cpu_s: float


def measure_rounds(folder: Path, turns: int, console: Console) -> dict[str, Rounds]:
    """Let both take turns."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    lines: list[str] = []

    def say(party: str, text: str) -> None:
        lines.append(f"{party}: {text}")

    fleet = Trusting(recipe, DEVICES, folder / "run", say, status_port=0, more=[])
    bare: list[Process] = []
    out = folder / "bare.json"
    try:
        fleet.start_all()
        address = f"127.0.0.1:{free_port()}"
        script = [sys.executable, str(BARE), "--certs", str(fleet.certs), "--address", address]
        script += ["--out", str(out), "--clients", str(DEVICES), "--size", str(PAYLOAD)]
        for party in ("edge", *(f"device-{k + 1}" for k in range(DEVICES))):
            bare.append(subprocess.Popen([*script, party]))
        wait_until(lambda: any("edge: " in line and "block 2" in line for line in lines), "it did not begin", lines)
        wait_until(out.exists, "the bare server did not begin", lines)
        sides: dict[str, list[Process]] = {"bare": bare, "deployed": list(fleet.processes.values())}
        begun = {name: (_rounds_so_far(name, fleet, out), cpu_s(*side)) for name, side in sides.items()}
        take_turns(sides, turns, TURN_S, lambda text: console.print(text, style="dim"))
        time.sleep(0.5)  # what was done is on disk
        found = {}
        for name, side in sides.items():
            (before, cpu_before), seconds = begun[name], _rounds_so_far(name, fleet, out)
            count = max(1, len(seconds) - len(before))
            found[name] = Rounds(seconds[len(before) :], (cpu_s(*side) - cpu_before) / count)
        return found
    finally:
        kill(bare)
        send([*fleet.processes.values()], signal.SIGCONT)
        fleet.stop()


def _rounds_so_far(name: str, fleet: LocalFleet, out: Path) -> list[float]:
    if name == "bare":
        return [float(seconds) for seconds in json.loads(out.read_text())]
    record = (fleet.folder / "edge" / "record.jsonl").read_text().splitlines()
    return [s for line in record for s in json.loads(line)["estimates"]["measured"]["rounds_s"]]


def compute_s() -> float:
    """Return the seconds that torch needs for one round: a device's layer, then the server's for all devices."""
    torch.set_num_threads(1)
    built = build(model)
    assert built.example_input is not None
    times = time_layers(split(built.module, built.example_input), built.example_input, BATCH_SIZE, repeats=20)
    return times.forward_s[0] + times.backward_s[0] + DEVICES * (times.forward_s[1] + times.backward_s[1])


# --- an idle device ---


def idle_device(folder: Path, seconds: float) -> dict[str, float]:
    """Return memory and CPU of a device that has joined and waits for others."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    lines: list[str] = []
    fleet = Trusting(
        recipe, 2, folder / "run", lambda who, text: lines.append(f"{who}: {text}"), status_port=0, more=[]
    )
    try:
        for party in ("fed", "edge", "device-1"):
            fleet.start(party)
        wait_until(lambda: any("device-1: " in line and "ready" in line for line in lines), "it did not join", lines)
        time.sleep(2.0)
        device = fleet.processes["device-1"]
        before = cpu_s(device)
        time.sleep(seconds)
        rss, anonymous = memory_mb(device)
        return {"rss_mb": rss, "private_mb": anonymous, "cpu_share": (cpu_s(device) - before) / seconds}
    finally:
        fleet.stop()


# --- results ---

COLUMNS = ("what", "rounds", "median", "the middle half", "ratio", "beyond compute", "ratio", "CPU of all", "ratio")


def summary(rounds: dict[str, Rounds], torch_s: float) -> list[tuple[str, ...]]:
    """Return one line per way."""
    bare = statistics.median(rounds["bare"].seconds)
    lines: list[tuple[str, ...]] = []
    for name, found in rounds.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(found.seconds, n=4))
        beyond = middle - (1e3 * torch_s if name == "deployed" else 0.0)
        ratios = f"{middle / bare / 1e3:.2f}", f"{beyond / bare / 1e3:.2f}"
        spread = f"{low:.1f}–{high:.1f} ms"
        cpu = f"{1e3 * found.cpu_s:.1f} ms", f"{found.cpu_s / rounds['bare'].cpu_s:.2f}"
        times = f"{middle:.1f} ms", spread, ratios[0], f"{beyond:.1f} ms", ratios[1]
        lines.append((name, str(len(found.seconds)), *times, *cpu))
    return lines


def page(lines: list[tuple[str, ...]], torch_s: float, idle: dict[str, float], load: float, quick: bool) -> str:
    """Return the results as a Markdown page."""
    command = "python benchmarks/deploy.py" + (" --quick" if quick else "")
    table = "\n".join(f"| {' | '.join(line)} |" for line in [COLUMNS, ("---",) * len(COLUMNS), *lines])
    return f"""# What the wire costs

Written by `{command}`; every number is in deploy.json. One round of {DEVICES} devices, {PAYLOAD / 2**20:.0f} MB each
way, mutual TLS, loopback, every party a process; both ways in turns in the same run. {os.cpu_count()} cores, shared
with other work (load average {load:.1f} when it ended): trust the ratios, not the times. Compute is what torch needs
for the layers of one round, {1e3 * torch_s:.1f} ms.

{table}

An idle device, joined and waiting: {idle["rss_mb"]:.0f} MB of memory, of which {idle["private_mb"]:.0f} MB are its own
(the rest are files of libraries that processes share), and {idle["cpu_share"]:.1%} of a core.
"""


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for deploy.md and deploy.json")
    options = parser.parse_args()
    console = Console(width=140)
    os.environ["OMP_NUM_THREADS"] = "1"  # all parties share this machine
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    torch_s = compute_s()
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure_rounds(Path(folder), 4 if options.quick else 12, console)
    with tempfile.TemporaryDirectory() as folder:
        idle = idle_device(Path(folder), IDLE_S)
    lines = summary(rounds, torch_s)
    table = Table(*COLUMNS)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    console.print(f"idle device: {idle}")
    load = os.getloadavg()[0]
    machine = {"python": platform.python_version(), "torch": torch.__version__, "grpc": grpc.__version__}
    machine |= {"cores": os.cpu_count(), "load": load, "processor": platform.machine()}
    result = {"machine": machine, "payload_bytes": PAYLOAD, "compute_s": torch_s, "idle": idle}
    result |= {"rounds": {name: asdict(found) for name, found in rounds.items()}}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "deploy.json").write_text(json.dumps(result) + "\n")
    (options.out / "deploy.md").write_text(page(lines, torch_s, idle, load, options.quick))
    console.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
