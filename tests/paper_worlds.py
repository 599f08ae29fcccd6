"""Evidence without training: runs whose accuracy follows a formula, for every panel of the paper's figures."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptsfl.fleet import Server
from adaptsfl.latency import PHASES
from adaptsfl.paper_costs import vgg16
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.study import Study, load_studies, recipes_folder, study_names
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block

EVALUATIONS, EVERY = 60, 5  # rounds between two evaluations
COSTS = vgg16(10, 16)
SERVER = Server(flops=2e13, to_fed_bps=4e8, from_fed_bps=4e8)


class Learning(NamedTuple):
    """How one policy learns: accuracy nears `top` within some rounds, each of which takes `pace_s`."""

    top: float
    pace_s: float
    rounds: float = 30.0  # after which 63 % of it is learned


# (figure/panel, policy, place in the sweep from 0, the poorest or fewest, to 1) → how it learns; None: was not run
World = Callable[[str, str, float], Learning | None]


@cache
def studies() -> tuple[Study, ...]:
    """All figures at a scale whose sweeps have three points."""
    return tuple(load_studies(study_names(recipes_folder()), "laptop", folder=recipes_folder()))


def evidence_of(world: World, seeds: int = 2) -> Evidence:
    """Every run of every panel, as a world has it."""
    runs: dict[str, tuple[Run, ...]] = {}
    for panel in (panel for study in studies() for panel in study.panels):
        if panel.runs != panel.key:
            continue  # it shows another one's, or none
        fleets = panel.sweep.fleets if panel.sweep else ("",)
        found = []
        for policy in panel.recipe.run.policies:
            for seed in range(seeds):
                for k, fleet in enumerate(fleets):
                    learning = world(panel.key, policy, k / max(len(fleets) - 1, 1))
                    if learning is not None:
                        found.append(run_of(policy, learning, seed=seed, fleet=fleet))
        if found:
            runs[panel.key] = tuple(found)
    return Evidence(studies(), runs)


def run_of(policy: str, learning: Learning, *, seed: int = 0, fleet: str = "", status: str = "done") -> Run:
    """A run of one block; seeds differ by a tenth of a point."""
    rounds = EVERY * np.arange(1, EVALUATIONS + 1)
    accuracies = (learning.top + 0.001 * (seed - 0.5)) * (1 - np.exp(-rounds / learning.rounds))
    seconds = rounds * learning.pace_s
    named, _, interval = policy.partition("@I=")
    return Run(
        folder=Path(f"{policy}-{fleet}-seed{seed}"),
        name="",
        policy=policy,
        title={"adaptsfl": "AdaptSFL"}.get(named, named.upper()),
        seed=seed,
        recipe={},
        versions={},
        devices=("phone",),
        layers=COSTS.names,
        batch_size=16,
        costs=COSTS,
        server=SERVER,
        targets=(),
        status=status,
        ended_by="rounds",
        wall_s=1.0,
        blocks=(
            Block(
                block=1,
                first_round=1,
                rounds=int(rounds[-1]),
                time_s=float(seconds[-1]),
                interval=int(interval or 5),
                cuts=(1,),
                deepest=1,
                layer_intervals={},
                seconds=dict.fromkeys(PHASES, 0.0),
                bottleneck=("phone", "a1"),
                bits=0.0,
                loss=0.0,
                evaluations=tuple(zip(rounds.tolist(), seconds.tolist(), accuracies.tolist(), 0 * rounds, strict=True)),
                estimates={},
                resources={},
                predicted_s=0.0,
            ),
        ),
        fleet=fleet,
    )


# The world as the paper has it: accuracy and pace of the six, IID and not.
SIX = {
    "adaptsfl": Learning(0.700, 1.0),
    "rma+ms": Learning(0.698, 1.15),
    "rma+ams": Learning(0.690, 1.4),
    "ma+rms": Learning(0.680, 6.0),
    "dama+rms": Learning(0.670, 7.5),
    "rma+rms": Learning(0.660, 12.0),
}
SIX_NONIID = {
    "adaptsfl": Learning(0.600, 1.5, 45),
    "rma+ms": Learning(0.598, 1.8, 45),
    "rma+ams": Learning(0.590, 2.2, 45),
    "ma+rms": Learning(0.580, 20.0, 45),
    "dama+rms": Learning(0.570, 25.0, 45),
    "rma+rms": Learning(0.560, 36.0, 45),
}
INTERVALS = {"adaptsfl": (0.0, 1.0), "sfl": (0.0, 2.5), "fixed@I=15": (0.01, 1.2), "psl": (0.06, 2.0)}


def as_printed(key: str, policy: str, place: float) -> Learning:  # noqa: PLR0911
    """The world as the paper has it, in which every claim holds."""
    figure, panel = key.split("/")
    noniid = panel.endswith("noniid")
    six = (SIX_NONIID if noniid else SIX).get(policy, Learning(0, 0))
    value = float(policy.partition("=")[2] or 0)
    match figure:
        case "motivation-interval":
            return Learning(0.6 - 0.002 * value, 1.0, 150)
        case "motivation-cut":
            return Learning(0.6 - 0.012 * value, 1.0)
        case "accuracy":
            return six
        case "compute" | "communication":  # the random one takes three times as long with the poorest resources
            return six._replace(pace_s=six.pace_s * (1.1 - 0.1 * place if policy == "adaptsfl" else 3 - 2 * place))
        case "uncertainty":
            return six._replace(pace_s=six.pace_s * (1 + 0.04 * place))
        case "devices":
            return six._replace(pace_s=six.pace_s * (1 + place if policy == "adaptsfl" else 1 + 3 * place))
        case "ablation-interval":
            less, pace_s = INTERVALS[policy]
            return Learning((0.6 if noniid else 0.7) - less, pace_s)
        case "ablation-cut" if policy == "adaptsfl":
            return Learning(0.6 if noniid else 0.7, 1.0)
        case "ablation-cut":
            return Learning(0.6 - 0.004 * value, 2.0 + 0.5 * value) if noniid else Learning(0.7 - 0.002 * value, 2.0)
    raise AssertionError(key)


def turned_round(key: str, policy: str, place: float) -> Learning:  # noqa: PLR0911
    """A world in which every claim on training is wrong."""
    figure, panel = key.split("/")
    noniid = panel.endswith("noniid")
    value = float(policy.partition("=")[2] or 0)
    kind = {"adaptsfl": 5, "rma+ms": 4, "rma+ams": 3, "ma+rms": 2, "dama+rms": 1, "rma+rms": 0}.get(policy, 0)
    six = Learning((0.8 if noniid else 0.7) - 0.02 * kind, (1.0 if noniid else 3.0) * 1.5**kind)
    match figure:
        case "motivation-interval":
            return Learning(0.3 + 0.006 * value, 1.0)
        case "motivation-cut":
            return Learning(0.3 + 0.012 * value, 1.0)
        case "accuracy":
            return six
        case "compute" | "communication":
            return six._replace(pace_s=six.pace_s * (1 if policy == "rma+rms" else 3 - 2 * place))
        case "uncertainty":
            return six._replace(pace_s=six.pace_s * (1 + 3 * place))
        case "devices":
            return six._replace(pace_s=six.pace_s * (1 + 3 * place if policy == "adaptsfl" else 1.0))
        case "ablation-interval":
            top, pace_s = {"psl": (0.7, 1.0), "sfl": (0.65, 2.0)}.get(policy, (0.6, 4.0))
            return Learning(top, pace_s)
        case "ablation-cut" if policy == "adaptsfl":
            return Learning(0.3, 9.0)
        case "ablation-cut":
            return Learning(0.5 + (0.02 if noniid else 0.01) * value, 2.0)
    raise AssertionError(key)
