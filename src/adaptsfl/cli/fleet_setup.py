"""Preparing a fleet for deployment: `probe` measures a device, `certs` makes the certificates."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from adaptsfl.cli.failures import explaining, need_cryptography, need_deploy, need_torch
from adaptsfl.cli.options import Certs, Insecure, chosen_credentials, key_value
from adaptsfl.cli.printing import plain_console, print_json, say
from adaptsfl.config import ModelConfig, load_recipe
from adaptsfl.errors import InvalidInput
from adaptsfl.report.tables import plain_table


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
    with explaining(Path(what) if what and what.endswith(".toml") else None):
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
            print_json(found)
        else:
            _print_probe(found)


def _probe_layers(what: str, options: Sequence[str], batch_size: int | None) -> dict[str, Any]:
    """Time the layers of a model on this machine."""
    need_torch()
    from adaptsfl.loading import split_model  # noqa: PLC0415
    from adaptsfl.training.timing import time_layers  # noqa: PLC0415 (imports torch)

    more = dict(key_value(text) for text in options)
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
    """Measure the links to servers: rates, null if too high to measure, and the seconds of the smallest message."""
    need_deploy()
    from adaptsfl.deploy.parties.probe import probe_links  # noqa: PLC0415 (imports torch)
    from adaptsfl.deploy.security.identity import Party  # noqa: PLC0415 (an extra)

    credentials = chosen_credentials(certs, name, insecure=insecure)
    rates = asyncio.run(probe_links(servers, credentials, Party("device", name)))  # type: ignore[arg-type]
    return {
        role: {
            "uplink_bps": link.uplink or None,
            "downlink_bps": link.downlink or None,
            "uplink_s": link.uplink_s,
            "downlink_s": link.downlink_s,
        }
        for role, link in rates.items()
    }


def _print_probe(found: Mapping[str, Any]) -> None:
    console = plain_console()
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
        for column in ("to", "up", "down", "round trip"):
            table.add_column(column, justify="left" if column == "to" else "right")
        for role, link in found["links"].items():
            rates = (link["uplink_bps"], link["downlink_bps"])
            shown = ("–" if rate is None else f"{rate / 1e6:,.1f} Mbit/s" for rate in rates)
            table.add_row(f"{role} server", *shown, f"{1e3 * (link['uplink_s'] + link['downlink_s']):.1f} ms")
        console.print(table)


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
    with explaining():
        need_cryptography()
        from adaptsfl.deploy.security.certs import make_certificates, renew_certificate, valid_until  # noqa: PLC0415 (an extra)

        wanted = [*(f"device-{number}" for number in range(1, devices + 1)), *(device or ())]
        made = [path for name in renew or () for path in renew_certificate(folder, name, days=days)]
        if wanted or not renew:
            made += make_certificates(folder, wanted, days=days)
        _print_certificates(folder, [path.stem for path in made if path.suffix == ".pem"], valid_until(folder))


def _print_certificates(folder: Path, made: Sequence[str], ends: Mapping[str, datetime]) -> None:
    """Print which certificates were made, who gets which files, and which others expire soon."""
    for name, end in ends.items():
        if (left := end - datetime.now(UTC)) < timedelta(days=30) and name not in made:
            state = "expires" if left > timedelta() else "expired"
            say(f"{name}.pem {state} on {end:%Y-%m-%d}: renew it with --renew {name}")
    console = plain_console()
    if not made:
        console.print(f"{folder}: everything asked for is there, nothing was changed", soft_wrap=True)
        return
    console.print(f"made in {folder}:", soft_wrap=True)
    for name in made:
        what = f"valid until {ends[name]:%Y-%m-%d}" if name in ends else "the authority"
        console.print(f"  {name}.pem, {name}.key: {what}", soft_wrap=True)
    console.print("Copy to each party its own .pem and .key, and ca.pem; nothing else.", soft_wrap=True)
    console.print("Keep ca.key here, and to yourself: whoever has it can be any party.", soft_wrap=True)
