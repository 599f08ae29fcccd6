"""Figures run: every panel's experiment once, in one folder whose trajectories they all share.

OUT/
  trajectories/             what was learned, whichever figure asked for it first
  accuracy/cifar10-iid/     an experiment, as `simulate` leaves it, and its page
  …
"""

from collections.abc import Sequence
from pathlib import Path

from adaptsfl.errors import InvalidInput
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.study import Panel, Scale, Study, load_studies, study_names
from adaptsfl.simulation.experiment import TRAJECTORIES, Experiment
from adaptsfl.simulation.folder import Run


def studies_asked_for(
    names: Sequence[str], scale: Scale, *, folder: Path, overrides: Sequence[str] = ()
) -> tuple[Study, ...]:
    """Return the figures that are named, all of them for `all` or for no name."""
    chosen = study_names(folder) if not names or "all" in names else list(names)
    return tuple(load_studies(chosen, scale, folder=folder, overrides=overrides))


def panels_to_run(studies: Sequence[Study], *, folder: Path, overrides: Sequence[str] = ()) -> list[Panel]:
    """Return the panels whose runs the figures show, each once, also those that belong to another figure."""
    wanted = dict.fromkeys(panel.runs for study in studies for panel in study.panels if panel.runs)
    scale = studies[0].scale
    others = load_studies(
        list(dict.fromkeys(key.partition("/")[0] for key in wanted)), scale, folder=folder, overrides=overrides
    )
    known = {panel.key: panel for study in others for panel in study.panels}
    for key in wanted:
        if key not in known or known[key].runs != key:
            raise InvalidInput("panels.runs", f"is {key!r}, which has no runs of its own", "Name figure/panel")
    return [known[key] for key in wanted]


def experiments_of(panels: Sequence[Panel], out: Path, seeds: int | None = None) -> list[Experiment]:
    """Return the experiments behind panels; what one of them learns serves all."""
    return [
        Experiment(
            panel.recipe,
            out / panel.figure / panel.name,
            seeds=seeds or panel.seeds,
            trajectories=out / TRAJECTORIES,
            keep_models=False,
        )
        for panel in panels
    ]


def evidence_of(studies: Sequence[Study], panels: Sequence[Panel], runs: Sequence[Sequence[Run]]) -> Evidence:
    """Return the runs that are done, by panel."""
    done = {
        panel.key: tuple(run for run in found if run.status == "done")
        for panel, found in zip(panels, runs, strict=True)
    }
    return Evidence(tuple(studies), done)
