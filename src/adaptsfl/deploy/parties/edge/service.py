"""The edge server's gRPC service: reads and validates devices' messages, and hands them to the protocol as events."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.edge.conductor import Conductor
from adaptsfl.deploy.parties.edge.sessions import HELLO_S, MOST_SAMPLES, Arrival, Session, check_seconds
from adaptsfl.deploy.protocol import events
from adaptsfl.deploy.security.identity import Party, require
from adaptsfl.deploy.sending import Sending
from adaptsfl.deploy.service import NotNow, Service, TooMuch
from adaptsfl.deploy.tensors import NonFiniteTensor, size_of
from adaptsfl.deploy.terms import PROTOCOL
from adaptsfl.deploy.transfer import Chunk
from adaptsfl.errors import BadMessage


class EdgeService(Service):
    """Answers the calls of service Edge, for a conductor."""

    service = "Edge"

    def __init__(self, conductor: Conductor) -> None:
        super().__init__(conductor.say)
        self.conductor, self.roster, self.executor = conductor, conductor.roster, conductor.executor
        self.protocol, self.shapes, self.measured = conductor.protocol, conductor.shapes, conductor.measured

    async def train(
        self, requests: AsyncIterator[wire.FromDevice], context: Any
    ) -> AsyncIterator[wire.ToDevice | Chunk]:
        """Serve one device for as long as its connection lasts."""
        party = await require(context, "device")
        member = self.roster.members.get(party.name)
        if member is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{party.name} is no device of this run")
            return
        if not member.joins.allows():
            raise TooMuch(f"{party.name} connects too often")
        session = self.executor.connect(member)
        listening = asyncio.create_task(self._listen(session, aiter(requests)))
        violated = informed = False
        try:
            async for message in session.messages():
                yield message
            informed = not context.done()
        except BadMessage:
            violated = True
            raise
        finally:
            listening.cancel()
            self.executor.disconnect(session, violated=violated, informed=informed)

    def violated(self, party: Party, reason: str) -> None:
        """Report to the protocol that a device broke it, in any call."""
        member = self.roster.members.get(party.name)
        if member is not None:
            self.executor.handle(events.Violated(member.number, reason))

    def behaved(self, party: Party) -> None:
        """Do nothing: a trained round resets a device's strikes, not a valid call."""

    def shut_out(self, party: Party) -> str:
        """Return why a device is shut out; empty if it is not."""
        member = self.roster.members.get(party.name)
        device = None if member is None else self.protocol.devices[member.number]
        return device.last_error if device is not None and device.quarantined else ""

    async def _listen(self, session: Session, requests: AsyncIterator[wire.FromDevice]) -> None:
        """Handle a device's messages until either side ends the connection."""
        name = session.member.name
        try:
            async with asyncio.timeout(HELLO_S):
                self._greet(session, _of_kind(await anext(requests), "hello").hello)
            answer = await anext(requests)
            if answer.WhichOneof("kind") == "failure":
                self._take_failure(session, answer.failure)
                return
            self._take_ready(session, _of_kind(answer, "ready").ready)
            while True:
                await self._take(session, await anext(requests), requests)
        except StopAsyncIteration:
            session.close()
        except TimeoutError:
            session.close(NotNow(f"{name} did not say hello"))
        except Exception as error:
            session.close(error)

    def _greet(self, session: Session, hello: wire.Hello) -> None:
        name = session.member.name
        if hello.device != name:
            raise BadMessage(f"{name} calls itself {hello.device[:64]!r}")
        if hello.version != PROTOCOL:
            raise NotNow(f"{name} speaks version {hello.version} of the protocol, this server {PROTOCOL}")
        self.executor.handle(events.Hello(session.number, session.member.number, int(hello.attempt)))

    def _take_ready(self, session: Session, ready: wire.Ready) -> None:
        member, least = session.member, self.shapes.batch_size
        if not least <= ready.samples <= MOST_SAMPLES:
            raise BadMessage(f"{member.name} has {ready.samples} samples, a mini-batch has {least}")
        self.measured.ready(member.number, ready)
        self.executor.handle(events.Ready(session.number, int(ready.samples)))

    async def _take(self, session: Session, message: wire.FromDevice, requests: AsyncIterator[wire.FromDevice]) -> None:
        match message.WhichOneof("kind"):
            case "activations":
                await self._take_activations(session, message.activations, requests)
            case "delivered":
                self._take_delivered(session, message.delivered)
            case "failure":
                self._take_failure(session, message.failure)
            case kind:
                raise BadMessage(f"{kind or 'nothing'} came where it had no place")

    async def _take_activations(
        self, session: Session, header: wire.Activations, requests: AsyncIterator[wire.FromDevice]
    ) -> None:
        """Receive activations, and hand them to the protocol; wait until it has handled them."""
        member, attempt = session.member, int(header.attempt)
        if not self.protocol.expects(session.number, attempt):  # the block was closed without the device
            await session.discard(header, self.shapes, requests)
            self.executor.handle(events.StaleActivations(session.number))
            return
        self.shapes.check(header, self.protocol.devices[member.number].cut, self._sending())
        try:
            arrival = await session.receive(header, self.shapes, requests)
        except NonFiniteTensor:
            self.executor.handle(events.NotFinite(member.number, attempt))
            raise
        if not self.protocol.expects(session.number, attempt):
            return  # the block was closed meanwhile, or the device has reconnected and sends them again
        self._measure(session, arrival)
        if header.evaluation and session.evaluation is not None:
            await asyncio.wait([session.evaluation])
        session.arrival = arrival
        purpose: events.Purpose = "evaluation" if header.evaluation else "estimation" if header.estimation else "round"
        number, batches, part = int(header.round), int(header.evaluation_batches), int(header.part)
        self.executor.handle(events.Activations(session.number, attempt, number, purpose, batches, part))
        await self.executor.taken(session)

    def _measure(self, session: Session, arrival: Arrival) -> None:
        """Measure the speed of a device and its links from its activations; within a block `Accounts` sees more."""
        member, header, ledger = session.member, arrival.header, self.executor.ledger
        bits = 8 * size_of(header.tensor.shape, header.tensor.dtype)
        apart, parts = header.evaluation or header.estimation, self._sending().parts(header.round)
        if not apart and header.part + 1 < parts:
            return  # one part of a mini-batch is enough
        if apart or ledger is None or header.round == ledger.first_round:
            self.measured.device(member.number, bits, uplink_bps=arrival.bps)
            self.measured.device(member.number, member.answered_bits, downlink_bps=header.downlink)
        if not apart:
            cut = self.protocol.devices[member.number].cut
            self.measured.computed(member.number, cut, header.forward_s, header.backward_s, parts)
            member.forward_s = parts * header.forward_s
            member.backward_s = parts * header.backward_s or member.backward_s

    def _sending(self) -> Sending:
        """Return how activations and gradients of the block under way are sent."""
        block = self.protocol.block
        return Sending() if block is None else block.sending

    def _take_delivered(self, session: Session, delivered: wire.Delivered) -> None:
        block, ledger, number = self.protocol.block, self.executor.ledger, session.member.number
        check_seconds(delivered.backward_s, delivered.upload_s, delivered.update_s)
        expected = self.protocol.expects(session.number, int(delivered.attempt))
        if expected and block is not None and block.closing and ledger is not None:
            accounts, now = self.conductor.accounts, time.perf_counter()
            bits = accounts.layer_bits(ledger.cuts[number])
            self.measured.device(number, bits, fed_downlink_bps=delivered.fed_downlink)
            self.measured.first_rates(number, bits, fed_uplink_bps=delivered.fed_uplink)
            accounts.note_delivery(ledger, number, delivered, now)
        self.executor.handle(events.Delivered(session.number, int(delivered.attempt)))

    def _take_failure(self, session: Session, failure: wire.Failure) -> None:
        self.executor.handle(events.GaveUp(session.number, failure.reason, failure.diverged))


def _of_kind(message: wire.FromDevice, kind: str) -> wire.FromDevice:
    if message.WhichOneof("kind") != kind:
        raise BadMessage(f"{message.WhichOneof('kind') or 'nothing'} came, {kind} was expected")
    return message
