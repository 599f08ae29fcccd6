"""What `adaptsfl probe` measures, alone and against servers."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from adaptsfl.cli import app
from adaptsfl.deploy.security.certs import make_certificates
from adaptsfl.deploy.security.identity import SERVER_OPTIONS, Credentials, listen, load_credentials
from adaptsfl.deploy.service import METHODS, OPTIONS, Service
from deploy.deployed import PATIENCE_S


class OnlyEcho(Service):
    """A server of which nothing but the echo is used."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service  # type: ignore[misc]
        for call in METHODS[service]:
            setattr(self, call, self.echo)


@contextmanager
def serving(**credentials: Credentials | None) -> Iterator[dict[str, str]]:
    """Serve the echo as these servers, in a thread of their own; yields their addresses."""
    ready, stop, addresses = Event(), Event(), {}

    async def serve() -> None:
        servers = []
        for role, own in credentials.items():
            server = grpc.aio.server(options=(*SERVER_OPTIONS, *OPTIONS))
            server.add_generic_rpc_handlers((OnlyEcho(role.capitalize()).handlers(),))
            addresses[role] = f"127.0.0.1:{await listen(server, '127.0.0.1:0', own)}"
            await server.start()
            servers.append(server)
        ready.set()
        await asyncio.to_thread(stop.wait)
        for server in servers:
            await server.stop(0)

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()  # whoever waits sees no address if that failed

    thread = Thread(target=run)
    thread.start()
    assert ready.wait(PATIENCE_S)
    assert len(addresses) == len(credentials)
    try:
        yield addresses
    finally:
        stop.set()
        thread.join()


def probe(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["probe", *arguments])


def test_layers_of_a_model_as_json() -> None:
    done = probe("vgg_digits", "--option", "width=0.25", "--batch-size", "4", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["model"], data["batch_size"], len(data["layers"])) == ("vgg_digits", 4, 6)
    assert set(data["layers"][0]) == {"name", "forward_s", "backward_s"}
    assert "links" not in data


def test_layers_of_a_recipe_as_a_table(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        '[model]\nname = "vgg_digits"\noptions = { width = 0.25 }\n[training]\nbatch_size = 3\n[fleet]\ndevices = 1\n'
    )
    done = probe(str(file))
    assert done.exit_code == 0, done.output
    assert "vgg_digits, mini-batches of 3" in done.stdout
    assert "conv1_1" in done.stdout
    assert "links" not in done.stdout


def test_links_over_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["device-1"])
    with serving(edge=load_credentials(tmp_path, "edge"), fed=load_credentials(tmp_path, "fed")) as at:
        servers = ("--edge", at["edge"], "--fed", at["fed"], "--name", "device-1", "--certs", str(tmp_path))
        done = probe(*servers, "--json")
        table = probe(*servers)
    assert done.exit_code == 0, done.output
    links = json.loads(done.stdout)["links"]
    assert set(links) == {"edge", "fed"}
    for link in links.values():  # a machine may be too fast for a rate to be measured
        assert all(link[name] is None or link[name] > 0 for name in ("uplink_bps", "downlink_bps"))
        assert link["uplink_s"] == link["downlink_s"] > 0
    assert "edge server" in table.stdout
    assert "round trip" in table.stdout


def test_one_link_without_tls() -> None:
    with serving(fed=None) as at:
        done = probe("--fed", at["fed"], "--name", "device-1", "--insecure", "--json")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["links"]) == ["fed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to measure"),
        (("--edge", "127.0.0.1:1"), "--name"),
        (("--edge", "127.0.0.1:1", "--name", "device-1"), "--certs"),
        (("--edge", "127.0.0.1:1", "--name", "device-1", "--insecure"), "did not answer"),
        (("no_such_model",), "no_such_model"),
        (("nowhere.toml",), "nowhere.toml"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], message: str) -> None:
    done = probe(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
