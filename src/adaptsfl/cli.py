"""The command line: parsing and printing only."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from adaptsfl import __version__, planner
from adaptsfl.errors import AdaptSFLError, InfeasiblePlan
from adaptsfl.loading import load_problem
from adaptsfl.report import plan_report

app = typer.Typer(
    help="Split federated learning that plans its own cuts and its own aggregation interval.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def main() -> None:
    """Run the command line."""
    app()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"adaptsfl {__version__}")
        raise typer.Exit


@app.command()
def plan(
    files: Annotated[list[Path], typer.Argument(help="Recipes (.toml) and problems (.json).", metavar="FILE...")],
    solver: Annotated[
        Literal["exact", "bcd", "exhaustive"],
        typer.Option(help="Who plans: the optimum, the paper's algorithm, or every plan tried (tiny problems)."),
    ] = "exact",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per file, one per line.")] = False,
    compare: Annotated[bool, typer.Option(help="Run exact and bcd side by side.")] = False,
    sensitivity: Annotated[
        bool | None, typer.Option(help="Plan anew with half and double resources. [default: yes, with --json no]")
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Stop a solver after so many seconds.", metavar="SECONDS", min=0)
    ] = float("inf"),
) -> None:
    """Choose the interval and every device's cut, and say what they cost and what would change them."""
    solvers = ["exact", "bcd"] if compare else [solver]
    details = not as_json if sensitivity is None else sensitivity
    failed = False
    for file in files:
        try:
            _plan_file(file, solvers, time_limit, as_json=as_json, details=details)
        except AdaptSFLError as error:
            failed = True
            message = str(error) if str(file) in str(error) else f"{file}: {error}"
            Console(stderr=True).print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
            if as_json:
                status = "infeasible" if isinstance(error, InfeasiblePlan) else "error"
                _print_json({"file": str(file), **_NO_PLAN, "status": status, "error": message})
    if failed:
        raise typer.Exit(1)


_NO_PLAN: dict[str, Any] = dict.fromkeys(("interval", "cuts", "predicted_time_s", "lower_bound_s", "solve_s"))


def _plan_file(file: Path, solvers: Sequence[str], time_limit_s: float, *, as_json: bool, details: bool) -> None:
    """Plan one file and print what was found."""
    problem = load_problem(file)
    plans = [planner.plan(problem, solver, time_limit_s) for solver in solvers]
    best = plans[0]
    others = planner.alternatives(problem, best) if details else []
    sensitivities = planner.sensitivity(problem, best) if details else []
    if as_json:
        data = {"file": str(file), **plan_report.plan_data(problem, best, others, sensitivities)}
        if len(plans) > 1:
            data["compared"] = [plan_report.plan_data(problem, other) for other in plans[1:]]
        _print_json(data)
        return
    console = Console()
    console.print(plan_report.plan_tables(str(file), problem, best, others, sensitivities))
    if len(plans) > 1:
        console.print(plan_report.comparison_table(plans))


def _print_json(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")
    sys.stdout.flush()
