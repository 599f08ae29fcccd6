"""Figures run: every panel's experiment once, in one folder whose trajectories they all share.

OUT/
  trajectories/             what was learned, whichever figure asked for it first
  accuracy/cifar10-iid/     an experiment, as `simulate` leaves it
  …
"""

from collections.abc import Sequence
from pathlib import Path

from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.study import Scale, load_studies, study_names
from adaptsfl.simulation.experiment import TRAJECTORIES, Experiment
from adaptsfl.simulation.side_by_side import SideWatcher, execute_side_by_side


class Reproduction:
    """Some of the paper's figures at one scale, in `folder`.

    Args:
        figures: by name; all of them for `all`, or for none.
        recipes: the folder of their files.
        overrides: section.key=value for every recipe, over all that the files say.
        seeds: how many runs of each policy, instead of what the files say.

    Attributes:
        experiments: those behind the figures, by the figure/panel that they belong to.
    """

    def __init__(
        self,
        figures: Sequence[str],
        scale: Scale,
        folder: Path,
        *,
        recipes: Path,
        overrides: Sequence[str] = (),
        seeds: int | None = None,
    ) -> None:
        names = study_names(recipes) if not figures or "all" in figures else list(figures)
        self.studies = load_studies(names, scale, folder=recipes, overrides=overrides)
        self.experiments = {
            panel.runs: Experiment(
                panel.recipe,
                folder / panel.runs,
                seeds=seeds or panel.seeds,
                trajectories=folder / TRAJECTORIES,
                keep_models=False,
            )
            for study in self.studies
            for panel in study.panels
            if panel.runs
        }

    def execute(self, processes: int = 1, watcher: SideWatcher | None = None) -> Evidence:
        """Do every run that is not done yet; return all that there are, by panel."""
        runs = execute_side_by_side(list(self.experiments.values()), processes, watcher)
        by_panel = {key: tuple(found) for key, found in zip(self.experiments, runs, strict=True)}
        return Evidence(tuple(self.studies), by_panel)
