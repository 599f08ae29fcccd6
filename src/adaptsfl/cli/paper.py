"""The paper's figures and claims: `reproduce`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from adaptsfl.cli.failures import explaining, need_torch
from adaptsfl.cli.options import Overrides
from adaptsfl.cli.printing import complain, plain_console, say
from adaptsfl.errors import message_of
from adaptsfl.reproduce.study import Scale, recipes_folder

if TYPE_CHECKING:
    from adaptsfl.reproduce.results import Written


def reproduce(
    figures: Annotated[
        list[str] | None, typer.Argument(help="By their recipes' names; all by default.", metavar="[FIGURE...|all]")
    ] = None,
    scale: Annotated[Scale, typer.Option(help="Minutes, hours, or days on a GPU.")] = "smoke",
    jobs: Annotated[int, typer.Option("--jobs", help="How many runs at once.", min=1)] = 1,
    seeds: Annotated[
        int | None, typer.Option(help="How many runs of each policy (default: as the scale says).", min=1)
    ] = None,
    override: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Where runs go (default: runs/paper- and the scale).", metavar="FOLDER")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Where claims.md and figures/ go (default: with the runs).", metavar="FOLDER")
    ] = None,
    recipes: Annotated[
        Path | None, typer.Option(help="Where the figures' recipes are (default: the paper's).", metavar="FOLDER")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Run, draw and judge the paper's figures; stopped, the same command goes on where it was."""
    with explaining():
        need_torch()
        from adaptsfl.report.progress import Progress  # noqa: PLC0415 (imports torch)
        from adaptsfl.reproduce.results import write_results  # noqa: PLC0415
        from adaptsfl.reproduce.runner import Reproduction  # noqa: PLC0415

        folder, files = out or Path("runs") / f"paper-{scale}", recipes or recipes_folder()
        asked = Reproduction(figures or (), scale, folder, recipes=files, overrides=override or (), seeds=seeds)
        experiments = list(asked.experiments.values())
        progress = Progress(Console(stderr=True, emoji=False), experiments, list(asked.experiments), quiet=quiet)
        try:
            with progress.watching() as watcher:
                evidence = asked.execute(jobs, watcher)
        except KeyboardInterrupt:
            say(f"stopped. What was done is in {folder}; the same command goes on from there.")
            raise typer.Exit(130) from None
        for job, error in progress.failures:
            complain(f"{experiments[job.experiment].folder / job.folder_name}: {message_of(error)}")
        _show(write_results(evidence, folder, results or folder, files, shlex.join(["adaptsfl", *sys.argv[1:]])))
    if progress.failures:
        raise typer.Exit(1)


def _show(written: "Written") -> None:
    """Print the tables, and the paths of what was written."""
    console = plain_console()
    for table in written.tables:
        console.print(table)
    if written.complaint:
        say(written.complaint)
    for what, path in written.places:
        console.print(f"{what + ':':<9}{path}", soft_wrap=True)
