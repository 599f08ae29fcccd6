"""Simulated runs: `simulate`, `report`, `calibrate` and `retime`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adaptsfl.cli.failures import explaining, need_torch, stopped_by_ctrl_c
from adaptsfl.cli.options import Overrides, folder_name
from adaptsfl.cli.printing import complain, say
from adaptsfl.cli.results import show_runs
from adaptsfl.config import load_fleet, load_recipe
from adaptsfl.errors import InvalidInput, message_of
from adaptsfl.runs.folder import RUN, find_runs
from adaptsfl.runs.learned import as_section, learned_growth
from adaptsfl.runs.measured_trace import write_measured

Runs = Annotated[list[Path], typer.Argument(help="Experiments, or folders of single runs.", metavar="RUN...")]


def simulate(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml) that says how long to run.")],
    policies: Annotated[
        str | None, typer.Option(help="Which ones, instead of the recipe's.", metavar="NAME,NAME…", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many runs of each policy, every one with its own seed.", min=1)] = 1,
    override: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Where runs go (default: runs/ and the recipe's name).", metavar="FOLDER")
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", help="How many runs at once, each in a process of its own.", min=1)
    ] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Train by one or more policies over a simulated fleet; stopped, the same command goes on where it was."""
    with explaining(recipe):
        need_torch()
        from adaptsfl.report.progress import Progress  # noqa: PLC0415 (imports torch)
        from adaptsfl.simulation.experiment import Experiment  # noqa: PLC0415
        from adaptsfl.simulation.side_by_side import execute_side_by_side  # noqa: PLC0415
        from adaptsfl.training.ranks import joined, launched  # noqa: PLC0415

        content = load_recipe(recipe, override or ())
        folder = out or Path("runs") / folder_name(content.name or recipe.stem)
        names = [name.strip() for name in policies.split(",")] if policies is not None else []
        if jobs > 1 and launched():
            raise InvalidInput("--jobs", f"is {jobs}, but ranks train every run together", "Leave out one of both")
        with stopped_by_ctrl_c(folder), joined(content.training.device) as ranks:
            experiment = Experiment(content, folder, policies=names, seeds=seeds, ranks=ranks)
            progress = Progress(Console(stderr=True, emoji=False), [experiment], quiet=quiet or not ranks.first)
            with progress.watching() as watcher:
                if jobs == 1:
                    runs = experiment.execute(watcher)
                else:
                    (runs,) = execute_side_by_side([experiment], jobs, watcher)
        for job, error in progress.failures:
            complain(f"{folder / job.folder_name}: {message_of(error)}")
        runs = [run for run in runs if run.blocks]
        if runs:
            show_runs(runs, folder / "report.html")
    if progress.failures:
        raise typer.Exit(1)


def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(help="The page (default: report.html beside the first runs).", metavar="FILE")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the fleet that one run measured as a trace, to simulate it.", metavar="FILE"),
    ] = None,
) -> None:
    """Show runs as a table, as figures and as one HTML page."""
    with explaining():
        found = find_runs(runs)
        if trace is not None:
            if len(found) != 1:
                raise InvalidInput("--trace", f"is given with {len(found)} runs", "Give one run: fleets differ by run")
            write_measured(found[0], trace)
            say(f"trace: {trace}")
        show_runs(found, out or _experiment_of(runs[0]) / "report.html")


def calibrate(runs: Runs) -> None:
    """Print what runs learned about longer intervals, as the [convergence] of a recipe to plan or to begin with."""
    with explaining():
        typer.echo(as_section(learned_growth(find_runs(runs))), nl=False)


def retime(
    runs: Runs,
    fleet: Annotated[Path, typer.Option(help="A recipe, or a TOML file with a fleet alone.", metavar="FILE")],
    override: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where they go (default: beside the experiment, named for the fleet).", metavar="FOLDER"),
    ] = None,
) -> None:
    """Charge recorded runs under another fleet, without training: the decisions stay as they were."""
    with explaining():
        need_torch()
        from adaptsfl.simulation.retime import retime as charge_anew  # noqa: PLC0415 (imports torch)

        config = load_fleet(fleet, override or ())
        experiment = _experiment_of(runs[0])
        folder = out or experiment.with_name(f"{experiment.name}-{fleet.stem}")
        show_runs(charge_anew(find_runs(runs), config, folder, name=fleet.stem), folder / "report.html")


def _experiment_of(path: Path) -> Path:
    """Return the folder of an experiment, given that folder or the folder of one of its runs."""
    path = path.resolve() if path.name in ("", "..") else path
    return path.parent if (path / RUN).is_file() else path
