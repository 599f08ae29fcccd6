"""Runs figures: every panel's experiment once, in one folder whose trajectories all experiments share.

OUT/
  trajectories/             trained once, by the first figure that needs them
  accuracy/cifar10-iid/     an experiment, as `simulate` leaves it
  …
"""

from collections.abc import Sequence
from pathlib import Path

from adaptsfl.errors import naming
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.study import Scale, load_studies, study_names
from adaptsfl.simulation.claim import TRAJECTORIES
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.jobs import Watcher
from adaptsfl.simulation.side_by_side import execute_side_by_side


class Reproduction:
    """Some of the paper's figures at one scale, in `folder`.

    Args:
        figures: their names; `all`, or no name, for all of them.
        recipes: the folder of their files.
        overrides: section.key=value for every recipe; they take precedence over the files.
        seeds: how many runs of each policy, instead of the number in the files.

    Attributes:
        experiments: the experiments of the figures, by figure/panel.
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
        every = study_names(recipes) if not figures or "all" in figures else []
        names = [*every, *(name for name in figures if name != "all")]
        self.studies = load_studies(names, scale, folder=recipes, overrides=overrides, seeds=seeds)
        self.experiments: dict[str, Experiment] = {}
        for panel in (panel for study in self.studies for panel in study.panels if panel.runs):
            place, learned = folder / panel.runs, folder / TRAJECTORIES
            with naming(panel.runs):
                self.experiments[panel.runs] = Experiment(
                    panel.recipe, place, seeds=panel.seeds, trajectories=learned, keep_models=False
                )

    def execute(self, processes: int = 1, watcher: Watcher | None = None) -> Evidence:
        """Execute every run that is not done yet; return all runs, by panel."""
        runs = execute_side_by_side(list(self.experiments.values()), processes, watcher)
        by_panel = {key: tuple(found) for key, found in zip(self.experiments, runs, strict=True)}
        return Evidence(tuple(self.studies), by_panel)
