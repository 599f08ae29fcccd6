"""Figures run: every panel's experiment once, in one folder whose trajectories they all share.

OUT/
  trajectories/             what was learned, whichever figure asked for it first
  accuracy/cifar10-iid/     an experiment, as `simulate` leaves it
  …
"""

from collections.abc import Sequence
from pathlib import Path

from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.study import Panel, Scale, load_studies, study_names
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
        panels: one for each experiment behind the figures.
        experiments: in the same order.
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
        self.panels = list(
            {panel.runs: panel for study in self.studies for panel in study.panels if panel.runs}.values()
        )
        self.experiments = [self._experiment(panel, folder, seeds) for panel in self.panels]

    @staticmethod
    def _experiment(panel: Panel, folder: Path, seeds: int | None) -> Experiment:
        return Experiment(
            panel.recipe,
            folder / panel.runs,
            seeds=seeds or panel.seeds,
            trajectories=folder / TRAJECTORIES,
            keep_models=False,
        )

    def execute(self, processes: int = 1, watcher: SideWatcher | None = None) -> Evidence:
        """Do every run that is not done yet; return all that there are, by panel."""
        runs = execute_side_by_side(self.experiments, processes, watcher)
        by_panel = {
            panel.key: tuple(run for run in found if run.whole) for panel, found in zip(self.panels, runs, strict=True)
        }
        return Evidence(tuple(self.studies), by_panel)
