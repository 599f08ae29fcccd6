"""The command line: parsing and printing only."""

import asyncio
import json
import os
import re
import shlex
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from adaptsfl import __version__, planner
from adaptsfl.checks import printable
from adaptsfl.config import ModelConfig, load_fleet, load_recipe
from adaptsfl.errors import InfeasiblePlan, InvalidInput, RankFailed, Stopped, message_of
from adaptsfl.loading import load_problem, model_costs
from adaptsfl.report import cut_report, plan_report
from adaptsfl.report.figures import write_figures
from adaptsfl.report.foreseen import foreseen_table
from adaptsfl.report.page import write_page
from adaptsfl.report.summary import summary_table
from adaptsfl.report.tables import plain_table
from adaptsfl.reproduce.study import Scale, recipes_folder
from adaptsfl.simulation.folder import RUN, Run, find_runs

app = typer.Typer(
    help="Split federated learning that plans its own cuts and its own aggregation interval.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def main() -> None:
    """Run the command line."""
    # Threads that have nothing to do sleep instead of spinning: on a busy machine spinning ones keep others from
    # the work that they wait for. It has to be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
        bool | None, typer.Option(help="Plan anew with half and double resources (default: yes, with --json no).")
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Stop exact or bcd after so many seconds.", metavar="SECONDS", min=0)
    ] = float("inf"),
) -> None:
    """Choose the interval and every device's cut, and say what they cost and what would change them."""
    solvers = ["exact", "bcd"] if compare else [solver]
    details = not as_json if sensitivity is None else sensitivity
    failed = False
    for file in files:
        try:
            _plan_file(file, solvers, time_limit, as_json=as_json, details=details)
        except Exception as error:
            failed = True
            message = message_of(error)
            message = message if str(file) in message else f"{file}: {message}"
            _complain(message)
            if as_json:
                status = "infeasible" if isinstance(error, InfeasiblePlan) else "error"
                _print_json({"file": str(file), **_NO_PLAN, "status": status, "error": message})
    if failed:
        raise typer.Exit(1)


@app.command()
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
        Literal["float32", "float16", "bfloat16", "int8"], typer.Option(help="What activations are sent in.")
    ] = "float32",
    optimizer: Annotated[Literal["sgd", "momentum", "adam"], typer.Option(help="Optimiser, for memory.")] = "sgd",
    plot: Annotated[Path | None, typer.Option(help="Draw a figure (.png or .svg) too.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as in a problem file's cuts.")] = False,
) -> None:
    """Measure what every cut of a model costs: work, traffic and memory."""
    try:
        settings = ModelConfig(
            name=model,
            options=dict(_key_value(text) for text in option or ()),
            granularity=granularity,
            wire_dtype=wire_dtype,
            input_shape=None if input_shape is None else _shape(input_shape),
            input_dtype=input_dtype,
        )
        if plot is not None:
            cut_report.check_suffix(plot)
        costs = model_costs(settings, batch_size, optimizer)
        if plot is not None:
            cut_report.plot_cuts(costs, plot, title=model)
    except Exception as error:
        _complain(message_of(error))
        raise typer.Exit(1) from None
    if as_json:
        _print_json(cut_report.cut_data(costs))
    else:
        title = f"{model}: {costs.layers} layers; work and activations per sample, memory for batches of {batch_size}"
        _console().print(cut_report.cut_table(title, costs))
    if plot is not None:
        Console(stderr=True).print(f"figure saved to {plot}", soft_wrap=True)


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Say it otherwise than the file does.", metavar="SECTION.KEY=VALUE", show_default=False),
]
Runs = Annotated[list[Path], typer.Argument(help="Experiments, or folders of single runs.", metavar="RUN...")]


