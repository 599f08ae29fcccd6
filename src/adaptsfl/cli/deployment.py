"""Real devices and servers: `serve edge`, `serve fed`, `join`, and `up` for all of them on one machine."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from adaptsfl.cli.failures import explaining, need_deploy
from adaptsfl.cli.options import Certs, Insecure, Overrides, chosen_credentials, folder_name
from adaptsfl.cli.printing import plain_console, say, tell
from adaptsfl.cli.results import show_runs
from adaptsfl.config import load_fleet, load_recipe
from adaptsfl.errors import InvalidInput, inside
from adaptsfl.fleet import Resources, read_trace, resources_from
from adaptsfl.runs.folder import find_runs

DEVICES = 4  # of `up`, unless told otherwise

serve = typer.Typer(help="Serve a deployment: the edge server, or the fed server.", no_args_is_help=True)

RecipeFile = Annotated[Path, typer.Argument(help="A recipe (.toml), the same for both servers.")]
Listen = Annotated[str, typer.Option(help="Where to listen.", metavar="HOST:PORT")]
FedAddress = Annotated[str, typer.Option("--fed", help="The fed server.", metavar="HOST:PORT")]
EdgeAddress = Annotated[str, typer.Option("--edge", help="The edge server.", metavar="HOST:PORT")]
ServerOut = Annotated[
    Path | None, typer.Option(help="Where it keeps what it learned (default: runs/ and the recipe's name).")
]


@serve.command("edge")
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
    with explaining(recipe):
        need_deploy()
        from adaptsfl.deploy.parties import processes  # noqa: PLC0415 (imports torch)

        content = load_recipe(recipe, override or ())
        folder = out or Path("runs") / folder_name(content.name or recipe.stem) / "edge"
        credentials = chosen_credentials(certs, "edge", insecure=insecure)
        asyncio.run(processes.serve_edge(content, listen, fed, credentials, folder, tell, status_port=status_port))
        show_runs(find_runs([folder]), folder / "report.html")


@serve.command("fed")
def serve_fed(
    recipe: RecipeFile,
    listen: Listen = "0.0.0.0:7002",
    certs: Certs = None,
    insecure: Insecure = False,
    out: ServerOut = None,
    override: Overrides = None,
) -> None:
    """Average the devices' layers, and put the model together at the end."""
    with explaining(recipe):
        need_deploy()
        from adaptsfl.deploy.parties import processes  # noqa: PLC0415 (imports torch)

        content = load_recipe(recipe, override or ())
        folder = out or Path("runs") / folder_name(content.name or recipe.stem) / "fed"
        credentials = chosen_credentials(certs, "fed", insecure=insecure)
        asyncio.run(processes.serve_fed(content, listen, credentials, folder, tell))


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
        float, typer.Option(help="Retry so long if the server closes connections.", metavar="SECONDS", min=0)
    ] = 60.0,
) -> None:
    """Train as a device of a deployment, on data that never leave this machine."""
    with explaining():
        need_deploy()
        from adaptsfl.deploy.parties import processes  # noqa: PLC0415 (imports torch)
        from adaptsfl.deploy.security.identity import Party  # noqa: PLC0415

        credentials = chosen_credentials(certs, name, insecure=insecure)
        reason = asyncio.run(
            processes.join(
                Party("device", name),
                edge,
                fed,
                credentials,
                tell,
                data=data,
                allowed=allow or (),
                floor=cut_floor,
                retry_s=patience,
                probe_links=probe_links,
            )
        )
        tell(reason)


def up(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml).")],
    devices: Annotated[
        int | None, typer.Option(help="How many devices (default: 4, or as many as a trace has).", min=1)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where all of it goes (default: runs/ and the recipe's name).")
    ] = None,
    status_port: Annotated[int, typer.Option(help="Of the status page; 0 takes a free one.", min=0, max=65535)] = 0,
    links: Annotated[
        Path | None,
        typer.Option(
            help="Shape links as the fleet of this recipe or trace has them, round by round; as root.",
            metavar="RECIPE|CSV",
        ),
    ] = None,
    override: Overrides = None,
) -> None:
    """Start a whole deployment on this machine, over TLS: fed server, edge server and devices."""
    with explaining(recipe):
        need_deploy()
        from adaptsfl.deploy.parties.local_fleet import fleet_up  # noqa: PLC0415

        count, resources = (devices or DEVICES, None) if links is None else _links(links, devices)
        content = load_recipe(recipe, override or ())
        over = "" if links is None else f"-{folder_name(links.stem)}"  # a run goes on over the links that it began with
        folder = out or Path("runs") / f"{folder_name(content.name or recipe.stem)}-up{over}"
        console = plain_console()

        def relay(party: str, text: str) -> None:
            console.print(f"{party:>9} | {text}", soft_wrap=True)

        try:
            more = override or ()
            with fleet_up(recipe, count, folder, relay, status_port=status_port, more=more, links=resources) as fleet:
                fleet.wait()
        except KeyboardInterrupt:
            say("stopped; the same command goes on from the last checkpoint.")
            raise typer.Exit(130) from None
        console.print(f"model:   {folder / 'fed' / 'model.safetensors'}", soft_wrap=True)


def _links(path: Path, devices: int | None) -> tuple[int, Resources]:
    """Return the number of devices, and the resources of their links, from a recipe or a trace."""
    try:
        resources = read_trace(path) if path.suffix.lower() == ".csv" else _links_of_recipe(path, devices)
        count = resources.at(0).size
        if devices not in (None, count):
            raise InvalidInput("--devices", f"is {devices}, but the trace has {count}", "Leave --devices out")
    except InvalidInput as error:
        raise error.from_file(f"--links {error.source or path}") from None
    return count, resources


def _links_of_recipe(path: Path, devices: int | None) -> Resources:
    if path.suffix.lower() != ".toml":
        raise InvalidInput("", "is neither a recipe (.toml) nor a trace (.csv)", "Give one of these")
    config = load_fleet(path)
    if not config.model_fields_set:
        raise InvalidInput("fleet", "is missing", "Say in [fleet] how fast links are, as recipes/links.toml does")
    if config.trace is None:
        config = config.model_copy(update={"devices": devices or DEVICES})
    with inside("fleet"):
        return resources_from(config)
