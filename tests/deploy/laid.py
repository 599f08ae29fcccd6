"""Shaped links for tests, where this machine can have them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from adaptsfl.deploy.parties.relay import NAMESPACES
from adaptsfl.deploy.parties.shaped_network import ShapedNetwork, shaped_network
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Device, Fleet, Server

SERVER = Server(1.0, 100e6, 100e6)


def link(up: float, down: float, delay_ms: float = 0.0) -> Device:
    """Return a device whose links to both servers have these rates in Mbit/s, and this delay each way."""
    rates, delay_s = (up * 1e6, down * 1e6), delay_ms / 1e3
    return Device("device", 1.0, *rates, *rates, None, 0.0, 0.0, delay_s, delay_s, delay_s, delay_s)


@contextmanager
def laid(fleet: Fleet) -> Iterator[ShapedNetwork]:
    """Lay the links of a fleet; skip the test where that cannot be done."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(shaped_network(fleet))
        except InvalidInput as error:
            pytest.skip(str(error))
        yield network


def need_namespaces() -> None:
    """Skip the test where links cannot be shaped."""
    with laid(Fleet.of([link(10, 10)], SERVER)):
        pass


def namespaces_of(process: int) -> list[str]:
    """Return the namespaces that a process has made and not removed."""
    return sorted(path.name for path in Path(NAMESPACES).glob(f"sfl{process}x*"))
