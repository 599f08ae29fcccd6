"""The command line: parsing and printing only. One file per group of commands; this one puts them together."""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from adaptsfl import __version__
from adaptsfl.cli.deployment import join, serve, up
from adaptsfl.cli.fleet_setup import certs, probe
from adaptsfl.cli.paper import reproduce
from adaptsfl.cli.planning import plan, profile
from adaptsfl.cli.runs import calibrate, report, retime, simulate

app = typer.Typer(
    help="Split federated learning that plans its own cuts and its own aggregation interval.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

# Help shows the commands in this order.
COMMANDS: tuple[Callable[..., None], ...] = (
    plan,
    profile,
    simulate,
    report,
    calibrate,
    retime,
    reproduce,
    join,
    up,
    probe,
    certs,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(serve, name="serve")


def main() -> None:
    """Run the command line."""
    # Idle threads sleep instead of spinning: on a busy machine, spinning threads delay the very threads that they
    # wait for. The variable must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except SystemExit as end:
        if "RANK" not in os.environ:
            raise
        # This process is one of several ranks. A gloo thread that still releases its last tensor would abort the
        # process while Python shuts down, after all work is done, and torchrun would report a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"adaptsfl {__version__}")
        raise typer.Exit
