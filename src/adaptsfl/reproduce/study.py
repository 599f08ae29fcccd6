"""A figure of the paper as a file: the recipe of each panel, and what a smaller scale changes in it.

    extends = "cifar10.toml"                    # another such file, over which this one is merged
    figure = "Fig. 5"
    title = "Test accuracy over training time"
    [recipe.run]                                # a recipe, in the paper's full setting
    policies = ["adaptsfl", "rma+rms"]
    [panels.noniid]
    title = "Non-IID"
    draw = "time"
    recipe.data.partition.kind = "shards"       # the panel's change of the recipe
    [scales.laptop]
    changes = "An eighth of the width, …"       # in words; the keys are listed by `Panel.differences`
    seeds = 2
    recipe.model.options.width = 0.125

Files are merged, later over earlier, in this order: what the figure extends, the figure, what the panel extends, the
panel; then, in the same order, the changes that each has for the scale.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field

from adaptsfl import checks, loading
from adaptsfl.config import Recipe, Section, override_key, parse, read_toml
from adaptsfl.costs import CutCosts
from adaptsfl.errors import InvalidInput, naming, unknown

Scale = Literal["smoke", "laptop", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
NO_FIGURES = ("claims", "findings")  # files in the folder that are no figures
Drawing = Literal["epochs", "aggregations", "time", "converged", "sweep", "overhead"]


class SweepPoint(Section):
    """One point of a sweep: its place on the axis, and its changes of the recipe's fleet."""

    x: float
    fleet: dict[str, Any]


class Sweep(Section):
    """Fleets along an axis, from left to right."""

    axis: str
    points: list[SweepPoint]

    @property
    def xs(self) -> tuple[float, ...]:
        """The places of the fleets on the axis."""
        return tuple(point.x for point in self.points)

    @property
    def fleets(self) -> tuple[str, ...]:
        """The names of the fleets in the recipe's [run.fleets]."""
        return tuple(f"{x:g}" for x in self.xs)

    def thinned(self, most: int | None) -> Self:
        """Return the sweep from left to right, with at most `most` points, evenly chosen, including both ends."""
        points = sorted(self.points, key=lambda point: point.x)
        if not points or not all(math.isfinite(point.x) for point in points):
            problem = "are none, or one has an x that is not finite"
            raise InvalidInput("sweep.points", problem, "Give numbers from left on")
        for before, after in pairwise(points):
            if f"{before.x:g}" == f"{after.x:g}":
                problem, remedy = f"has {after.x!r} beside {before.x!r}, which is the same place", "Give every x once"
                raise InvalidInput("sweep.points", problem, f"{remedy}, with six digits that tell it from others")
        if most is not None and most < len(points):
            steps = checks.whole_number("sweep_points", most, at_least=2) - 1
            points = [points[round(k * (len(points) - 1) / steps)] for k in range(steps + 1)]
        return self.model_copy(update={"points": points})


class ScaleConfig(Section):
    """The changes of a scale."""

    changes: str = ""
    seeds: int | None = None
    sweep_points: int | None = None  # the most points of each sweep
    recipe: dict[str, Any] = Field(default_factory=dict)


class RecipeLayer(Section):
    """The common part of figures and panels: a recipe, merged over that of the file they extend, and scales."""

    extends: str | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)
    scales: dict[Scale, ScaleConfig] = Field(default_factory=dict)


class PanelConfig(RecipeLayer):
    """One picture of a figure."""

    title: str
    draw: Drawing
    runs: str | None = None  # figure/panel whose runs this panel shows
    sweep: Sweep | None = None