@app.command()
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
    with _explaining(recipe):
        _need_torch()
        from adaptsfl.report.progress import Progress  # noqa: PLC0415 (imports torch)
        from adaptsfl.report.side_progress import SideProgress  # noqa: PLC0415
        from adaptsfl.simulation.experiment import Experiment, Job  # noqa: PLC0415
        from adaptsfl.simulation.side_by_side import execute_side_by_side  # noqa: PLC0415
        from adaptsfl.training.ranks import joined, launched  # noqa: PLC0415

        content = load_recipe(recipe, override or ())
        folder = out or Path("runs") / _folder_name(content.name or recipe.stem)
        names = [name.strip() for name in policies.split(",")] if policies is not None else []
        if jobs > 1 and launched():
            raise InvalidInput("--jobs", f"is {jobs}, but ranks train every run together", "Leave out one of both")
        console = Console(stderr=True, emoji=False)
        failures: list[tuple[Job, Exception]]
        try:
            if jobs == 1:
                with joined(content.training.device) as ranks:
                    experiment = Experiment(content, folder, policies=names, seeds=seeds, ranks=ranks)
                    progress = Progress(console, experiment.jobs, quiet=quiet or not ranks.first)
                    with progress.watching() as watcher:
                        runs = experiment.execute(watcher)
                failures = progress.failures
                if not ranks.first:
                    return
            else:
                experiment = Experiment(content, folder, policies=names, seeds=seeds)
                beside = SideProgress(console, [experiment], quiet=quiet)
                with beside.watching() as side_watcher:
                    (runs,) = execute_side_by_side([experiment], jobs, side_watcher)
                failures = [(task.job, error) for task, error in beside.failures]
        except KeyboardInterrupt:
            if _speaks():
                _say(f"stopped. What was done is in {folder}; the same command goes on from there.")
            raise typer.Exit(130) from None
        for job, error in failures:
            _complain(f"{folder / job.folder_name}: {message_of(error)}")
        runs = [run for run in runs if run.blocks]
        if runs:
            _close(runs, folder / "report.html")
    if failures:
        raise typer.Exit(1)


@app.command()
def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(help="The page (default: report.html beside the first runs).", metavar="FILE")
    ] = None,
) -> None:
    """Show runs as a table, as figures and as one HTML page."""
    with _explaining():
        _close(find_runs(runs), out or _experiment_of(runs[0]) / "report.html")


@app.command()
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
    with _explaining():
        _need_torch()
        from adaptsfl.simulation.retime import retime as charge_anew  # noqa: PLC0415 (imports torch)

        config = load_fleet(fleet, override or ())
        experiment = _experiment_of(runs[0])
        folder = out or experiment.with_name(f"{experiment.name}-{fleet.stem}")
        _close(charge_anew(find_runs(runs), config, folder, name=fleet.stem), folder / "report.html")


@app.command()
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
    with _explaining():
        _need_torch()
        from adaptsfl.report.side_progress import SideProgress  # noqa: PLC0415 (imports torch)
        from adaptsfl.reproduce.results import write_results  # noqa: PLC0415
        from adaptsfl.reproduce.runner import Reproduction  # noqa: PLC0415

        folder = out or Path("runs") / f"paper-{scale}"
        asked = Reproduction(
            figures or (), scale, folder, recipes=recipes or recipes_folder(), overrides=override or (), seeds=seeds
        )
        experiments = list(asked.experiments.values())
        progress = SideProgress(Console(stderr=True, emoji=False), experiments, list(asked.experiments), quiet=quiet)
        try:
            with progress.watching() as watcher:
                evidence = asked.execute(jobs, watcher)
        except KeyboardInterrupt:
            _say(f"stopped. What was done is in {folder}; the same command goes on from there.")
            raise typer.Exit(130) from None
        for task, error in progress.failures:
            where = experiments[task.experiment].folder / task.job.folder_name
            _complain(f"{where}: {message_of(error)}")
        written = write_results(evidence, folder, results or folder, recipes or recipes_folder(), _command())
        console = _console()
        for table in written.tables:
            console.print(table)
        if written.complaint:
            _say(written.complaint)
        for what, path in written.places:
            console.print(f"{what + ':':<9}{path}", soft_wrap=True)
    if progress.failures:
        raise typer.Exit(1)


serve_app = typer.Typer(help="Serve a deployment: the edge server, or the fed server.", no_args_is_help=True)
app.add_typer(serve_app, name="serve")

