"""Errors in what the protocol leads to end the run: whoever handed in the event could only end one connection."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from adaptsfl.deploy.parties.edge.executor import Executor
from adaptsfl.deploy.protocol import EdgeProtocol, events
from adaptsfl.deploy.protocol.state import Rules


def executor(error: Exception) -> Executor:
    """An executor that cannot show how devices are."""

    def show(_devices: Any) -> None:
        raise error

    given: list[Exception] = []

    def check() -> None:
        if given:
            raise given.pop()

    protocol = EdgeProtocol(["device-1"], Rules(1, 10.0))
    roster: Any = SimpleNamespace(
        protocol=protocol, show=show, wake=lambda: None, wait_for=lambda _what: None, give_up=given.append, check=check
    )
    nothing: Any = SimpleNamespace(shapes=None)
    return Executor(roster, nothing, nothing, nothing, "")


def be_here(edge: Executor) -> None:
    """Let a device connect, as one who listens to it does."""
    with contextlib.suppress(OSError):  # which ends the connection
        edge.handle(events.Hello(1, 0))
        edge.handle(events.Ready(1, 100))


def test_an_error_while_a_device_is_listened_to_ends_the_run() -> None:
    async def run() -> None:
        edge = executor(OSError("no board"))
        over = asyncio.create_task(edge.outcome(events.RunOver("over", (0,), 30.0, 30.0)))
        await asyncio.sleep(0)
        be_here(edge)
        await asyncio.wait_for(over, 2.0)

    with pytest.raises(OSError, match="no board"):
        asyncio.run(run())


def test_an_error_between_two_blocks_ends_the_run() -> None:
    async def run() -> None:
        edge = executor(OSError("no board"))
        be_here(edge)
        await asyncio.wait_for(edge.outcome(events.RunOver("over", (0,), 30.0, 30.0)), 2.0)

    with pytest.raises(OSError, match="no board"):
        asyncio.run(run())


def test_an_error_after_a_deadline_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        edge = executor(OSError("no board"))
        monkeypatch.setattr(edge, "_end_shutdown", lambda _action: edge.roster.show([]))
        await asyncio.wait_for(edge.outcome(events.RunOver("over", (0,), 0.01, 30.0)), 2.0)

    with pytest.raises(OSError, match="no board"):
        asyncio.run(run())