class StudyFile(RecipeLayer):
    """A figure, or the common part of several figures."""

    figure: str = ""
    title: str = ""
    panels: dict[str, PanelConfig] = Field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One picture of a figure at one scale.

    Attributes:
        figure, name: the parts of its key, `figure/name`.
        runs: figure/panel whose runs it shows, its own by default; empty where it shows none.
        recipe: of its runs, resolved.
        differences: (key, in the paper's setting, at this scale), for every key that the scale changes.
    """

    figure: str
    name: str
    title: str
    draw: Drawing
    runs: str
    recipe: Recipe
    seeds: int
    sweep: Sweep | None
    differences: tuple[tuple[str, Any, Any], ...]

    def __post_init__(self) -> None:
        """Check that a panel has a sweep exactly if it draws one, and that all fleets are points of it."""
        if (self.sweep is None) == (self.draw == "sweep"):
            raise InvalidInput("draw", f"is {self.draw!r}", "Give a sweep exactly where one is drawn")
        fleets = () if self.recipe.run is None else self.recipe.run.fleets
        if set(fleets) != set(() if self.sweep is None else self.sweep.fleets):
            raise InvalidInput("run.fleets", "has some that no sweep shows", "Give them as points of a sweep")

    @property
    def key(self) -> str:
        """Return figure/panel."""
        return f"{self.figure}/{self.name}"

    @cached_property
    def costs(self) -> CutCosts:
        """The costs of every cut of its model; cached, because profiling takes seconds and several files need them."""
        training = self.recipe.training
        return loading.model_costs(self.recipe.model, training.batch_size, training.optimizer)


@dataclass(frozen=True)
class Study:
    """A figure at one scale.

    Attributes:
        name: the name of its file, without the suffix.
        figure: its number in the paper.
        changes: what the scale changes, in words.
    """

    name: str
    figure: str
    title: str
    scale: Scale
    changes: tuple[str, ...]
    panels: tuple[Panel, ...]


def all_differences(studies: Sequence[Study]) -> list[tuple[str, Any, Any, str]]:
    """Return every change of the scale once, as (key, in the paper's setting, at this scale, where).

    `where` is `all`, or names the figures, or figure/panel if only some panels of a figure have the change.
    """
    own = [(study, [panel for panel in study.panels if panel.key == panel.runs]) for study in studies]
    found: dict[tuple[str, str, str], tuple[str, Any, Any, list[str]]] = {}
    every = [panel for _, panels in own for panel in panels]
    for panel in every:
        for key, paper, here in panel.differences:
            entry = found.setdefault((key, repr(paper), repr(here)), (key, paper, here, []))
            entry[3].append(panel.key)
    everywhere = [panel.key for panel in every]
    return [
        (key, paper, here, "all" if places == everywhere else ", ".join(_places(places, own)))
        for _, (key, paper, here, places) in sorted(found.items())
    ]


def _places(keys: Sequence[str], own: Sequence[tuple[Study, Sequence[Panel]]]) -> Iterator[str]:
    for study, panels in own:
        mine = [panel.key for panel in panels]
        if mine and all(key in keys for key in mine):
            yield study.figure
        else:
            yield from (key for key in mine if key in keys)


def recipes_folder() -> Path:
    """Return the folder of the paper's recipes: beside this file in an installed package, else in the project."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "recipes" / "paper"


def study_names(folder: Path) -> list[str]:
    """Return the figures that a folder has, in the order of the paper."""
    if not folder.is_dir():
        raise InvalidInput("recipes", f"{folder} is not a folder", "Give the folder of the figures' recipes")
    figures = {path.stem: _read(path).figure for path in folder.glob("*.toml") if path.stem not in NO_FIGURES}
    return sorted((name for name, figure in figures.items() if figure), key=lambda name: (_number(figures[name]), name))


def _number(figure: str) -> int:
    digits = "".join(letter for letter in figure if letter.isdigit())
    return int(digits) if digits else 0


def load_studies(
    names: Sequence[str], scale: Scale, *, folder: Path, overrides: Sequence[str] = (), seeds: int | None = None
) -> list[Study]:
    """Read figures by name, each once.

    Args:
        overrides: section.key=value for every recipe; they take precedence over the files.
        seeds: how many runs of each policy, instead of the number in the files.
    """
    known = study_names(folder)
    if not known:
        raise InvalidInput("recipes", f"{folder} has no figure", 'Give files in it that say figure = "Fig. 1"')
    for override in overrides:
        override_key({}, override)  # a malformed one raises here, in no file's name
    for name in names:
        if name not in known:
            raise unknown("figure", name, known, f"Give all, or some of {', '.join(known)}")
    reader = _Reader(folder, scale, overrides)
    studies = [reader.study(name) for name in known if name in names]
    if seeds is None:
        return studies
    return [replace(one, panels=tuple(replace(panel, seeds=seeds) for panel in one.panels)) for one in studies]


@dataclass(frozen=True)
class _Reader:
    """Reads the figures of a folder at one scale."""

    folder: Path
    scale: Scale
    overrides: Sequence[str]

    def study(self, name: str) -> Study:
        file = f"{self.folder / name}.toml"
        with naming(file):
            layers = list(self.chain(f"{name}.toml"))
        panels = _panels(layers)
        if not panels:
            raise InvalidInput("panels", "are none", "Give at least one", source=file)
        made = []
        for key, panel in panels.items():
            with naming(f"{file}, panel {key}"):
                made.append(self.panel(name, key, panel, layers))
        beside = [layer for panel in panels.values() for layer in self.layers(panel)]
        words = dict.fromkeys(changed.changes for changed in self.changes([*layers, *beside]) if changed.changes)
        return Study(name, layers[-1].figure, layers[-1].title, self.scale, tuple(words), tuple(made))

    def panel(self, figure: str, name: str, panel: PanelConfig, layers: Sequence[StudyFile]) -> Panel:
        if not re.fullmatch(r"[\w.+=@-]+", name) or not name.strip("."):
            raise InvalidInput("", "cannot be the name of a folder and of files", "Use letters, digits, - and _")
        if panel.runs is not None:
            return replace(self.owner(panel), figure=figure, name=name, title=panel.title, draw=panel.draw)
        own = [*layers, *self.layers(panel)]
        scales = self.changes(own)
        printed = _laid_over([layer.recipe for layer in own])
        scaled = _laid_over([printed, *(changed.recipe for changed in scales)])
        for override in self.overrides:
            override_key(scaled, override)
        sweep = None if panel.sweep is None else panel.sweep.thinned(_last(scales, "sweep_points"))
        if sweep is not None:
            fleets = {name: point.fleet for name, point in zip(sweep.fleets, sweep.points, strict=True)}
            scaled = _laid_over([scaled, {"run": {"fleets": fleets}}])
        seeds = _last(scales, "seeds")
        return Panel(
            figure=figure,
            name=name,
            title=panel.title,
            draw=panel.draw,
            runs="" if panel.draw == "overhead" else f"{figure}/{name}",
            recipe=parse(Recipe, {"name": f"{figure}/{name}", **scaled}),
            seeds=1 if seeds is None else checks.whole_number("seeds", seeds),
            sweep=sweep,
            differences=tuple(_differences(printed, scaled)),
        )

    def owner(self, panel: PanelConfig) -> Panel:
        """Return the panel whose runs `panel` shows."""
        assert panel.runs is not None
        for key in sorted(panel.model_fields_set - {"title", "draw", "runs"}):
            raise InvalidInput(key, "is given beside the runs of another panel", "Leave it out, or say it there")
        figure, _, name = panel.runs.partition("/")
        if not (self.folder / f"{figure}.toml").is_file():
            raise InvalidInput("runs", f"is {panel.runs!r}, and there is no {figure}.toml", "Give figure/panel")
        layers = list(self.chain(f"{figure}.toml"))
        found = _panels(layers).get(name)
        if found is None or found.runs is not None or found.draw == "overhead":
            raise InvalidInput("runs", f"is {panel.runs!r}, which has no runs of its own", "Give another panel")
        if panel.draw == "overhead":
            raise InvalidInput("draw", "is 'overhead', which shows no runs", "Leave out runs, or draw it otherwise")
        return self.panel(figure, name, found, layers)

    def layers(self, panel: PanelConfig) -> list[RecipeLayer]:
        """Return the files that a panel extends, then the panel."""
        return [*(() if panel.extends is None else self.chain(panel.extends)), panel]

    def chain(self, name: str, above: tuple[str, ...] = ()) -> Iterator[StudyFile]:
        """Yield the files that a file extends, directly or not, then the file."""
        if name in above:
            raise InvalidInput("extends", f"goes in a circle: {' → '.join([*above, name])}", "Take one of them out")
        content = _read(self.folder / name)
        if content.extends is not None:
            yield from self.chain(content.extends, (*above, name))
        yield content

    def changes(self, layers: Sequence[RecipeLayer]) -> list[ScaleConfig]:
        """Return the changes that the layers have for the scale."""
        return [layer.scales[self.scale] for layer in layers if self.scale in layer.scales]


def _panels(layers: Sequence[StudyFile]) -> dict[str, PanelConfig]:
    return {key: panel for layer in layers for key, panel in layer.panels.items()}


def _last(scales: Sequence[ScaleConfig], name: str) -> Any:
    """Return the value of a field in the last scale that sets it; None if none does."""
    return next((value for scale in reversed(scales) if (value := getattr(scale, name)) is not None), None)


def _read(path: Path) -> StudyFile:
    return parse(StudyFile, read_toml(path), source=str(path))


def _laid_over(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge nested tables key by key, later over earlier; lists are replaced as a whole."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            old = merged.get(key)
            under = [old] if isinstance(old, Mapping) else []
            merged[key] = _laid_over([*under, value]) if isinstance(value, Mapping) else value
    return merged


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every key whose values differ, with both; the fleets of a sweep do not count as changes of the scale."""
    for key in dict.fromkeys([*before, *after]):
        old, new, name = before.get(key), after.get(key), f"{at}{key}"
        if name == "run.fleets" or old == new:
            continue
        if isinstance(old, Mapping | None) and isinstance(new, Mapping | None):
            yield from _differences(old or {}, new or {}, f"{name}.")
        else:
            yield name, old, new
