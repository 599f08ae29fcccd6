"""Calls of the fed server at the begin and at the end of a block."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.parties.edge.accounts import Accounts
from adaptsfl.deploy.parties.edge.clock import ALL
from adaptsfl.deploy.parties.edge.ledger import Ledger
from adaptsfl.deploy.parties.edge.roster import Roster
from adaptsfl.deploy.parties.fed.client import RetryingFedClient
from adaptsfl.deploy.protocol import events
from adaptsfl.deploy.service import NotNow
from adaptsfl.errors import BadMessage
from adaptsfl.latency import EDGE_SERVER, FED_SERVER

AT_ONCE = 8  # concurrent deliveries by the edge server itself; each holds a file in memory while it is sent


class Averaging:
    """Fetches and delivers layers of blocks, and has them averaged at the fed server.

    Args:
        own_layers: called with a device and its cut; returns its layers above the cut, which the edge server holds.
        measure_divergence: whether the fed server measures how far apart copies are before it averages them.

    Attributes:
        kept: waits until the block before is on the edge server's disk. The fed server keeps two versions, so no
            layers are averaged before: the checkpoint would need an older version.
    """

    def __init__(
        self,
        roster: Roster,
        fed: RetryingFedClient,
        accounts: Accounts,
        own_layers: Callable[[int, int], Awaitable[LayerStates]],
        measure_divergence: bool = False,
    ) -> None:
        self.roster, self.fed, self.accounts = roster, fed, accounts
        self.own_layers, self.measure_divergence = own_layers, measure_divergence
        self.kept: Callable[[], Awaitable[None]] = _at_once
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def fetch_own(self, block: Ledger) -> tuple[LayerStates, bool]:
        """Return averaged layers that run at the edge server in a block, for single devices or for all.

        The second value is whether the block had to be opened again at the fed server.
        """
        first, last = min(block.cuts) + 1, block.known
        if first > last:
            return {}, False
        began = time.perf_counter()
        moved, forgotten = await self.fed.fetch_of(block.opening, block.brought, first, last)
        self.accounts.measured.server["from_fed_bps"].add(8 * moved.size, time.perf_counter() - began)
        return moved.states, forgotten

    async def reopen(self, block: Ledger) -> events.Event:
        """Make sure that the fed server knows the block."""
        forgotten = await self.fed.open_block(block.opening, block.brought, still=lambda: not block.over)
        return events.Reopened(block.attempt, forgotten)

    async def deliver_own(self, block: Ledger, device: int, cut: int) -> events.Event:
        """Deliver a device's layers above its cut to the fed server."""
        name = self.roster.by_number[device].name
        try:
            async with self._turns:
                states = await self.own_layers(device, cut)
                if states:
                    await asyncio.to_thread(self.fed.template.check, states)
                    moved = await self.fed.retry(lambda: self.fed.deliver(block.attempt, name, states))
                    block.own_bits, block.own_delivered_at = block.own_bits + 8 * moved.size, time.perf_counter()
        except BadMessage as error:  # the device's data made its layers unusable
            return events.OwnRefused(block.attempt, device, str(error))
        except NotNow:
            return events.BlockForgotten(block.attempt, device)
        return events.OwnDelivered(block.attempt, device)

    async def average(self, block: Ledger, devices: Collection[int]) -> events.Event:
        """Have the fed server average the layers of these devices."""
        self.accounts.note_deliveries(block)
        if block.own_bits:  # all of its deliveries together: they overlap
            upload_s = block.own_delivered_at - block.clock.answered_at
            self.accounts.measured.server["to_fed_bps"].add(block.own_bits, upload_s)
            block.own_bits = 0.0
        block.clock.passed(time.perf_counter(), EDGE_SERVER, b1=ALL)
        await self.kept()
        block.clock.passed(time.perf_counter())
        weights, measured = self.roster.weights(devices), block.deepest if self.measure_divergence else 0
        try:
            closed = await self.fed.retry(lambda: self.fed.close(block.attempt, weights, measured=measured))
        except NotNow:
            return events.BlockForgotten(block.attempt)
        took = block.clock.passed(time.perf_counter(), FED_SERVER, b2=ALL)
        bits = len(devices) * self.accounts.layer_bits(block.deepest)
        self.accounts.measured.averaging.add(bits, block.opened_s + took["b2"])
        if closed.missing:
            missing = (self.roster.members[name].number for name in closed.missing if name in self.roster.members)
            return events.NotDelivered(block.attempt, tuple(missing))
        block.averaged = events.Averaged(block.attempt, int(closed.version), tuple(closed.divergence))
        return block.averaged


async def _at_once() -> None:
    """Wait for nothing."""
