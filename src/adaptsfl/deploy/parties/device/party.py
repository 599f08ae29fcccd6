"""A device: its own data, the first layers of the model, and a connection that may break at any time.

It carries out the edge server's messages one by one; while it waits for the next one, it sends test samples. Its state
(layers, the activations that it sent last) outlives a connection: after it reconnects it goes on where it was, if the
edge server is still in the same block.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from torch import Tensor

from adaptsfl.checks import printable
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import Template
from adaptsfl.deploy.moments_file import plausible
from adaptsfl.deploy.parties.device.calls import EOF, FIRST_WAIT_S, EdgeStream, ready_message, retried
from adaptsfl.deploy.parties.device.data import DeviceData, load_device_data
from adaptsfl.deploy.parties.device.evaluation import DeviceEvaluation
from adaptsfl.deploy.parties.device.held import Held
from adaptsfl.deploy.parties.device.rounds import Rounds, gradient_bytes
from adaptsfl.deploy.parties.fed.client import FedClient
from adaptsfl.deploy.parties.passes import time_passes
from adaptsfl.deploy.parties.probe import LinkRates, measure_link
from adaptsfl.deploy.security.identity import Credentials, Party, open_channel
from adaptsfl.deploy.sending import Sending
from adaptsfl.deploy.service import OPTIONS, Calls
from adaptsfl.deploy.tensors import LABELS, pack
from adaptsfl.deploy.terms import PROTOCOL, Terms
from adaptsfl.errors import BadMessage, InvalidInput, NotWritten, Refused, TrainingDiverged, first_line
from adaptsfl.models import SplitModel
from adaptsfl.training.reference import DeviceSide
from adaptsfl.training.statistics import Moments, Norm, recorded, running_buffers
from adaptsfl.training.timing import LayerTimes

LONGEST_WAIT_S, WAIT_GROWTH = 15.0, 1.5  # between two attempts to connect
# Errors that a retry would not change.
FINAL = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)
# A server that rejects our certificate closes the connection without a reason. So does a proxy before its server is up.
RETRY_S = 60.0
CLOSED, MOST_CLOSED = ("failed to connect", "Socket closed"), 4
NO_MOMENTS: Mapping[Norm, Moments] = MappingProxyType({})
HANDSHAKE = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "handshake", "SSL_ERROR")


class DeviceParty:
    """One device of a run.

    Args:
        data: the device's own files; without them it takes its part of the recipe's dataset.
        allowed: factories that the servers may name.
        floor: the smallest cut that this device accepts, even if the servers allow smaller ones.
        retry_s: how long to retry while the server closes every connection during the handshake.
        probe_links: whether to send megabytes to measure links before training; else its rounds measure them.
        say: called with every line for the log.
    """

    def __init__(
        self,
        party: Party,
        edge: str,
        fed: str,
        credentials: Credentials | None,
        *,
        data: Path | None = None,
        allowed: Collection[str] = (),
        floor: int = 1,
        retry_s: float = RETRY_S,
        probe_links: bool = True,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.party, self.edge, self.fed, self.credentials = party, edge, fed, credentials
        self.data_path, self.allowed, self.floor, self.say = data, allowed, floor, say
        self.retry_s, self.probe_links = retry_s, probe_links
        self.terms: Terms | None = None
        self.held: Held | None = None
        self._settings = ""  # the settings, as text
        self._rounds: Rounds | None = None
        self._ready: wire.Ready | None = None

    async def run(self) -> str:
        """Take part until the edge server says that the run is over; return why."""
        wait, times_closed, since = FIRST_WAIT_S, 0, 0.0
        while True:
            if self._rounds is not None:
                self._rounds.learned = False
            try:
                reason = await self._connection()
                if reason is not None:
                    return reason
                problem = "the edge server ended the connection"
            except grpc.aio.AioRpcError as error:
                why = printable(first_line(Exception(error.details())))
                problem = f"{error.code().name.lower().replace('_', ' ')}: {why}"
                if error.code() in FINAL or any(word in str(error.details()) for word in HANDSHAKE):
                    raise Refused(f"{self.party}: {problem}. Check certificates, names and versions.") from None
                closed = all(words in str(error.details()) for words in CLOSED)
                times_closed = times_closed + 1 if closed and self.terms is None else 0
                since = since if times_closed > 1 else time.monotonic()
                if times_closed >= MOST_CLOSED and time.monotonic() - since >= self.retry_s:
                    raise Refused(
                        f"{self.party}: the edge server closed {times_closed} connections in a row without a reason. "
                        "Check certificates: its ca.pem may be another, or ours may have expired."
                    ) from None
            if self._rounds is not None and self._rounds.learned:
                wait = FIRST_WAIT_S
            self.say(f"{problem}; trying again in {wait:.1f} s")
            await asyncio.sleep(wait)
            wait = min(WAIT_GROWTH * wait, LONGEST_WAIT_S)

    async def _connection(self) -> str | None:
        """Work over one connection; return why the run is over, None if only the connection is."""
        to_edge = open_channel(self.edge, "edge", self.credentials, self.party, OPTIONS)
        to_fed = open_channel(self.fed, "fed", self.credentials, self.party, OPTIONS)
        async with to_edge, to_fed:
            links = {"edge": Calls(to_edge, "Edge"), "fed": Calls(to_fed, "Fed")}
            stream = EdgeStream(links["edge"].train(), self._gradient_bytes)
            attempt = 0 if self.held is None else self.held.attempt
            if self.held is not None and self.held.evaluation is not None:
                self.held.evaluation.pause()
            hello = wire.Hello(device=self.party.name, attempt=attempt, version=PROTOCOL)
            try:
                await stream.write(wire.FromDevice(hello=hello))
                return await self._obey(stream, links)
            except asyncio.InvalidStateError:  # the connection was lost while we wrote; reading raises the cause
                await stream.read_to_end()
                return None
            except (BadMessage, InvalidInput, NotWritten, TrainingDiverged) as error:
                failure = wire.Failure(reason=str(error)[:500], diverged=isinstance(error, TrainingDiverged))
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await stream.write(wire.FromDevice(failure=failure))
                    await stream.done_writing()
                    await stream.read_to_end()  # else the connection might end before that was sent
                raise
            finally:
                await stream.end()

    async def _obey(self, stream: EdgeStream, links: dict[str, Calls]) -> str | None:
        while True:
            message, body = await stream.read(partial(self._idle_job, stream))
            if message is EOF:
                return None
            match message.WhichOneof("kind"):
                case "gradients":
                    assert body is not None
                    if await self._training().learn(self._holding(), message.gradients, body):
                        await self._send(stream, message.gradients.round + 1)
                case "stop":
                    reason = await self._stopped(message.stop, stream)
                    if reason is not None:
                        return reason
                case _:
                    await self._carry_out(message, stream, links)

    async def _carry_out(self, message: wire.ToDevice, stream: EdgeStream, links: dict[str, Calls]) -> None:
        match message.WhichOneof("kind"):
            case "welcome":
                await self._prepare(message.welcome, links)
                await stream.write(wire.FromDevice(ready=self._ready))
            case "plan":
                await self._begin(message.plan, stream, links["fed"])
            case "skip":
                await self._send(stream, message.skip.next_round)
            case "evaluate":
                await self._evaluate_estimated(message.evaluate.attempt, stream, links["fed"])
            case "evaluated":
                self._evaluated(message.evaluated)
            case "deliver":
                await self._deliver(message.deliver.attempt, stream, links["fed"])
            case kind:
                raise BadMessage(f"the edge server sent {kind or 'nothing'} where it had no place")

    async def _stopped(self, stop: wire.Stop, stream: EdgeStream) -> str | None:
        """Return why the run is over; None if the device may go on."""
        if not stop.done:
            self.say(stop.reason)
            return None
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.done_writing()  # tells the edge server that this device is informed
            await stream.read_to_end()
        return str(stop.reason)

    def _idle_job(self, stream: EdgeStream) -> Coroutine[Any, Any, None] | None:
        """Return what can be done while this device waits for the edge server: one mini-batch of test samples."""
        held = self.held
        if held is None or held.evaluation is None or not held.waits:
            return None
        number = held.evaluation.take()
        return None if number is None else self._test(held, held.evaluation, number, stream)

    async def _prepare(self, welcome: wire.Welcome, links: dict[str, Calls]) -> None:
        """Build the model, read the data and measure this device's speed and links; once."""
        if self.terms is not None:
            if welcome.settings != self._settings:
                raise BadMessage("the edge server's settings are not those of before")
            return
        terms = Terms.from_json(welcome.settings, self.allowed)
        if not welcome.number < terms.devices:
            raise BadMessage(f"the edge server calls this device number {welcome.number} of {terms.devices}")
        self.floor = max(self.floor, terms.floor)
        times, fixed_s = await asyncio.to_thread(self._build, terms, welcome.number)
        rates = {
            name: await measure_link(calls) if self.probe_links else LinkRates(0.0, 0.0)
            for name, calls in links.items()
        }
        self._ready = ready_message(self.data.samples, times, fixed_s, rates["edge"], rates["fed"])
        self._rounds = Rounds(self.data, terms.optimizer, self._packed)
        self.terms, self._settings = terms, welcome.settings
        self.say(f"ready: {self.data.samples} samples, model of {self.model.layers} layers")

    def _build(self, terms: Terms, number: int) -> tuple[LayerTimes, float]:
        self.model: SplitModel
        self.model, example = terms.model()
        self.template = Template(self.model, terms.optimizer)
        self.data: DeviceData = load_device_data(terms, number, self.data_path, terms.classes(self.model, example))
        inputs, _ = self.data.at(1)
        if inputs.shape[1:] != example.shape[1:]:
            problem = f"has samples of shape {tuple(inputs.shape[1:])}, the model takes {tuple(example.shape[1:])}"
            raise InvalidInput("data", problem, "Give data that fit the model")
        return time_passes(self.model, inputs[:1], terms.batch_size)

    async def _begin(self, plan: wire.Plan, stream: EdgeStream, fed: Calls) -> None:
        """Follow a plan: fetch the layers, unless this device already holds them, and train the next round."""
        if self.terms is None:
            raise BadMessage("the edge server sent a plan before its settings")
        if not self.floor <= plan.cut <= self.model.layers:
            raise BadMessage(f"the edge server planned cut {plan.cut}, this device takes {self.floor} and deeper")
        if self.held is None or self.held.attempt != plan.attempt:
            await self._fetch(plan, fed)
        held = self._holding()
        held.next_round = plan.next_round
        if held.evaluation is not None:
            held.evaluation.go_on()
        if plan.estimate and not held.pending:  # the edge server says when to go on
            await self._estimate(plan.estimate, stream, fed)
            return
        if held.pending:
            await self._training().send_again(held, stream)
        else:  # also if it was disconnected when the other devices went on
            await self._send(stream, plan.next_round)
        if plan.evaluate:
            await asyncio.to_thread(self._begin_evaluation, held)

    async def _fetch(self, plan: wire.Plan, fed: Calls) -> None:
        """Fetch the layers of a block."""
        sending = Sending(plan.micro_batches, plan.wire_dtype, plan.exact_round)
        sending.check(self._training().data.batch_size)
        started = time.perf_counter()
        moved = await FedClient(fed, self.template).fetch(plan.attempt, 1, plan.cut)
        layers = [self.template.layer(number, state) for number, state in sorted(moved.states.items())]
        device, last = DeviceSide(layers), plan.last_round
        self.held = Held(plan.attempt, plan.block, last, plan.cut, plan.next_round, device, sending)
        self.held.start, self.held.fed_downlink = moved.states, moved.bps
        self.held.fetch_s = time.perf_counter() - started
        rounds = f"rounds {plan.next_round} to {last}" if plan.next_round <= last else "the end"
        self.say(f"block {plan.block}: {rounds}, cut {plan.cut}")

    async def _send(self, stream: EdgeStream, round_: int) -> None:
        """Run the device's layers on the mini-batch of a round and send the activations."""
        await self._training().send(self._holding(), round_, stream)

    def _packed(self, activations: Tensor, labels: Tensor, dtype: str) -> tuple[wire.Activations, list[memoryview]]:
        about, data = pack(activations, dtype)
        about_labels, label_data = pack(labels, LABELS)
        header = wire.Activations(attempt=self._holding().attempt, labels=about_labels, tensor=about)
        return header, [label_data, data]

    async def _estimate(self, round_: int, stream: EdgeStream, fed: Calls) -> None:
        """Send data to estimate batch-norm's statistics: moments to the fed server, activations to the edge server."""
        held, client = self._holding(), FedClient(fed, self.template)
        layers = range(1, held.cut + 1)
        x, labels = self.data.at(round_)
        moments, activations = await asyncio.to_thread(recorded, held.device.pieces(), x)
        if not all(plausible(found) for found in moments.values()):
            raise TrainingDiverged(f"round {round_}: activations of the averaged layers contain NaN or infinity")
        if moments:
            bring = partial(client.bring_moments, held.attempt, self.party.name, layers, moments)
            await retried(bring)  # a fed server that does not know the block has none to merge either
        header, parts = self._packed(activations, labels, held.sending.wire_dtype)
        header.round, header.estimation = round_, True
        await stream.send(header, parts)

    async def _evaluate_estimated(self, attempt: int, stream: EdgeStream, fed: Calls) -> None:
        """Go on, and evaluate with merged statistics meanwhile, unless the fed server has lost them."""
        held = self._holding()
        if held.attempt != attempt:
            return  # the edge server has sent a newer plan behind this
        if not held.pending:
            await self._send(stream, held.next_round)
        if held.evaluation is None and held.start is not None:
            fetch = partial(FedClient(fed, self.template).fetch_moments, attempt, range(1, held.cut + 1))
            merged = await retried(fetch)
            if merged is not None:
                await asyncio.to_thread(self._begin_evaluation, held, merged)

    def _begin_evaluation(self, held: Held, merged: Mapping[Norm, Moments] = NO_MOMENTS) -> None:
        """Prepare the test samples and the layers as they were fetched, with merged statistics of batch-norm if any."""
        if held.evaluation is None and held.start is not None:
            pieces = {number: self.template.layer(number, state).piece for number, state in sorted(held.start.items())}
            running = {number: running_buffers(piece, number, merged) for number, piece in pieces.items()}
            held.evaluation, held.start = DeviceEvaluation(pieces, self.data.test_batches(), running), None

    async def _test(self, held: Held, evaluation: DeviceEvaluation, number: int, stream: EdgeStream) -> None:
        """Send the activations of one mini-batch of test samples, unless they are no longer needed."""
        found = await asyncio.to_thread(evaluation.run, number)
        if found is None:
            return
        header, parts = self._packed(*found, held.sending.wire_dtype)
        header.attempt, header.round = held.attempt, number
        header.evaluation, header.evaluation_batches = True, evaluation.total
        await stream.send(header, parts)

    def _evaluated(self, evaluated: wire.Evaluated) -> None:
        """Record that the edge server has evaluated a mini-batch of test samples."""
        held = self._holding()
        if held.attempt == evaluated.attempt and held.evaluation is not None:
            held.evaluation.done(evaluated.number)

    async def _deliver(self, attempt: int, stream: EdgeStream, fed: Calls) -> None:
        """Deliver the layers to the fed server."""
        held = self._holding()
        if held.attempt != attempt:
            return  # the edge server has sent a newer plan behind this
        rounds, started = self._training(), time.perf_counter()
        states = {number: layer.state() for number, layer in enumerate(held.device.layers, start=1)}
        try:
            await asyncio.to_thread(self.template.check, states)
        except BadMessage as error:
            raise TrainingDiverged(f"layers of this device contain NaN or infinity: {error}") from None
        # A fed server that does not know the block was restarted. The edge server opens the block there again, and then
        # asks for the layers again.
        moved = await retried(partial(FedClient(fed, self.template).deliver, attempt, self.party.name, states))
        if moved is None:
            return
        delivered = wire.Delivered(
            attempt=attempt,
            fed_uplink=moved.bps,
            fed_downlink=held.fed_downlink,
            backward_s=rounds.backward_s,
            upload_s=time.perf_counter() - started,
            update_s=rounds.update_s,
        )
        await stream.write(wire.FromDevice(delivered=delivered))
        held.delivered = True

    def _gradient_bytes(self, gradients: wire.Gradients) -> int:
        return gradient_bytes(self._holding(), gradients, self._training().data.batch_size)

    def _training(self) -> Rounds:
        if self._rounds is None:
            raise BadMessage("the edge server sent work before its settings")
        return self._rounds

    def _holding(self) -> Held:
        if self.held is None:
            raise BadMessage("the edge server sent work before a plan")
        return self.held