RecipeFile = Annotated[Path, typer.Argument(help="A recipe (.toml), the same for both servers.")]
Listen = Annotated[str, typer.Option(help="Where to listen.", metavar="HOST:PORT")]
FedAddress = Annotated[str, typer.Option("--fed", help="The fed server.", metavar="HOST:PORT")]
EdgeAddress = Annotated[str, typer.Option("--edge", help="The edge server.", metavar="HOST:PORT")]
Certs = Annotated[
    Path | None,
    typer.Option(help="Folder with ca.pem and this party's certificate and key.", metavar="FOLDER", show_default=False),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS, on this machine only.")]
ServerOut = Annotated[
    Path | None, typer.Option(help="Where it keeps what it learned (default: runs/ and the recipe's name).")
]


@serve_app.command("edge")
def serve_edge(
    recipe: RecipeFile,
    fed: FedAddress,
    listen: Listen = "0.0.0.0:7001",
    certs: Certs = None,
    insecure: Insecure = False,
    out: ServerOut = None,
    status_port: Annotated[
        int | None, typer.Option(help="Serve the status page on this port of this machine; 0 takes a free one.")
    ] = 7003,
    override: Overrides = None,
) -> None:
    """Plan, and train the common layers for all devices; stopped, the same command goes on where it was."""
    with _explaining(recipe):
        _need_deploy()
        from adaptsfl.deploy import parties  # noqa: PLC0415 (imports torch)

        content = load_recipe(recipe, override or ())
        folder = out or Path("runs") / _folder_name(content.name or recipe.stem) / "edge"
        credentials = _credentials(certs, "edge", insecure=insecure)
        asyncio.run(parties.serve_edge(content, listen, fed, credentials, folder, _tell, status_port=status_port))
        _close(find_runs([folder]), folder / "report.html")


@serve_app.command("fed")
def serve_fed(
    recipe: RecipeFile,
    listen: Listen = "0.0.0.0:7002",
    certs: Certs = None,
    insecure: Insecure = False,
    out: ServerOut = None,
    override: Overrides = None,
) -> None:
    """Average the devices' layers, and put the model together at the end."""
    with _explaining(recipe):
        _need_deploy()
        from adaptsfl.deploy import parties  # noqa: PLC0415 (imports torch)

        content = load_recipe(recipe, override or ())
        folder = out or Path("runs") / _folder_name(content.name or recipe.stem) / "fed"
        credentials = _credentials(certs, "fed", insecure=insecure)
        asyncio.run(parties.serve_fed(content, listen, credentials, folder, _tell))


@app.command()
def join(
    edge: EdgeAddress,
    fed: FedAddress,
    name: Annotated[str, typer.Option(help="This device, as in its certificate.")],
    certs: Certs = None,
    insecure: Insecure = False,
    data: Annotated[
        Path | None, typer.Option(help="This device's samples (default: its part of the run's dataset).")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A factory of yours that the servers may name.", metavar="PACKAGE.MODULE:FACTORY"),
    ] = None,
    cut_floor: Annotated[int, typer.Option(help="Refuse to cut the model before this layer.", min=1)] = 1,
    probe_links: Annotated[
        bool, typer.Option(help="Measure links first, by some MB; else the first rounds tell.")
    ] = True,
    patience: Annotated[
        float, typer.Option(help="Knock so long at a server that hangs up without a word.", metavar="SECONDS", min=0)
    ] = 60.0,
) -> None:
    """Train as a device of a deployment, on data that never leave this machine."""
    with _explaining():
        _need_deploy()
        from adaptsfl.deploy import parties  # noqa: PLC0415 (imports torch)
        from adaptsfl.deploy.identity import Party  # noqa: PLC0415

        credentials = _credentials(certs, name, insecure=insecure)
        reason = asyncio.run(
            parties.join(
                Party("device", name),
                edge,
                fed,
                credentials,
                _tell,
                data=data,
                allowed=allow or (),
                floor=cut_floor,
                patience_s=patience,
                probe_links=probe_links,
            )
        )
        _tell(reason)


@app.command()
def up(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml).")],
    devices: Annotated[int, typer.Option(help="How many devices.", min=1)] = 4,
    out: Annotated[
        Path | None, typer.Option(help="Where all of it goes (default: runs/ and the recipe's name).")
    ] = None,
    status_port: Annotated[int, typer.Option(help="Of the status page; 0 takes a free one.")] = 0,
    override: Overrides = None,
) -> None:
    """Start a whole deployment on this machine, over TLS: fed server, edge server and devices."""
    with _explaining(recipe):
        _need_deploy()
        from adaptsfl.deploy.up import fleet_up  # noqa: PLC0415

        content = load_recipe(recipe, override or ())
        folder = out or Path("runs") / f"{_folder_name(content.name or recipe.stem)}-up"
        console = Console(emoji=False, highlight=False, markup=False)

        def say(party: str, text: str) -> None:
            console.print(f"{party:>9} | {text}", soft_wrap=True)

        try:
            with fleet_up(recipe, devices, folder, say, status_port=status_port, more=override) as fleet:
                fleet.wait()
        except KeyboardInterrupt:
            _say("stopped; the same command goes on from the last checkpoint.")
            raise typer.Exit(130) from None
        console.print(f"model:   {folder / 'fed' / 'model.safetensors'}", soft_wrap=True)


