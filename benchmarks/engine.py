"""Seconds and memory of one training round: the engine against the plain ways and against the floor, in one run.

The ways, each training on the same batches of 16 samples per device with plain SGD:

- SplitFed: a loop over clients as in public SplitFed code, with a deep copy of the server's net for every client and
  the copies averaged by state_dict every round.
- reference: `adaptsfl.training.Reference`, Algorithm 1 in plain loops.
- engine: `adaptsfl.training.Engine`; and once more with I = 1, where all copies are equal.
- floor: one centralized SGD step on the pooled batch, channels-last. No way of training all devices does less work.

    python benchmarks/engine.py                                  # an hour or two
    python benchmarks/engine.py --quick                          # two minutes: the small VGG, 20 devices
    python benchmarks/engine.py --models resnet18 --devices 20   # a part of it

Times are CPU seconds over all threads, of which torch has as many as it takes by default (`--threads` for another
number). Ways take turns, and each way's time is the least of its repeats. Rounds are timed without averaging, which has
a column of its own (the engine's averaging and the copying after it). Memory is what the peak of a process of its own
adds over model and batches in two rounds. With `--repeats 1` it is one round, after a warm-up with two devices, and
time is taken there, so that models fit whose ways do not fit into one process together. The table is printed and saved
as Markdown, every number beside it as JSON, after every case; rows of earlier runs with as many threads are kept
unless they were measured again.
"""

import argparse
import json
import multiprocessing
import platform
import re
import time
from collections.abc import Callable
from copy import deepcopy
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adaptsfl.decisions import Decision
from adaptsfl.models import SplitModel, build, split
from adaptsfl.training import Batch, Engine, OptimizerSettings, Reference
from adaptsfl.training.stack import merge

BATCH_SIZE, LEARNING_RATE = 16, 0.01
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vgg16-quarter": ("vgg16", {"width": 0.25}),
    "vgg16": ("vgg16", {}),
    "resnet18": ("resnet18", {"norm": "group"}),
}
Round = Callable[[list[Batch]], object]


def make_model(name: str) -> SplitModel:
    """Return a model of the benchmark, split."""
    torch.manual_seed(0)
    zoo, options = MODELS[name]
    built = build(zoo, **options)
    assert built.example_input is not None
    return split(built.module, built.example_input)


def make_batches(devices: int) -> list[Batch]:
    """Return one batch of random images per device."""
    torch.manual_seed(1)
    return [(torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(0, 10, (BATCH_SIZE,))) for _ in range(devices)]


