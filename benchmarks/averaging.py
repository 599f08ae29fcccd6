"""What an averaging costs the fed server: its mean of tensors, a module per copy, and the plain mean, in one run.

Every device delivers all layers of the VGG for digits, with batch-norm, as the bytes that the fed server receives.

- plain mean: `torch.stack(...).mean(0)` of every tensor; no weights, no names, no counters.
- running sum: the same tensors added one after another, tensor by tensor, then divided.
- fed server: `Template.mean`, with weights, counters and optimiser state.
- modules: a module with its optimiser per copy and layer, averaged as the reference does.

Beside them what else the fed server does: it reads and checks every delivery, measures divergence if asked, and writes
the version. Numbers are CPU seconds of this process with one thread, the least of some repeats.

    python benchmarks/averaging.py            # about a minute
    python benchmarks/averaging.py --quick    # few seconds, up to 200 devices

The table is printed and saved as Markdown, every number beside it as JSON.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from adaptsfl.config import load_recipe
from adaptsfl.deploy.layers_file import LayerStates, Template, to_bytes
from adaptsfl.deploy.parties.fed.block import ClosedBlock, FedBlock
from adaptsfl.deploy.parties.fed.server import FedServer
from adaptsfl.deploy.terms import Terms
from adaptsfl.training.layers import average

RECIPE = """
name = "averaging"
[model]
name = "vgg_digits"
options = { norm = "batch" }
[data]
name = "digits"
[run]
policies = ["fixed"]
rounds = 1
"""
FLEETS, OPTIMIZERS = (50, 200, 500), ("sgd", "adam")
PLAIN = ("plain mean", "running sum")  # ratios are to the faster of the two


def cpu_s(what: Callable[[], object], repeats: int = 3) -> float:
    """Return the least CPU seconds of some repeats."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        what()
        found.append(time.process_time() - began)
    return min(found)


def copy_of(template: Template, seed: int) -> LayerStates:
    """Return all layers after one step with random gradients."""
    random = torch.Generator().manual_seed(seed)
    states = {}
    for number in range(1, template.model.layers + 1):
        layer = template.layer(number)
        layer.update([torch.randn(p.shape, generator=random) for p in layer.parameters], 0.01)
        states[number] = layer.state()
    return states


def plain_mean(copies: list[LayerStates]) -> None:
    """Average every tensor, whatever it is."""
    for number, state in copies[0].items():
        for name in state:
            torch.stack([copy[number][name] for copy in copies]).float().mean(0)


def running_sum(copies: list[LayerStates]) -> None:
    """Average every tensor without memory for all copies of it."""
    for number, state in copies[0].items():
        for name, tensor in state.items():
            total = torch.zeros_like(tensor)
            for copy in copies:
                total += copy[number][name]
            total.div(len(copies))


def modules(template: Template, copies: list[LayerStates], shares: list[float]) -> None:
    """Average as the reference does."""
    for number in copies[0]:
        layers = [template.layer(number, copy[number]) for copy in copies]
        average(layers, shares, template.settings.at_averaging)


def measure(fed: FedServer, devices: int) -> dict[str, float]:
    """Return CPU seconds of one averaging, by what is done."""
    template, layers = fed.template, range(1, fed.model.layers + 1)
    data = [bytearray(to_bytes(copy_of(template, k))) for k in range(devices)]
    copies = [template.from_bytes(one, layers) for one in data]
    names = [f"device-{k:03}" for k in range(devices)]
    block = FedBlock(1, 0, len(layers), dict.fromkeys(names, len(layers)), {}, dict(zip(names, copies, strict=True)))
    weights = {name: 1.0 + k % 3 for k, name in enumerate(names)}
    shares = [weight / sum(weights.values()) for weight in weights.values()]
    averaged = fed._averaged(block, weights)
    return {
        "plain mean": cpu_s(lambda: plain_mean(copies)),
        "running sum": cpu_s(lambda: running_sum(copies)),
        "fed server": cpu_s(lambda: fed._averaged(block, weights)),
        "modules": cpu_s(lambda: modules(template, copies, shares)),
        "all deliveries read": cpu_s(lambda: [template.from_bytes(one, layers) for one in data]),
        "divergence": cpu_s(lambda: fed._divergence(block, weights)),
        "version written": cpu_s(lambda: fed.store.save(ClosedBlock(1, 1), averaged)),
    }


def cells(found: dict[str, float]) -> dict[str, str]:
    """Return seconds as text, with their ratio to the faster plain way."""
    base = min(found[what] for what in PLAIN)
    return {what: f"{1e3 * seconds:.1f} ms ({seconds / base:.2f})" for what, seconds in found.items()}


def page(columns: list[str], lines: list[list[str]], numbers: dict[str, int], command: str) -> str:
    """Return the results as a Markdown page."""
    table = "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *lines])
    sizes = ", ".join(f"{count:,} with {optimizer}" for optimizer, count in numbers.items())
    return f"""# What an averaging costs the fed server

Written by `{command}`; every number is in averaging.json. CPU milliseconds of one averaging of the VGG for
digits with batch-norm, all layers of every device ({sizes} numbers), and in brackets the ratio to the
faster of the two plain ways with the same tensors. `modules` builds a module per copy, as the reference does. The last
three rows are what else the fed server does in a block. {os.cpu_count()} cores, shared with other work: trust the
ratios, not the times.

{table}
"""


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer devices")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for the page and its numbers")
    options = parser.parse_args()
    console = Console(width=180)
    torch.set_num_threads(1)
    fleets = FLEETS[:2] if options.quick else FLEETS
    found: dict[str, dict[str, float]] = {}
    numbers: dict[str, int] = {}
    for optimizer in OPTIMIZERS:
        with tempfile.TemporaryDirectory() as folder:
            recipe = Path(folder) / "recipe.toml"
            recipe.write_text(RECIPE)
            terms = Terms.of(load_recipe(recipe, [f'training.optimizer="{optimizer}"', "fleet.devices=3"]))
            fed = FedServer(terms, Path(folder) / "fed")
            numbers[optimizer] = sum(t.numel() for s in copy_of(fed.template, 0).values() for t in s.values())
            for devices in fleets:
                found[f"{optimizer}, {devices} devices"] = measure(fed, devices)
                console.print(f"{optimizer}, {devices} devices: done", style="dim")
    texts = [cells(one) for one in found.values()]
    columns, lines = ["what", *found], [[what, *(one[what] for one in texts)] for what in texts[0]]
    table = Table(*columns)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine, "numbers": numbers, "cpu_s": found}
    (options.out / "averaging.json").write_text(json.dumps(result, indent=1) + "\n")
    command = "python benchmarks/averaging.py" + (" --quick" if options.quick else "")
    (options.out / "averaging.md").write_text(page(columns, lines, numbers, command))
    console.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