@app.command()
def probe(
    what: Annotated[
        str | None,
        typer.Argument(help="Whose layers to time: a recipe (.toml), a name of the zoo, or package.module:factory."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Give the model an option.", metavar="KEY=VALUE", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Mini-batch (default: the recipe's, or 16).", min=1, show_default=False)
    ] = None,
    edge: Annotated[str | None, typer.Option(help="Measure the link to this edge server.", metavar="HOST:PORT")] = None,
    fed: Annotated[str | None, typer.Option(help="Measure the link to this fed server.", metavar="HOST:PORT")] = None,
    name: Annotated[str | None, typer.Option(help="This device, as in its certificate.")] = None,
    certs: Certs = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what this machine can do as a device: the seconds of every layer, and the rates of its links."""
    with _explaining(Path(what) if what and what.endswith(".toml") else None):
        servers = {role: address for role, address in (("edge", edge), ("fed", fed)) if address is not None}
        if what is None and not servers:
            raise InvalidInput("probe", "has nothing to measure", "Give a model or a recipe, --edge, --fed, or all")
        if servers and name is None:
            raise InvalidInput("--name", "is missing", "Give this device's name, as in its certificate")
        found: dict[str, Any] = {}
        if what is not None:
            found |= _probe_layers(what, option or (), batch_size)
        if servers:
            found["links"] = _probe_links(servers, str(name), certs, insecure=insecure)
        if as_json:
            _print_json(found)
        else:
            _print_probe(found)


def _probe_layers(what: str, options: Sequence[str], batch_size: int | None) -> dict[str, Any]:
    """Time the layers of a model on this machine."""
    _need_torch()
    from adaptsfl.loading import split_model  # noqa: PLC0415
    from adaptsfl.training.timing import time_layers  # noqa: PLC0415 (imports torch)

    more = dict(_key_value(text) for text in options)
    if what.endswith(".toml"):
        recipe = load_recipe(Path(what))
        settings, samples = recipe.model, recipe.training.batch_size
        settings = settings.model_copy(update={"options": {**settings.options, **more}})
    else:
        settings, samples = ModelConfig(name=what, options=more), 16
    samples = batch_size or samples
    model, example = split_model(settings, to_train=True)
    times = time_layers(model, example, samples)
    rows = zip(model.names, times.forward_s, times.backward_s, strict=True)
    layers = [{"name": name, "forward_s": forward, "backward_s": backward} for name, forward, backward in rows]
    return {"model": settings.name, "batch_size": samples, "layers": layers}


def _probe_links(servers: Mapping[str, str], name: str, certs: Path | None, *, insecure: bool) -> dict[str, Any]:
    """Measure the links to servers; what is too fast to measure is null."""
    _need_deploy()
    from adaptsfl.deploy.identity import Party  # noqa: PLC0415 (an extra)
    from adaptsfl.deploy.probe import probe_links  # noqa: PLC0415 (imports torch)

    credentials = _credentials(certs, name, insecure=insecure)
    rates = asyncio.run(probe_links(servers, credentials, Party("device", name)))  # type: ignore[arg-type]
    return {
        role: {"uplink_bps": link.uplink or None, "downlink_bps": link.downlink or None} for role, link in rates.items()
    }


def _print_probe(found: Mapping[str, Any]) -> None:
    console = _console()
    if "layers" in found:
        table = plain_table(f"{found['model']}, mini-batches of {found['batch_size']}")
        for column in ("layer", "name", "forward", "backward"):
            table.add_column(column, justify="left" if column == "name" else "right")
        for number, layer in enumerate(found["layers"], start=1):
            times = (f"{1e3 * layer[key]:.3f} ms" for key in ("forward_s", "backward_s"))
            table.add_row(str(number), layer["name"], *times)
        sums = (f"{1e3 * sum(layer[key] for layer in found['layers']):.3f} ms" for key in ("forward_s", "backward_s"))
        table.add_row("", "all", *sums)
        console.print(table)
    if "links" in found:
        table = plain_table("links")
        for column in ("to", "up", "down"):
            table.add_column(column, justify="left" if column == "to" else "right")
        for role, rates in found["links"].items():
            shown = ("–" if rate is None else f"{rate / 1e6:,.1f} Mbit/s" for rate in rates.values())
            table.add_row(f"{role} server", *shown)
        console.print(table)


def _credentials(folder: Path | None, name: str, *, insecure: bool) -> Any:
    """Return a party's certificate and key, or nothing if it was asked for in so many words."""
    from adaptsfl.deploy.identity import load_credentials  # noqa: PLC0415

    if insecure:
        if folder is not None:
            raise InvalidInput("--insecure", "is given beside --certs", "Give one of them")
        return None
    if folder is None:
        remedy = "Make certificates: adaptsfl certs FOLDER. To try things out on one machine: --insecure"
        raise InvalidInput("--certs", "is missing", remedy)
    return load_credentials(folder, name)


def _tell(text: str) -> None:
    """Print a line of what goes on, with the time; what others say in it cannot move the cursor."""
    _console().print(f"{time.strftime('%H:%M:%S')} {printable(text, 2000)}", soft_wrap=True)


def _need_deploy() -> None:
    for module in ("torch", "grpc", "cryptography"):
        if find_spec(module) is None:
            raise InvalidInput("deploy", f"needs {module}", "Install it: pip install 'adaptsfl[deploy]'")


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Where the authority and all certificates are kept.")],
    devices: Annotated[
        int, typer.Option("--devices", help="Certificates for device-1 to device-N.", metavar="N", min=0, max=100_000)
    ] = 0,
    device: Annotated[
        list[str] | None, typer.Option(help="One for a device of this name; repeatable.", metavar="NAME")
    ] = None,
    days: Annotated[int, typer.Option(help="How long new certificates are valid.")] = 365,
    renew: Annotated[
        list[str] | None, typer.Option(help="Replace this party's certificate and key; repeatable.", metavar="NAME")
    ] = None,
) -> None:
    """Make certificates for the servers and devices of a deployment; those that are there are left alone."""
    with _explaining():
        if find_spec("cryptography") is None:
            raise InvalidInput("certs", "needs cryptography", "Install it: pip install 'adaptsfl[deploy]'")
        from adaptsfl.deploy.certs import make_certificates, renew_certificate, valid_until  # noqa: PLC0415 (an extra)

        wanted = [*(f"device-{number}" for number in range(1, devices + 1)), *(device or ())]
        made = [path for name in renew or () for path in renew_certificate(folder, name, days=days)]
        if wanted or not renew:
            made += make_certificates(folder, wanted, days=days)
        _print_certificates(folder, [path.stem for path in made if path.suffix == ".pem"], valid_until(folder))