def mean_state(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average state_dicts key by key."""
    total = deepcopy(states[0])
    for key in total:
        for state in states[1:]:
            total[key] += state[key]
        total[key] = torch.div(total[key], len(states))
    return total


def splitfed(model: SplitModel, cut: int, devices: int) -> Round:
    """Return a round in the style of public SplitFed code."""
    clients = [deepcopy(model.client(cut)).train() for _ in range(devices)]
    server = deepcopy(model.server(cut)).train()

    def run(batches: list[Batch]) -> None:
        states = []
        for client, (x, y) in zip(clients, batches, strict=True):
            net = deepcopy(server)
            descents = [torch.optim.SGD(part.parameters(), LEARNING_RATE) for part in (net, client)]
            for descent in descents:
                descent.zero_grad()
            activations = client(x)
            received = activations.detach().clone().requires_grad_()
            torch.autograd.backward(cross_entropy(net(received), y))
            torch.autograd.backward(activations, received.grad)
            for descent in descents:
                descent.step()
            states.append(deepcopy(net.state_dict()))
        server.load_state_dict(mean_state(states))

    return run


def floor(model: SplitModel, devices: int) -> Round:
    """Return one centralized step on the pooled batch."""
    net: nn.Module = deepcopy(model.module).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    descent = torch.optim.SGD(net.parameters(), LEARNING_RATE, foreach=True)

    def run(batches: list[Batch]) -> None:
        x = torch.cat([x for x, _ in batches]).contiguous(memory_format=torch.channels_last)
        descent.zero_grad()
        torch.autograd.backward(cross_entropy(net(x), torch.cat([y for _, y in batches])))
        descent.step()

    return run


def way(name: str, model: SplitModel, deepest: int, devices: int) -> Round:
    """Return one round of one of the ways; half of the devices cut at L_c, the others anywhere before it."""
    settings = OptimizerSettings("sgd", LEARNING_RATE)
    cuts = tuple(deepest if k % 2 == 0 else 1 + k % deepest for k in range(devices))
    if name == "SplitFed":
        return splitfed(model, deepest, devices)
    if name == "reference":
        return Reference(model, Decision(cuts, None), settings).round
    if name == "floor":
        return floor(model, devices)
    return Engine(model, Decision(cuts, 1 if name == "engine, I = 1" else None), settings).round


WAYS = ("SplitFed", "reference", "engine", "engine, I = 1", "floor")


def measure_alone(
    connection: Connection, threads: int, name: str, model: str, deepest: int, devices: int, repeats: int
) -> None:
    """Send the peak memory in MiB that rounds add to a fresh process, and the last round's seconds."""
    torch.set_num_threads(threads)
    made, batches = make_model(model), make_batches(devices)
    way(name, made, deepest, 2)(batches[:2])  # libraries set themselves up
    before = memory_mib("VmRSS")
    run = way(name, made, deepest, devices)
    rounds = []
    for _ in range(repeats):
        started = time.process_time()
        run(batches)
        rounds.append(time.process_time() - started)
    connection.send((memory_mib("VmHWM") - before, rounds[-1]))


def memory_mib(field: str) -> float:
    """Return the memory that this process holds now (VmRSS) or held at its peak (VmHWM).

    Not resource.getrusage: its peak is inherited from the process that started this one.
    """
    (found,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) / 1024


def alone(name: str, model: str, deepest: int, devices: int, repeats: int) -> tuple[float, float]:
    """Measure one way's memory in MiB and seconds per round in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=measure_alone, args=(sender, torch.get_num_threads(), name, model, deepest, devices, repeats)
    )
    process.start()
    sender.close()
    try:
        mib, seconds = receiver.recv()
        return mib, seconds
    finally:
        process.join()


def averaging_s(model: SplitModel, deepest: int, devices: int) -> float:
    """Return the seconds in which the engine averages all copies and spreads the mean."""
    engine = Engine(model, Decision((deepest,) * devices, 1), OptimizerSettings())
    times = []
    for _ in range(3):
        for layer in engine.layers[:deepest]:
            layer.spread()
        started = time.process_time()
        for layer in engine.layers[:deepest]:
            merge([layer], engine.weights, "average")
            layer.spread()
        times.append(time.process_time() - started)
    return min(times)


def measure(model: str, deepest: int, devices: int, repeats: int, with_memory: bool) -> dict[str, Any]:
    """Measure all ways of one case."""
    made, batches = make_model(model), make_batches(devices)
    row: dict[str, Any] = {"model": model, "deepest": deepest, "devices": devices, "repeats": repeats}
    if repeats > 1:
        row["seconds"] = take_turns({name: way(name, made, deepest, devices) for name in WAYS}, batches, repeats)
    if repeats == 1 or with_memory:
        measured = {name: alone(name, model, deepest, devices, min(repeats, 2)) for name in WAYS}
        row["memory_mib"] = {name: mib for name, (mib, _) in measured.items()}
        row.setdefault("seconds", {name: seconds for name, (_, seconds) in measured.items()})
    row["averaging_s"] = averaging_s(made, deepest, devices)
    return row


def take_turns(rounds: dict[str, Round], batches: list[Batch], repeats: int) -> dict[str, float]:
    """Return the least seconds of each way's repeats; a first turn is for warming up."""
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(repeats + 1):
        for name, run in rounds.items():
            started = time.process_time()
            run(batches)
            if repeat:
                times[name].append(time.process_time() - started)
    return {name: min(values) for name, values in times.items()}


COLUMNS = (
    "model",
    "N",
    "L_c",
    "repeats",
    "floor",
    "engine / floor",
    "I = 1 / floor",
    "reference / floor",
    "SplitFed / floor",
    "SplitFed / engine",
    "averaging",
    "memory MiB: floor, engine, reference, SplitFed",
)


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """Return one case as a line of the table."""
    seconds, mib = row["seconds"], row.get("memory_mib")
    names = ("floor", "engine", "reference", "SplitFed")
    return (
        row["model"],
        str(row["devices"]),
        str(row["deepest"]),
        str(row["repeats"]),
        f"{seconds['floor']:.3g} s",
        *(f"{seconds[name] / seconds['floor']:.2f}" for name in ("engine", "engine, I = 1", "reference", "SplitFed")),
        f"{seconds['SplitFed'] / seconds['engine']:.2f}",
        f"{row['averaging_s'] * 1e3:.1f} ms",
        ", ".join(f"{mib[name]:.0f}" for name in names) if mib else "–",
    )


def page(lines: list[tuple[str, ...]], threads: int) -> str:
    """Return the results as a Markdown page."""
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in [COLUMNS, ("---",) * len(COLUMNS), *lines])
    return f"""# The training engine against plain loops and against the floor

Written by `python benchmarks/engine.py`, which says what is measured; every number is in engine.json. Batches of
{BATCH_SIZE} samples per device, float32, CPU seconds over {threads} threads, the least of each way's repeats; where
there is one, it is one round after a warm-up with two devices, so a ratio may be off by a tenth. ResNet-18 has
group-norm, so that every way computes the same.

{table}
"""


def save(folder: Path, rows: list[dict[str, Any]], threads: int) -> list[dict[str, Any]]:
    """Save these rows and those of earlier runs that were not measured again; return all."""

    def key(row: dict[str, Any]) -> tuple[int, int, int]:
        return list(MODELS).index(row["model"]), row["devices"], row["deepest"]

    file = folder / "engine.json"
    nothing: dict[str, Any] = {"machine": {"threads": threads}, "rows": []}
    old = json.loads(file.read_text()) if file.exists() else nothing
    kept = old["rows"] if old["machine"]["threads"] == threads else []
    rows = [row for _, row in sorted({key(row): row for row in [*kept, *rows]}.items())]
    machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": threads}
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine, "batch_size": BATCH_SIZE, "rows": rows}, indent=1) + "\n")
    (folder / "engine.md").write_text(page([line(row) for row in rows], threads))
    return rows


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small VGG on 20 devices, three repeats")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[20, 100], help="N")
    parser.add_argument("--deepest", nargs="+", type=int, default=[1, 2, 4, 8], help="L_c")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for engine.md and engine.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        options.models, options.devices, options.repeats = ["vgg16-quarter"], [20], 3
    console = Console(width=170)
    rows = []
    for model in options.models:
        for devices in options.devices:
            for deepest in options.deepest:
                rows.append(measure(model, deepest, devices, options.repeats, not options.no_memory))
                console.print(", ".join(line(rows[-1])), style="dim")
                saved = save(options.out, rows, options.threads)
    table = Table(*COLUMNS)
    for row in saved:
        table.add_row(*line(row))
    console.print(table)
    console.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
