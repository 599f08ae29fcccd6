"""Recomputes the times of recorded runs for another fleet, without training: results and decisions stay as they were.

For a policy that ignores the fleet, the result is exactly a run on the other fleet. For a policy that uses it, the
result is the time that decisions made for the first fleet would have taken on the other.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptsfl.config import FaultsConfig, FleetConfig, parse
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.files import writing
from adaptsfl.fleet import Fleet
from adaptsfl.runs.backend import Order
from adaptsfl.runs.folder import RECORD, RUN, Run, append_block, read_run, write_run
from adaptsfl.runs.loop import rates_seen
from adaptsfl.runs.record import Block, plain
from adaptsfl.simulation.backend import Observer
from adaptsfl.simulation.clock import Clock
from adaptsfl.simulation.faults import Faults, faults_from
from adaptsfl.simulation.trainers import trainer_kind
from adaptsfl.simulation.world import TrueFleet

RETIMED_FROM = "retimed_from"
OF_A_DEPLOYMENT = ("predicted", "measured")  # keys of `estimates`: its predicted and measured phases


def retime(runs: Sequence[Run], fleet: FleetConfig, out: Path, *, name: str = "") -> list[Run]:
    """Charge runs under another fleet and write them to `out`, one folder each, named as before.

    Args:
        fleet: as in a recipe; every run's seed is added to its seed.
        name: the name of the fleet, for run.json.
    """
    targets = [out / run.folder.resolve().name for run in runs]
    for run, target in zip(runs, targets, strict=True):
        _check_target(run, target, targets)
    # All are charged before any is written: a fleet that does not fit leaves nothing behind.
    charged = [(target, *retimed(run, fleet, name)) for run, target in zip(runs, targets, strict=True)]
    for target, info, blocks in charged:
        _write(target, info, blocks)
    return [read_run(target) for target in targets]


def retimed(run: Run, config: FleetConfig, name: str = "") -> tuple[dict[str, Any], list[Block]]:
    """Return the content of run.json and the blocks of a run under another fleet."""
    config = config.model_copy(update={"seed": config.seed + run.seed})
    other = TrueFleet.of(config)
    first = other.fleet_at(1)
    if first.size != len(run.devices):
        problem = f"has {first.size} devices, the run {len(run.devices)}"
        raise InvalidInput("fleet", problem, "Give a fleet of the same size", source=str(run.folder))
    info = json.loads((run.folder / RUN).read_text())
    recipe = info["recipe"]
    with _of(run):
        faults, kind = _stragglers(recipe, first), trainer_kind(run.trainer)
    clock = Clock(other.fleet_at, run.costs, run.batch_size, faults, kind.round_time)
    adapt = info.get("adapt") or recipe.get("adapt") or {}
    smoothed = bool(info.get("estimates")) and adapt.get("mode") == "calibrated"
    observer = Observer(other.measured_at, smoothed=smoothed)
    with _of(run):
        blocks = [_charged(block, clock, observer) for block in run.blocks]
    info.pop("identity", None)  # it is not a run of `simulate` on that fleet
    info.pop("real", None)  # the seconds of a retimed deployment are virtual
    info |= {
        "recipe": {**recipe, "fleet": plain(config.model_dump(mode="json"))},
        "fleet": name,
        "devices": [first.name(k) for k in range(first.size)],
        "server": plain(first.server),
        RETIMED_FROM: str(run.folder),
    }
    return info, blocks


@contextmanager
def _of(run: Run) -> Iterator[None]:
    """Add the run's folder to errors that do not name a file."""
    try:
        yield
    except InvalidInput as error:
        raise (error if error.source else error.from_file(str(run.folder))) from None


def _charged(block: Block, clock: Clock, observer: Observer) -> Block:
    """Return the block with all fields recomputed that depend on the fleet."""
    members = tuple(device for device, cut in enumerate(block.cuts) if cut)
    everybody = len(members) == len(block.cuts)
    placed = tuple(block.cuts[device] for device in members)
    intervals = {int(layer): interval for layer, interval in block.layer_intervals.items()}
    decision = Decision(
        (block.deepest,) * len(members),
        block.interval,
        intervals,
        placed=placed,
        micro_batches=block.micro_batches,
        wire_dtype=block.wire_dtype,
    )
    compared = tuple(block.wires)
    order = Order(decision, block.rounds, block.first_round, present=block.present, compared=compared)
    seen = observer.at(block.first_round)
    here = seen if everybody else seen.subset(members)
    predicted_s = clock.predicted_s(order, here)  # before `charge` advances the schedule
    reestimated = [row[0] for row in block.evaluations] if block.reestimated else []
    charged = clock.charge(order, members, block.measuring, reestimated)
    for t in range(block.first_round + 1, block.last_round + 1):
        observer.at(t)
    return replace(
        block,
        time_s=clock.now_s,
        seconds=dict(charged.elapsed.seconds),
        bottleneck=charged.elapsed.bottleneck,
        bits=charged.elapsed.bits,
        evaluations=tuple(
            (t, charged.ends_s[t - block.first_round + 1], accuracy, loss) for t, _, accuracy, loss in block.evaluations
        ),
        estimates={name: value for name, value in block.estimates.items() if name not in OF_A_DEPLOYMENT},
        resources=rates_seen(here, members, len(block.cuts)),
        predicted_s=predicted_s,
        restart={},
    )


def _stragglers(recipe: Mapping[str, Any], fleet: Fleet) -> Faults:
    """Return the recipe's stragglers only: the record says which devices were present, but not which were slow."""
    config = parse(FaultsConfig, recipe.get("faults", {}))
    slow_only = config.model_copy(update={"trace": None, "dropout_rate": 0.0, "participation": 1.0})
    return faults_from(slow_only, [fleet.name(k) for k in range(fleet.size)])


def _check_target(run: Run, target: Path, targets: Sequence[Path]) -> None:
    """Refuse to overwrite anything but an earlier retiming of the same run."""
    if targets.count(target) > 1:
        problem = f"two of the runs are called {target.name!r}"
        raise InvalidInput("out", problem, "Retime the experiments one by one, each into a folder of its own")
    if not (target / RUN).exists():
        return
    try:
        theirs = json.loads((target / RUN).read_text()).get(RETIMED_FROM)
    except (OSError, ValueError, AttributeError):
        theirs = None
    if theirs != str(run.folder):
        raise InvalidInput("out", f"{target} holds another run", "Give another folder by --out")


def _write(folder: Path, info: Mapping[str, Any], blocks: Sequence[Block]) -> None:
    with writing(folder, "Give another folder by --out"):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / RECORD).open("w") as record:
            for block in blocks:
                append_block(record, block)
        write_run(folder, info)
