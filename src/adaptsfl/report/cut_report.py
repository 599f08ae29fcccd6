"""The costs of every cut: as a table, as plain data, and as a figure after the paper's Fig. 3(a)."""

from pathlib import Path
from typing import Any

from rich.table import Table

from adaptsfl.costs import BITS_PER_BYTE, CutCosts
from adaptsfl.errors import InvalidInput
from adaptsfl.report.charts import SUFFIXES, draw_cuts, drawing
from adaptsfl.report.tables import filled_table

KILO, MEGA = 1e3, 1e6
DECIMALS = 2
WIDTH_PER_CUT, LEAST_WIDTH, MOST_WIDTH = 0.42, 6.0, 20.0


def cut_table(title: str, costs: CutCosts) -> Table:
    """Return one line per cut."""
    columns = [
        ("forward\nMFLOPs", costs.forward_flops / MEGA),
        ("backward\nMFLOPs", costs.backward_flops / MEGA),
        ("activations\nkB", costs.activation_bits / BITS_PER_BYTE / KILO),
        ("device's layers\nMB", costs.client_model_bits / BITS_PER_BYTE / MEGA),
    ]
    if costs.memory_bytes is not None:
        columns.append(("memory\nMB", costs.memory_bytes / MEGA))
    rows = [
        (str(cut), costs.name(cut), *(f"{values[cut - 1]:,.{DECIMALS}f}" for _, values in columns))
        for cut in range(1, costs.layers + 1)
    ]
    return filled_table(title, ["cut", "after layer", *(heading for heading, _ in columns)], rows, left=["after layer"])


def cut_data(costs: CutCosts) -> dict[str, Any]:
    """Return the costs as plain data, in the form of a problem file's `cuts`."""
    fields = ("forward_flops", "backward_flops", "activation_bits", "gradient_bits", "client_model_bits")
    memory = None if costs.memory_bytes is None else costs.memory_bytes.tolist()
    data: dict[str, Any] = {field: getattr(costs, field).tolist() for field in fields}
    names = [costs.name(cut) for cut in range(1, costs.layers + 1)]
    return {**data, "memory_bytes": memory, "names": names, "wire_dtype": costs.wire_dtype}


def check_suffix(path: Path) -> None:
    """Refuse a figure's file name that is neither PNG nor SVG."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput("plot", f"is {str(path)!r}", f"Give a file name that ends in {' or '.join(SUFFIXES)}")


def plot_cuts(costs: CutCosts, path: str | Path, *, title: str = "") -> Path:
    """Write a figure of the device's work and traffic at every cut to `path`, as PNG or SVG by its suffix."""
    path = Path(path)
    check_suffix(path)
    names = [costs.name(cut) for cut in range(1, costs.layers + 1)]
    work = {"forward": costs.forward_flops, "backward": costs.backward_flops}
    traffic = {
        "activations, per sample": costs.activation_bits / BITS_PER_BYTE,
        "device's layers, per aggregation": costs.client_model_bits / BITS_PER_BYTE,
    }
    width = min(MOST_WIDTH, max(LEAST_WIDTH, 1.5 + WIDTH_PER_CUT * costs.layers))
    with drawing([path], (width, 5.6)) as figure:
        above, below = draw_cuts(figure, names, work, traffic)
        above.set_ylabel("device's work\nper sample")
        below.set_ylabel("traffic each way")
        below.set_xticks(range(1, costs.layers + 1), names, rotation=60, ha="right", rotation_mode="anchor")
        above.legend()
        below.legend()
        if title:
            figure.suptitle(title)
    return path