def _print_certificates(folder: Path, made: Sequence[str], ends: Mapping[str, datetime]) -> None:
    """Say what was made and who gets which files, and which of the others end soon."""
    for name, end in ends.items():
        if (left := end - datetime.now(UTC)) < timedelta(days=30) and name not in made:
            state = "expires" if left > timedelta() else "expired"
            _say(f"{name}.pem {state} on {end:%Y-%m-%d}: renew it with --renew {name}")
    console = _console()
    if not made:
        console.print(f"{folder}: everything asked for is there, nothing was changed", soft_wrap=True)
        return
    console.print(f"made in {folder}:", soft_wrap=True)
    for name in made:
        what = f"valid until {ends[name]:%Y-%m-%d}" if name in ends else "the authority"
        console.print(f"  {name}.pem, {name}.key: {what}", soft_wrap=True)
    console.print("Copy to each party its own .pem and .key, and ca.pem; nothing else.", soft_wrap=True)
    console.print("Keep ca.key here, and to yourself: whoever has it can be any party.", soft_wrap=True)


def _command() -> str:
    """Return what was typed, as far as the program knows it."""
    return shlex.join(["adaptsfl", *sys.argv[1:]])


def _close(runs: Sequence[Run], page: Path) -> None:
    """Print what came of runs, draw it, and say where everything is."""
    console = _console()
    console.print(summary_table(runs))
    for run in runs:
        table = foreseen_table(run)
        if table is not None:
            console.print(table)
    try:
        folder = page.parent / "figures"
        write_figures(runs, folder)
        console.print(f"figures: {folder}", soft_wrap=True)
    except InvalidInput as error:  # the page needs none of them
        _say(str(error))
    write_page(runs, page)
    console.print(f"report:  {page}", soft_wrap=True)


