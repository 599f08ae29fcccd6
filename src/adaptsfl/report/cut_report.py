"""What every cut costs: as a table, as plain data, and as a figure after the paper's Fig. 3(a)."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from adaptsfl.costs import BITS_PER_BYTE, CutCosts
from adaptsfl.errors import InvalidInput
from adaptsfl.report.tables import plain_table

KILO, MEGA = 1e3, 1e6
DECIMALS = 2
SUFFIXES = (".png", ".svg")
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"  # told apart by colour-blind readers too
WIDTH_PER_CUT, LEAST_WIDTH, MOST_WIDTH = 0.42, 6.0, 20.0


def cut_table(title: str, costs: CutCosts) -> Table:
    """Return one line per cut."""
    table = plain_table(title)
    table.add_column("cut", justify="right")
    table.add_column("after layer")
    columns = [
        ("forward\nMFLOPs", costs.forward_flops / MEGA),
        ("backward\nMFLOPs", costs.backward_flops / MEGA),
        ("activations\nkB", costs.activation_bits / BITS_PER_BYTE / KILO),
        ("device's layers\nMB", costs.client_model_bits / BITS_PER_BYTE / MEGA),
    ]
    if costs.memory_bytes is not None:
        columns.append(("memory\nMB", costs.memory_bytes / MEGA))
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for index in range(costs.layers):
        numbers = [f"{values[index]:,.{DECIMALS}f}" for _, values in columns]
        table.add_row(str(index + 1), costs.name(index + 1), *numbers)
    return table


def cut_data(costs: CutCosts) -> dict[str, Any]:
    """Return the costs as plain data, in the form of a problem file's `cuts`."""
    fields = ("forward_flops", "backward_flops", "activation_bits", "gradient_bits", "client_model_bits")
    memory = None if costs.memory_bytes is None else costs.memory_bytes.tolist()
    data: dict[str, Any] = {field: getattr(costs, field).tolist() for field in fields}
    return {**data, "memory_bytes": memory, "names": [costs.name(cut) for cut in range(1, costs.layers + 1)]}


def check_suffix(path: Path) -> None:
    """Refuse a figure's file name that is neither PNG nor SVG."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput("plot", f"is {str(path)!r}", f"Give a file name that ends in {' or '.join(SUFFIXES)}")


def plot_cuts(costs: CutCosts, path: str | Path, *, title: str = "") -> Path:
    """Write a figure of the device's work and traffic at every cut to `path`, as PNG or SVG by its suffix."""
    path = Path(path)
    check_suffix(path)
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an extra: only figures need it)
        from matplotlib.ticker import EngFormatter  # noqa: PLC0415
    except ImportError:
        raise InvalidInput("plot", "needs matplotlib", "Install it: pip install 'adaptsfl[plots]'") from None
    cuts = np.arange(1, costs.layers + 1)
    width = min(MOST_WIDTH, max(LEAST_WIDTH, 1.5 + WIDTH_PER_CUT * costs.layers))
    figure = Figure(figsize=(width, 5.6), layout="constrained")
    work, traffic = figure.subplots(2, 1, sharex=True)
    work.bar(cuts, costs.forward_flops, color=BLUE, label="forward")
    work.bar(cuts, costs.backward_flops, bottom=costs.forward_flops, color=ORANGE, label="backward")
    work.set_ylabel("device's work\n(FLOPs per sample)")
    work.yaxis.set_major_formatter(EngFormatter(sep=" "))
    traffic.plot(cuts, costs.activation_bits / BITS_PER_BYTE, "o-", color=GREEN, label="activations, per sample")
    model_bytes = costs.client_model_bits / BITS_PER_BYTE
    traffic.plot(cuts, model_bytes, "s--", color=PINK, label="device's layers, per aggregation")
    traffic.set_yscale("log")
    traffic.set_ylabel("traffic each way\n(bytes)")
    traffic.yaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    traffic.set_xlabel("cut after layer")
    traffic.set_xticks(cuts, [costs.name(int(cut)) for cut in cuts], rotation=60, ha="right", rotation_mode="anchor")
    for axes in (work, traffic):
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    if title:
        figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidInput(
            "plot", f"{path} cannot be written ({error.strerror})", "Give a file in a folder that exists"
        ) from None
    return path
