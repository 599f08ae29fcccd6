"""Commands that run nothing yet: `plan` and `profile`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from adaptsfl import planner
from adaptsfl.cli.failures import explaining
from adaptsfl.cli.options import key_value
from adaptsfl.cli.printing import complain, plain_console, print_json, say
from adaptsfl.config import ModelConfig, parse
from adaptsfl.errors import InfeasiblePlan, InvalidInput, inside, message_of
from adaptsfl.loading import load_problem, model_costs
from adaptsfl.report import cut_report, plan_report

OTHER_ROUNDS_UP_TO = 1000  # devices; up to so many, two more plans take milliseconds, so JSON has them by default

_NO_PLAN: dict[str, Any] = dict.fromkeys(("interval", "cuts", "predicted_time_s", "lower_bound_s", "solve_s"))


def plan(
    files: Annotated[list[Path], typer.Argument(help="Recipes (.toml) and problems (.json).", metavar="FILE...")],
    solver: Annotated[
        Literal["exact", "bcd", "exhaustive"],
        typer.Option(help="Who plans: the optimum, the paper's algorithm, or every plan tried (tiny problems)."),
    ] = "exact",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per file, one per line.")] = False,
    compare: Annotated[bool, typer.Option(help="Run exact and bcd side by side.")] = False,
    sensitivity: Annotated[
        bool | None,
        typer.Option(
            help="Plan anew with half and double of resources and of drift (default: yes; with --json of drift only, "
            f"up to {OTHER_ROUNDS_UP_TO:,} devices)."
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Stop exact or bcd after so many seconds.", metavar="SECONDS", min=0)
    ] = float("inf"),
) -> None:
    """Choose the interval and every device's cut, and say what they cost and what would change them."""
    solvers = ["exact", "bcd"] if compare else [solver]
    failed = False
    for file in files:
        try:
            _plan_file(file, solvers, time_limit, as_json=as_json, sensitivity=sensitivity)
        except Exception as error:
            failed = True
            message = message_of(error)
            message = message if str(file) in message else f"{file}: {message}"
            complain(message)
            if as_json:
                status = "infeasible" if isinstance(error, InfeasiblePlan) else "error"
                print_json({"file": str(file), **_NO_PLAN, "status": status, "error": message})
    if failed:
        raise typer.Exit(1)


def _plan_file(
    file: Path, solvers: Sequence[str], time_limit_s: float, *, as_json: bool, sensitivity: bool | None
) -> None:
    """Plan one file and print the result."""
    problem = load_problem(file, lambda text: say(f"{file}: {text}"))
    details = not as_json if sensitivity is None else sensitivity
    unasked = sensitivity is None and problem.devices <= OTHER_ROUNDS_UP_TO
    plans = [planner.plan(problem, solver, time_limit_s) for solver in solvers]
    best = plans[0]
    others = planner.alternatives(problem, best) if details else []
    sensitivities = planner.sensitivity(problem, best, time_limit_s) if details else []
    rounds = planner.other_rounds(problem, best, time_limit_s) if details or unasked else []
    choices = planner.without(problem, best, time_limit_s) if details or unasked else []
    if as_json:
        data = {"file": str(file), **plan_report.plan_data(problem, best, others, sensitivities, rounds, choices)}
        if len(plans) > 1:
            data["compared"] = [plan_report.plan_data(problem, other) for other in plans[1:]]
        print_json(data)
        return
    console = plain_console()
    console.print(plan_report.plan_tables(str(file), problem, best, others, sensitivities, rounds, choices))
    if len(plans) > 1:
        console.print(plan_report.comparison_table(plans))


def profile(
    model: Annotated[str, typer.Argument(help="A name of the zoo, or package.module:factory of your own.")],
    option: Annotated[
        list[str] | None, typer.Option(help="Give the factory an option.", metavar="KEY=VALUE", show_default=False)
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of one sample, for a factory that gives no example.", metavar="3,32,32")
    ] = None,
    input_dtype: Annotated[Literal["float32", "int64"], typer.Option(help="Type of that sample.")] = "float32",
    granularity: Annotated[Literal["layer", "block"], typer.Option(help="How finely to cut.")] = "layer",
    batch_size: Annotated[int, typer.Option(help="Mini-batch, for memory.", min=1)] = 16,
    wire_dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8", "int4"], typer.Option(help="What activations are sent in.")
    ] = "float32",
    optimizer: Annotated[Literal["sgd", "momentum", "adam"], typer.Option(help="Optimiser, for memory.")] = "sgd",
    plot: Annotated[Path | None, typer.Option(help="Draw a figure (.png or .svg) too.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as in a problem file's cuts.")] = False,
) -> None:
    """Measure what every cut of a model costs: work, traffic and memory."""
    with explaining():
        content = {
            "name": model,
            "options": dict(key_value(text) for text in option or ()),
            "granularity": granularity,
            "wire_dtype": wire_dtype,
            "input_shape": None if input_shape is None else _shape(input_shape),
            "input_dtype": input_dtype,
        }
        with inside("model"):
            settings = parse(ModelConfig, content)
        if plot is not None:
            cut_report.check_suffix(plot)
        costs = model_costs(settings, batch_size, optimizer)
        if plot is not None:
            cut_report.plot_cuts(costs, plot, title=model)
    if as_json:
        print_json(cut_report.cut_data(costs))
    else:
        title = f"{model}: {costs.layers} layers; work and activations per sample, memory for batches of {batch_size}"
        plain_console().print(cut_report.cut_table(title, costs))
    if plot is not None:
        Console(stderr=True).print(f"figure saved to {plot}", soft_wrap=True)


def _shape(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise InvalidInput("input-shape", f"is {text!r}", "Give whole numbers, for example 3,32,32") from None