def _experiment_of(path: Path) -> Path:
    """Return the folder of an experiment, given that or the folder of one of its runs."""
    path = path.resolve() if path.name in ("", "..") else path
    return path.parent if (path / RUN).is_file() else path


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip(".-") or "experiment"


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise InvalidInput("simulate", "needs torch", "Install it: pip install 'adaptsfl[train]'")


def _key_value(text: str) -> tuple[str, bool | int | float | str]:
    """Return `key=value` with the value read as TOML reads it, and as plain text where that fails."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidInput("option", f"is {text!r}", "Give KEY=VALUE, for example --option classes=100")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return key, parsed if isinstance(parsed, bool | int | float) else value


def _shape(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise InvalidInput("input-shape", f"is {text!r}", "Give whole numbers, for example 3,32,32") from None


def _console() -> Console:
    """Return a console that prints names as they are, whatever brackets they hold."""
    return Console(markup=False, emoji=False, highlight=False)


@contextmanager
def _explaining(file: Path | None = None) -> Iterator[None]:
    """Print what went wrong, with the file that it is about, and end with 1."""
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        raise
    except Stopped as error:
        _say(str(error))
        raise typer.Exit(130) from None
    except Exception as error:
        message = message_of(error)
        named = file is None or str(file) in message or not isinstance(error, InvalidInput) or error.source
        if _speaks() or isinstance(error, RankFailed):
            _complain(message if named else f"{file}: {message}")
        raise typer.Exit(1) from None


def _speaks() -> bool:
    """Whether this process says what all of a machine would say: the first of those that torchrun started there."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say(message: str) -> None:
    Console(stderr=True, emoji=False).print(message, markup=False, highlight=False, soft_wrap=True)


def _complain(message: str) -> None:
    console = Console(stderr=True, emoji=False)  # :x: in a name is no picture
    console.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


_NO_PLAN: dict[str, Any] = dict.fromkeys(("interval", "cuts", "predicted_time_s", "lower_bound_s", "solve_s"))


def _plan_file(file: Path, solvers: Sequence[str], time_limit_s: float, *, as_json: bool, details: bool) -> None:
    """Plan one file and print what was found."""
    problem = load_problem(file)
    plans = [planner.plan(problem, solver, time_limit_s) for solver in solvers]
    best = plans[0]
    others = planner.alternatives(problem, best) if details else []
    sensitivities = planner.sensitivity(problem, best, time_limit_s) if details else []
    if as_json:
        data = {"file": str(file), **plan_report.plan_data(problem, best, others, sensitivities)}
        if len(plans) > 1:
            data["compared"] = [plan_report.plan_data(problem, other) for other in plans[1:]]
        _print_json(data)
        return
    console = _console()
    console.print(plan_report.plan_tables(str(file), problem, best, others, sensitivities))
    if len(plans) > 1:
        console.print(plan_report.comparison_table(plans))


def _print_json(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")
    sys.stdout.flush()
