"""The end of a block: everybody's layers are brought to the fed server, and averaged there.

Whoever is lost on the way, device or fed server, it is done in the end, by all who are still there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.accounts import Accounts
from adaptsfl.deploy.block import OpenBlock
from adaptsfl.deploy.clock import ALL
from adaptsfl.deploy.fed_client import FIRST_WAIT_S, LONGEST_WAIT_S, PatientFed
from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.roster import Roster
from adaptsfl.deploy.service import NotNow
from adaptsfl.deploy.sessions import Member
from adaptsfl.errors import BadMessage
from adaptsfl.latency import EDGE_SERVER, FED_SERVER

AT_ONCE = 8  # deliveries by the edge server itself: each is in memory as a file while it is sent


@dataclass(frozen=True)
class Averaged:
    """What the end of a block led to.

    Attributes:
        version: of the averaged layers.
        divergence: ‖w_i − w̄‖/‖w̄‖ of layers 1 … L_c before they were averaged, the mean over devices; empty if not
            measured.
    """

    version: int
    divergence: tuple[float, ...] = ()


class Averaging:
    """Brings blocks to their end.

    Args:
        own_layers: called with a device and its cut: its layers above the cut, which are with the edge server.
        deadline_s: after which those who have not delivered are not waited for, if the others are enough.
        blame: called with a device whose layers came to no numbers.
        measure_divergence: whether the fed server is to say how far apart copies were before it averaged them.
    """

    def __init__(
        self,
        roster: Roster,
        fed: PatientFed,
        accounts: Accounts,
        own_layers: Callable[[int, int], Awaitable[LayerStates]],
        deadline_s: Callable[[], float],
        blame: Callable[[OpenBlock, Member], None],
        measure_divergence: bool = False,
    ) -> None:
        self.roster, self.fed, self.accounts = roster, fed, accounts
        self.own_layers, self.deadline_s, self.blame = own_layers, deadline_s, blame
        self.measure_divergence = measure_divergence

    async def close(self, block: OpenBlock) -> Averaged:
        """Have all copies delivered and averaged."""
        block.closing = True
        self._ask_to_deliver(block)
        while True:
            await asyncio.gather(self._deliveries(block), self._deliver_early(block))
            self.accounts.note_deliveries(block)
            devices, forgotten = set(block.delivered), block.forgotten
            if len(devices) < self.roster.quorum:
                continue  # one of them has lost its layers while the edge server brought its own
            try:
                await self._deliver_all_own(block, devices)
                if not devices <= block.delivered & block.delivered_for:
                    continue  # one of them has lost its layers meanwhile, or the fed server has
                block.clock.passed(time.perf_counter(), EDGE_SERVER, b1=ALL)
                closed = await self._average(block, devices)
                block.clock.passed(time.perf_counter(), FED_SERVER, b2=ALL)
            except NotNow:  # the fed server was restarted: it knows nothing of this block any more
                await self.open_again(block)
                continue
            if not closed.missing:
                break
            if block.forgotten == forgotten:  # else it is the fed server that lost them, and they were asked again
                self._accuse(block, closed.missing)
        block.over = True
        self._judge(block, devices)
        return Averaged(int(closed.version), tuple(closed.divergence))

    async def open_again(self, block: OpenBlock) -> None:
        """Make sure that the fed server knows the block; if it had forgotten, everybody delivers once more."""
        if await self.fed.tell(block.opening, block.brought, still=lambda: not block.over):
            block.forgotten += 1
            block.delivered.clear()
            block.delivered_for.clear()
            if block.closing:
                self._ask_to_deliver(block)

    def take_delivered(self, number: int, block: OpenBlock, delivered: wire.Delivered) -> None:
        """Take note that a device has brought its layers."""
        block.delivered.add(number)
        block.delivered_last = number, time.perf_counter(), delivered.fed_uplink
        self.accounts.measured.device(
            number,
            self.accounts.layer_bits(self.roster.by_number[number].cut),
            fed_uplink_bps=delivered.fed_uplink,
            fed_downlink_bps=delivered.fed_downlink,
        )
        self.roster.wake()

    def _ask_to_deliver(self, block: OpenBlock) -> None:
        for member in self.roster.here():
            session = member.session
            if session is not None and session.planned == block.attempt and member.number not in block.delivered:
                session.send(wire.ToDevice(deliver=wire.Deliver(attempt=block.attempt)))

    async def _deliveries(self, block: OpenBlock) -> None:
        """Wait until those who are there have delivered; after the deadline until enough have."""
        roster, deadline, patience = self.roster, time.monotonic() + self.deadline_s(), FIRST_WAIT_S
        while True:
            here = {member.number for member in roster.here() if member.attempt == block.attempt}
            last = block.trained
            # Those who took part in the last round count; if too few of them are left, whoever is here.
            counted = here & last if len(here & last) >= roster.quorum else here
            done = block.delivered & counted
            if len(done) >= roster.quorum and (done == counted or time.monotonic() >= deadline):
                block.delivered = done
                return
            roster.wait_for("the devices' layers")
            if not await roster.change(patience):
                await self.open_again(block)  # perhaps it is the fed server that keeps them waiting
                patience = min(2 * patience, LONGEST_WAIT_S)

    async def _deliver_early(self, block: OpenBlock) -> None:
        """Take the edge server's part of the layers there while devices bring theirs; what fails is done after them."""
        with suppress(NotNow):
            await self._deliver_all_own(block, set(block.trained))

    async def _deliver_all_own(self, block: OpenBlock, devices: set[int]) -> None:
        """Take these devices' layers above their cuts to the fed server, some at once; wait for all, whatever fails."""
        own, turns = sorted(devices - block.delivered_for), asyncio.Semaphore(AT_ONCE)
        deliveries = (self._deliver_own(block, self.roster.by_number[device], turns) for device in own)
        done = await asyncio.gather(*deliveries, return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def _deliver_own(self, block: OpenBlock, member: Member, turns: asyncio.Semaphore) -> None:
        """Take a device's layers above its cut to the fed server."""
        block.delivered_for.add(member.number)  # before they are: whoever loses its layers meanwhile is taken out again
        try:
            async with turns:
                states = await self.own_layers(member.number, member.cut)
                if states:
                    await asyncio.to_thread(self.fed.template.check, states)
                    moved = await self.fed.patiently(lambda: self.fed.deliver(block.attempt, member.name, states))
                    self.accounts.measured.server_link(8 * moved.size, to_fed_bps=moved.bps)
        except BadMessage as error:  # what it sent has ruined its layers: the others are averaged without it
            self._drop(block, member, error)
        except BaseException:
            block.delivered_for.discard(member.number)
            raise

    def _drop(self, block: OpenBlock, member: Member, error: BadMessage) -> None:
        """Go on without a device; should it come back, it begins with the block's layers."""
        block.delivered.discard(member.number)
        block.delivered_for.discard(member.number)
        member.attempt = 0
        self.blame(block, member)
        if member.session is not None:
            member.session.close(error)
        self.roster.wake()

    async def _average(self, block: OpenBlock, devices: Collection[int]) -> wire.Closed:
        weights = {self.roster.by_number[k].name: self.roster.weight(k) for k in sorted(devices)}
        measured = block.deepest if self.measure_divergence else 0
        return await self.fed.patiently(lambda: self.fed.close(block.attempt, weights, measured=measured))

    def _accuse(self, block: OpenBlock, names: Collection[str]) -> None:
        """Send those away whose layers are not where they said, and ask the others again."""
        for member in [self.roster.members[name] for name in names if name in self.roster.members]:
            block.delivered.discard(member.number)
            member.failed_to_deliver()
            if member.session is not None:
                member.session.close(BadMessage("it said that its layers are at the fed server, and none are"))
        self._ask_to_deliver(block)

    def _judge(self, block: OpenBlock, averaged: set[int]) -> None:
        """Remember who held up the others: whoever does so again and again is shut out."""
        for member in [self.roster.by_number[device] for device in block.present[-1]]:
            if member.number in averaged:
                member.undelivered = 0
            elif member.session is not None and member.attempt == block.attempt:
                member.failed_to_deliver()
                self.roster.send_away(member)
