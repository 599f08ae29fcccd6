"""The edge server: what devices may say to it, and what becomes of that.

Whatever has no place ends the connection; what has one goes to the conductor, who has the word.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from adaptsfl.checks import printable
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.conductor import Conductor
from adaptsfl.deploy.identity import Party, require
from adaptsfl.deploy.service import NotNow, Service, TooMuch
from adaptsfl.deploy.sessions import HELLO_S, MOST_SAMPLES, Arrival, Session
from adaptsfl.deploy.tensors import size_of
from adaptsfl.deploy.terms import PROTOCOL
from adaptsfl.deploy.transfer import Chunk
from adaptsfl.errors import BadMessage


class EdgeServer(Service):
    """Answers the calls of service Edge, for a conductor."""

    service = "Edge"

    def __init__(self, conductor: Conductor) -> None:
        super().__init__(conductor.say)
        self.conductor, self.roster = conductor, conductor.roster

    async def train(
        self, requests: AsyncIterator[wire.FromDevice], context: Any
    ) -> AsyncIterator[wire.ToDevice | Chunk]:
        """Talk with one device for as long as its connection lasts."""
        party = await require(context, "device")
        member = self.roster.members.get(party.name)
        if member is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{party.name} is no device of this run")
            return
        if not member.joins.allows():
            raise TooMuch(f"{party.name} connects too often")
        session = Session(member)
        listening = asyncio.create_task(self._listen(session, aiter(requests), party.name))
        try:
            async for message in session.messages():
                yield message
            member.told = session.stopped and not context.done()
        except BadMessage:
            if member.newest is session:
                member.attempt = 0
            raise
        finally:
            listening.cancel()
            if member.session is session:
                member.session = None
                self.roster.tell_of(member)
            if member.newest is session:
                member.newest = None
            self.roster.wake()

    def violated(self, party: Party, reason: str) -> None:
        """Take note that a device broke the protocol, in whichever call."""
        member = self.roster.members.get(party.name)
        if member is not None:
            member.violated(reason)
            self.say(f"{member.name}: {member.last_error}" + (" (shut out)" if member.quarantined else ""))
            self.roster.send_away(member)

    def behaved(self, party: Party) -> None:
        """Strikes end when a round was trained with what a device sent, not with any call."""

    def shut_out(self, party: Party) -> str:
        """Return why a device may not call any more; empty if it may."""
        member = self.roster.members.get(party.name)
        return member.last_error if member is not None and member.quarantined else ""

    async def _listen(self, session: Session, requests: AsyncIterator[wire.FromDevice], name: str) -> None:
        """Take in what a device sends, until it or we end the connection."""
        try:
            async with asyncio.timeout(HELLO_S):
                attempt = await self._greet(session, requests, name)
            answer = await anext(requests)
            if answer.WhichOneof("kind") == "failure":
                self._take_failure(session, answer.failure)
                return
            await self._let_in(session, _of_kind(answer, "ready").ready, attempt)
            while True:
                await self._heed(session, await anext(requests), requests)
        except StopAsyncIteration:
            session.close()
        except TimeoutError:
            session.close(NotNow(f"{name} did not say hello"))
        except Exception as error:
            session.close(error)

    async def _greet(self, session: Session, requests: AsyncIterator[wire.FromDevice], name: str) -> int:
        """Hear who a device is, and tell it the terms; return the attempt whose layers it holds."""
        hello = _of_kind(await anext(requests), "hello").hello
        if hello.device != name:
            raise BadMessage(f"{name} calls itself {hello.device[:64]!r}")
        if hello.version != PROTOCOL:
            raise NotNow(f"{name} speaks version {hello.version} of the protocol, this server {PROTOCOL}")
        member = session.member
        if member.session is not None:
            member.session.close(NotNow(f"{name} has connected anew"))
        # Nothing is sent to a device, and nobody waits for it, before it is ready.
        member.newest, member.session, member.gave_up = session, None, False
        self.roster.wake()
        if self.conductor.over:
            self.conductor.send_home(session)
        welcome = wire.Welcome(number=member.number, settings=self.conductor.terms.to_json())
        session.send(wire.ToDevice(welcome=welcome))
        return int(hello.attempt)

    async def _let_in(self, session: Session, ready: wire.Ready, attempt: int) -> None:
        """Count a device among those who are here, and tell it what the others are doing."""
        member, conductor = session.member, self.conductor
        if member.newest is not session:
            raise NotNow(f"{member.name} has connected anew")
        if not conductor.terms.batch_size <= ready.samples <= MOST_SAMPLES:
            least = conductor.terms.batch_size
            raise BadMessage(f"{member.name} has {ready.samples} samples, a mini-batch has {least}")
        conductor.measured.ready(member.number, ready)
        member.samples, member.session = int(ready.samples), session
        if attempt != member.attempt:
            member.attempt = 0
        self.roster.tell_of(member)
        self.roster.wake()
        if conductor.over:
            conductor.send_home(session)
        elif conductor.block is not None:
            if member.attempt != conductor.block.attempt:  # it will ask the fed server for layers
                await conductor.averaging.open_again(conductor.block)
            await conductor.admit(session)

    async def _heed(self, session: Session, message: wire.FromDevice, requests: AsyncIterator[wire.FromDevice]) -> None:
        match message.WhichOneof("kind"):
            case "activations":
                await self._take(session, message.activations, requests)
            case "delivered":
                self._take_delivered(session, message.delivered)
            case "failure":
                self._take_failure(session, message.failure)
            case kind:
                raise BadMessage(f"{kind or 'nothing'} came where it had no place")

    async def _take(self, session: Session, told: wire.Activations, requests: AsyncIterator[wire.FromDevice]) -> None:
        """Receive activations, and see what becomes of them."""
        member, conductor = session.member, self.conductor
        block = conductor.block
        if block is None or told.attempt != member.attempt or member.attempt != block.attempt:
            await session.discard(told, conductor.shapes, requests)  # of a block that was closed without it
            member.late = False  # it is slow, but there
            return
        conductor.shapes.check(told, member.cut)
        with conductor.blaming(block, member):
            arrival = await session.receive(told, conductor.shapes, requests)
        if conductor.block is not block or member.session is not session or member.attempt != block.attempt:
            return  # the block was closed meanwhile, or the device has connected anew and sends it again
        bits = 8 * size_of(told.tensor.shape, told.tensor.dtype)
        conductor.measured.device(member.number, bits, uplink_bps=arrival.bps)
        conductor.measured.device(member.number, member.answered_bits, downlink_bps=told.downlink)
        if told.evaluation or told.estimation:
            with conductor.blaming(block, member):
                await (self._test(session, arrival) if told.evaluation else self._estimate(session, arrival))
            return
        if not block.first_round <= told.round <= block.last_round:
            raise BadMessage(
                f"activations of round {told.round} came in rounds {block.first_round} to {block.last_round}"
            )
        member.late = False
        conductor.measured.computed(member.number, member.cut, told.forward_s, told.backward_s)
        member.forward_s, member.backward_s = told.forward_s, told.backward_s or member.backward_s
        if member.answered is not None and member.answered[0] == told.round:
            header, data = member.answered[1]  # it was trained, and the answer was lost on the way
            session.idle()
            session.send(wire.ToDevice(gradients=header), data)
            return
        current = conductor.round
        if current is not None and told.round == current.number and member.number in current.arrivals:
            session.idle()
            return  # sent again over a new connection, before it was answered
        if current is None or current.closed or told.round != current.number:
            following = conductor.progress.rounds + (2 if current is not None and current.closed else 1)
            if told.round > following:
                raise BadMessage(f"activations of round {told.round} came, before round {following} was trained")
            session.idle()
            session.send(wire.ToDevice(skip=wire.Skip(next_round=following)))
            return
        current.arrivals[member.number] = arrival
        session.useful()
        await conductor.compute(conductor.edge_model.receive, member.number, arrival.activations)
        self.roster.wake()

    def _take_delivered(self, session: Session, delivered: wire.Delivered) -> None:
        member, block = session.member, self.conductor.block
        session.idle()
        current = member.session is session and delivered.attempt == member.attempt
        if block is not None and block.closing and current and member.attempt == block.attempt:
            self.conductor.averaging.take_delivered(member.number, block, delivered)

    async def _test(self, session: Session, arrival: Arrival) -> None:
        """Evaluate a mini-batch of a device's test samples, unless training has gone on meanwhile."""
        member, conductor, told = session.member, self.conductor, arrival.told
        tests = conductor.tests
        if tests is None:
            session.idle()
            return
        batches = tests.announced(member.number, told.evaluation_batches)
        if told.round >= batches:
            raise BadMessage(f"test samples {told.round} came of {batches} that were announced")
        evaluate = conductor.edge_model.evaluate
        found = await conductor.compute(evaluate, member.number, arrival.activations, arrival.labels)
        if conductor.tests is tests:
            tests.add(member.number, told.round, found)
            self.roster.wake()

    async def _estimate(self, session: Session, arrival: Arrival) -> None:
        """Keep what batch-norm's statistics are estimated from, unless it comes too late."""
        block = self.conductor.block
        assert block is not None, "nothing has happened since it was looked at"
        if self.conductor.reestimation.take(block, session.member, arrival):
            session.useful()
        else:
            session.idle()

    def _take_failure(self, session: Session, failure: wire.Failure) -> None:
        member = session.member
        member.last_error, member.gave_up = printable(failure.reason), True
        self.say(f"{member.name} gave up: {member.last_error}")
        block = self.conductor.block
        if failure.diverged and block is not None and member.attempt == block.attempt:
            self.conductor.blame(block, member)
        session.close()


def _of_kind(message: wire.FromDevice, kind: str) -> wire.FromDevice:
    if message.WhichOneof("kind") != kind:
        raise BadMessage(f"{message.WhichOneof('kind') or 'nothing'} came, {kind} was expected")
    return message
