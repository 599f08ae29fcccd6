"""A device's rounds: forward passes part by part, each sent while the next is computed; then the backward passes."""

import asyncio
import time
from collections.abc import Callable

from torch import Tensor

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.device.calls import EdgeStream
from adaptsfl.deploy.parties.device.data import DeviceData
from adaptsfl.deploy.parties.device.held import Held
from adaptsfl.deploy.tensors import check_header, size_of, unpack
from adaptsfl.deploy.transfer import Incoming
from adaptsfl.errors import BadMessage
from adaptsfl.training import OptimizerSettings

Packed = Callable[[Tensor, Tensor, str], tuple[wire.Activations, list[memoryview]]]


class Rounds:
    """Trains the layers that a device holds, and measures what its messages report.

    Args:
        packed: returns a header and the bytes that follow it, of activations, their labels and a type of numbers.

    Attributes:
        backward_s: the time of one backward pass in the last round, the mean over its parts; 0 if none.
        update_s: the time from the arrival of that round's last gradients to the update that followed them.
        learned: whether any gradients have been followed since this was last set to False.
    """

    def __init__(self, data: DeviceData, optimizer: OptimizerSettings, packed: Packed) -> None:
        self.data, self.optimizer, self.packed = data, optimizer, packed
        self.backward_s = self.update_s = self._downlink = self._passes_s = 0.0
        self._parts = 1  # of the last round
        self.learned = False

    async def send(self, held: Held, round_: int, stream: EdgeStream) -> None:
        """Run the device's layers on the mini-batch of a round, part by part, and send the activations."""
        held.pending = {}
        if not 1 <= round_ <= held.last_round:
            return
        parts = held.sending.parts(round_)
        held.round, self._passes_s = round_, 0.0
        x, labels = self.data.at(round_)
        for part, (own, targets) in enumerate(zip(x.chunk(parts), labels.chunk(parts), strict=True)):
            started = time.perf_counter()
            activations = await asyncio.to_thread(held.device.forward, own, part)
            forward_s = time.perf_counter() - started
            held.sample = tuple(activations.shape[1:])
            header, data = self.packed(activations, targets, held.sending.dtype(round_))
            header.round, header.part, header.forward_s, header.fetch_s = round_, part, forward_s, held.fetch_s
            header.backward_s = self.backward_s if parts == self._parts else 0.0
            header.update_s, header.downlink = self.update_s, self._downlink
            held.pending[part] = header, data
            if parts > 1:
                stream.post(header, data)
            else:
                await stream.send(header, data)

    async def send_again(self, held: Held, stream: EdgeStream) -> None:
        """Send the activations again that were not answered over the connection before."""
        for header, data in list(held.pending.values()):
            await stream.send(header, data)

    async def learn(self, held: Held, gradients: wire.Gradients, body: Incoming) -> bool:
        """Run the backward pass of a part; after the last one, update the layers, and return True."""
        round_, part = gradients.round, gradients.part
        if round_ != held.round or part not in held.pending:
            return False  # a duplicate: they were requested again after a reconnect
        received = unpack(gradients.tensor, body.data)
        started, rate = time.perf_counter(), self.optimizer.rate(round_, common=False)
        await asyncio.to_thread(held.device.backward, received, rate, part)
        ended = time.perf_counter()
        self._passes_s += ended - started
        del held.pending[part]
        if held.pending:
            return False
        self._parts, self.learned = held.sending.parts(round_), True
        self.backward_s, self.update_s = self._passes_s / self._parts, ended - body.came
        self._downlink = body.bps
        held.learned, held.start = round_, None
        return True


def gradient_bytes(held: Held, gradients: wire.Gradients, batch_size: int) -> int:
    """Return how many bytes of gradients follow a header; reject what the device has not asked for."""
    round_, part = gradients.round, gradients.part
    if round_ > held.learned and (round_ != held.round or part >= held.sending.parts(round_)):
        raise BadMessage(f"the edge server sent gradients of round {round_}, which was not asked for")
    dtype = held.sending.dtype(round_)
    shape = (batch_size // held.sending.parts(round_), *held.sample)
    check_header(gradients.tensor, shape, dtype)
    return size_of(shape, dtype)
