"""The resources that a run measured, as a trace to replay: what would another policy have done on this fleet?"""

from pathlib import Path

import numpy as np

from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import FIXED, RATES, Fleet, Server, write_trace
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block


def write_measured(run: Run, path: Path) -> None:
    """Write the rates and fixed seconds that every block was planned with, from its first round on."""
    blocks = [block for block in run.blocks if all(len(block.resources.get(name, ())) for name in RATES)]
    if not blocks or blocks[0].first_round != 1:
        raise InvalidInput("resources", "are not in the record", "Give a run that was planned", source=run.name)
    recorded = {name: _filled(run, blocks, name) for name in RATES}
    recorded |= {name: _filled(run, blocks, name) for name in FIXED if any(name in block.resources for block in blocks)}
    fleets = []
    for k, block in enumerate(blocks):
        server = Server(**block.restart["server"]) if block.restart else run.server
        numbers = {name: values[k] for name, values in recorded.items()}
        fleets.append(Fleet(**numbers, server=server, names=tuple(run.devices)))
    write_trace(path, fleets, [block.first_round - 1 for block in blocks])


def _filled(run: Run, blocks: list[Block], name: str) -> np.ndarray:
    """Return one resource by block and device; where a device was absent, as it was before, or else as it was later."""
    nothing = (0.0,) * len(run.devices)  # fixed seconds that are 0 for all are not recorded
    values = np.array([block.resources.get(name, nothing) for block in blocks], dtype=np.float64)
    for device, column in enumerate(values.T):
        known = np.flatnonzero(np.isfinite(column))
        if not known.size:
            problem = f"{run.devices[device]} was never there"
            raise InvalidInput("resources", problem, "Give a run in which every device took part", source=run.name)
        last = np.maximum(np.searchsorted(known, np.arange(column.size), side="right") - 1, 0)
        column[:] = column[known[last]]
    return values
