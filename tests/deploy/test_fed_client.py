"""A block whose opening was interrupted counts as not known to the fed server: the answer may have been lost."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from adaptsfl.deploy.parties.fed import client
from adaptsfl.deploy.parties.fed.client import RetryingFedClient
from adaptsfl.deploy.wire_pb2 import Opening


class LosesAnswers(RetryingFedClient):
    """A fed server that registers a block with the first call; the answers to the first `lost` calls do not arrive."""

    def __init__(self, lost: int) -> None:
        self.waiting = lambda _what: None
        self.lost, self.known = lost, False

    async def open(self, opening: Opening, brought: Any) -> bool:
        new, self.known = not self.known, True
        if self.lost:
            self.lost -= 1
            raise AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "connection reset")
        return new


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.0)


def opened(fed: RetryingFedClient, *, wanted: bool = True) -> bool:
    return asyncio.run(fed.open_block(Opening(attempt=1), {}, still=lambda: wanted))


def test_a_block_is_new_once() -> None:
    fed = LosesAnswers(0)
    assert opened(fed)
    assert not opened(fed)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_answer_does_not_hide_that_the_block_was_new(lost: int) -> None:
    assert opened(LosesAnswers(lost))


def test_nothing_is_opened_that_is_not_wanted_any_more() -> None:
    fed = LosesAnswers(0)
    assert not opened(fed, wanted=False)
    assert not fed.known
