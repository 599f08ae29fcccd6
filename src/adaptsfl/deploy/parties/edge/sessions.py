"""The edge server's side of one device: its connection, and its data that outlive a connection.

Every message of a device is validated against its plan before memory is allocated for it. An invalid message ends
the connection with an error.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.edge.resources import LONGEST_S
from adaptsfl.deploy.security.limits import RateLimit
from adaptsfl.deploy.sending import Sending
from adaptsfl.deploy.tensors import LABELS, check_header, pack, size_of, unpack
from adaptsfl.deploy.terms import Terms
from adaptsfl.deploy.transfer import Chunk, Incoming, chunks
from adaptsfl.errors import BadMessage
from adaptsfl.models import SplitModel
from adaptsfl.training.wire_format import Dither

JOINS_PER_MINUTE = 30
HELLO_S = 60.0  # timeout for the first message, `Hello`, of a connection
MOST_SAMPLES = 10**9
MOST_TEST_BATCHES = 2**20
# Messages that a device may leave unread, and mini-batches of gradients among them.
MOST_UNREAD, MOST_UNREAD_TENSORS = 64, 4
WHOLE = Sending()  # in the widest type


@dataclass
class Member:
    """Measurements and data that the edge server keeps of a device; its protocol state is `DeviceState`.

    Attributes:
        answers: by part: the gradients of the last round that was trained with it, kept to be sent again.
        answered_bits: the size of the last of them, whose cut may differ from that of the next ones.
        forward_s, backward_s: the times of its layers, as it last reported.
        sent_bytes, received_bytes: bytes of tensors to and from it, since the server was started.
        joins: the rate limit of its connections.
    """

    number: int
    name: str
    answers: dict[int, tuple[wire.Gradients, memoryview]] = field(default_factory=dict)
    answered_bits: int = 0
    forward_s: float | None = None
    backward_s: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    joins: RateLimit = field(default_factory=lambda: RateLimit(JOINS_PER_MINUTE))

    def keep(self, number: int, gradient: Tensor, wire_dtype: str, part: int = 0) -> None:
        """Keep the gradients of a part of a round, to be sent now and perhaps again."""
        if part == 0:
            self.answers = {}
        tensor, data = pack(gradient, wire_dtype, Dither(self.number, number, first=part * len(gradient)))
        self.answers[part] = wire.Gradients(round=number, tensor=tensor, part=part), data
        self.answered_bits = 8 * len(data)

    def answer(self, number: int, part: int) -> tuple[wire.Gradients, memoryview] | None:
        """Return the gradients of a part of a round, if they are those that are kept."""
        kept = self.answers.get(part)
        return kept if kept is not None and kept[0].round == number else None


@dataclass(frozen=True)
class Shapes:
    """The shapes of this run's tensors on the wire.

    Attributes:
        activations: the shape of one sample at cuts 1, 2, ….
        labels: the shape of one sample's labels.
        classes: the number of classes; labels are below it.
    """

    activations: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    classes: int
    batch_size: int

    @classmethod
    @torch.no_grad()
    def of(cls, terms: Terms, model: SplitModel, example: Tensor) -> Self:
        """Run a model once to find the shapes of its activations at every cut."""
        mode, x, shapes = model.module.training, example, []
        model.eval()
        for piece in model.pieces:
            x = piece(x)
            shapes.append(tuple(x.shape[1:]))
        model.train(mode)
        labels = shapes[-1][:-1]  # one label per output; in a sequence, one per token
        return cls(tuple(shapes), labels, terms.classes(model, example), terms.batch_size)

    def size(self, cut: int, sending: Sending, round_: int | None = None) -> int:
        """Return the bytes of one part of a round's mini-batch at a cut; without a round, of a whole mini-batch."""
        parts, dtype = (1, sending.wire_dtype) if round_ is None else (sending.parts(round_), sending.dtype(round_))
        return size_of((self.batch_size // parts, *self.activations[cut - 1]), dtype)

    def check(self, header: wire.Activations, cut: int, sending: Sending) -> None:
        """Reject tensors whose shape or type is not that of a message at this cut, and implausible times."""
        check_seconds(header.forward_s, header.backward_s, header.fetch_s, header.update_s)
        samples = header.tensor.shape[0] if header.tensor.shape else 0
        if header.evaluation and header.estimation:
            raise BadMessage("activations came for an evaluation and an estimation at once")
        if header.evaluation:
            if not 1 <= samples <= self.batch_size:
                raise BadMessage(f"{samples} samples came for evaluation, 1 to {self.batch_size} were expected")
            if not 1 <= header.evaluation_batches <= MOST_TEST_BATCHES:
                batches = header.evaluation_batches
                raise BadMessage(f"{batches} mini-batches were announced, 1 to {MOST_TEST_BATCHES} were expected")
        elif header.estimation:
            samples = self.batch_size
        else:
            samples = self.batch_size // sending.parts(header.round)
        apart = header.evaluation or header.estimation
        dtype = sending.wire_dtype if apart else sending.dtype(header.round)
        check_header(header.tensor, (samples, *self.activations[cut - 1]), dtype)
        check_header(header.labels, (samples, *self.labels), "int64")


def check_seconds(*reported: float) -> None:
    """Reject times that no device can have measured."""
    for seconds in reported:
        if not 0 <= seconds <= LONGEST_S:
            raise BadMessage(f"a device reported {seconds:g} s, 0 to {LONGEST_S:g} were expected")


@dataclass(frozen=True)
class Arrival:
    """Activations of one device, with their labels and their transfer rate."""

    header: wire.Activations
    activations: Tensor
    labels: Tensor
    bps: float
    seconds: float
    came: float  # time of arrival, by `time.perf_counter`


class Session:
    """One connection of a device: messages out, in order, and activations in.

    Args:
        number: identifies the connection in the protocol.
        closing: called with its number when the edge server begins to end it.

    Attributes:
        arrival: the activations that arrived last, until the protocol has handled them.
        evaluation: the evaluation of the last test samples; no further test samples are used before it is done.
        parts: messages in which the gradients of one mini-batch are sent.
    """

    def __init__(self, member: Member, number: int = 0, closing: Callable[[int], None] = lambda _number: None) -> None:
        self.member, self.number, self._closing = member, number, closing
        self.arrival: Arrival | None = None
        self.evaluation: asyncio.Task[None] | None = None
        self.parts = 1
        self._queue: asyncio.Queue[tuple[wire.ToDevice, memoryview | None] | None] = asyncio.Queue()
        self._unread_tensors = 0
        self._closed = False
        self._error: BaseException | None = None

    def send(self, message: wire.ToDevice, data: memoryview | None = None) -> None:
        """Queue a message, followed by the bytes that belong to it."""
        if self._closed:
            return
        self._unread_tensors += data is not None
        most = MOST_UNREAD_TENSORS * self.parts
        if self._queue.qsize() - self._unread_tensors >= MOST_UNREAD or self._unread_tensors > most:
            self.close(BadMessage("the device does not read what it is sent"))
            return
        self._queue.put_nowait((message, data))

    def close(self, error: BaseException | None = None) -> None:
        """End the connection after all queued messages; with an error, drop these and end it at once."""
        if error is not None:
            self._error = self._error or error
            while not self._queue.empty():
                self._queue.get_nowait()
        self._queue.put_nowait(None)
        if not self._closed:
            self._closed = True
            self._closing(self.number)

    async def messages(self) -> AsyncIterator[wire.ToDevice | Chunk]:
        """Yield queued messages until the connection is closed; raise the error it was closed with, if any."""
        while (item := await self._queue.get()) is not None:
            message, data = item
            yield message
            if data is not None:
                for chunk in chunks(data):
                    yield chunk
                self.member.sent_bytes += len(data)
                self._unread_tensors -= 1
        if self._error is not None:
            raise self._error

    async def receive(
        self, header: wire.Activations, shapes: Shapes, requests: AsyncIterator[wire.FromDevice]
    ) -> Arrival:
        """Return the tensors that follow a validated header."""
        label_bytes = size_of(header.labels.shape, "int64")
        body = await self._body(requests, label_bytes + size_of(header.tensor.shape, header.tensor.dtype))
        data = memoryview(body.data)
        labels = unpack(header.labels, data[:label_bytes])
        if int(labels.min()) < 0 or int(labels.max()) >= shapes.classes:
            raise BadMessage(f"a label outside of 0 … {shapes.classes - 1} came")
        return Arrival(header, unpack(header.tensor, data[label_bytes:]), labels, body.bps, body.seconds, body.came)

    async def discard(self, header: wire.Activations, shapes: Shapes, requests: AsyncIterator[wire.FromDevice]) -> None:
        """Read and drop tensors that arrive too late, if their sizes and types are possible in this run."""
        for part in (header.labels, header.tensor):
            if part.dtype not in (LABELS, *WIRE_DTYPES):
                raise BadMessage(f"a tensor of {part.dtype[:20]!r} came")
        most = max(shapes.size(cut, WHOLE) for cut in range(1, len(shapes.activations) + 1))
        sizes = [size_of(header.labels.shape, header.labels.dtype), size_of(header.tensor.shape, header.tensor.dtype)]
        if sizes[0] > size_of((shapes.batch_size, *shapes.labels), "int64") or sizes[1] > most:
            raise BadMessage(f"{sum(sizes)} bytes were announced")
        await self._body(requests, sum(sizes))

    async def _body(self, requests: AsyncIterator[wire.FromDevice], size: int) -> Incoming:
        incoming = Incoming(size)
        while not incoming.complete:
            message = await anext(requests)
            if message.WhichOneof("kind") != "chunk":
                raise BadMessage(f"{message.WhichOneof('kind') or 'nothing'} came amid the bytes of a tensor")
            incoming.add(message.chunk)
            self.member.received_bytes += len(message.chunk)
        return incoming
