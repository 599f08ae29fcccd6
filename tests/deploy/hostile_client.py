"""A device that means harm: it has a certificate, knows the protocol, and keeps to none of it."""

import asyncio
import contextlib
import math
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import torch
from torch import Tensor

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import LayerStates, to_bytes
from adaptsfl.deploy.service import METHODS
from adaptsfl.deploy.tensors import pack
from adaptsfl.deploy.terms import PROTOCOL
from adaptsfl.deploy.transfer import CHUNK_BYTES, chunks
from deploy.in_process import PATIENCE_S, Deployment

# What gRPC says, on this side, when a server ends a call while it is spoken to.
CUT_SHORT = "Internal error from Core"
ABSURD = (float("nan"), float("inf"), float("-inf"), -1.0, 1e300, 5e-324, 1.7e308)
HUGE = (0, 1, 2**16, 2**31, 2**32 - 1)
WORDS = ("", "device-1", "\x1b[2J\x1b[31m", "float32", "float64", "../../etc", "x" * 2000, "\u202e", "{}" * 100)


def refusal(status: str) -> tuple[str, str]:
    """Return the ways in which a client may see one refusal: the server's status, or only that its call was ended.

    A server that refuses does not read on; gRPC then drops the status if the client's next write fails first.
    """
    return status, "ENDED"


class Hostile:
    """Sends what it should not, and counts.

    Attributes:
        sent: messages that went out.
        ended: how its calls were ended, by the name of the status.
    """

    def __init__(self, deployment: Deployment, name: str, seed: int) -> None:
        self.deployment, self.name, self.rng = deployment, name, random.Random(seed)
        self.channels = {server: deployment.channel(name, server) for server in ("edge", "fed")}
        self.sent = 0
        self.ended: Counter[str] = Counter()

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()

    async def call(self, service: str, method: str, messages: list[bytes]) -> str:
        """Send raw bytes to a method and return the name of the status that ended the call."""
        takes_many, gives_many, _, _ = METHODS[service][method]
        channel = self.channels["edge" if service == "Edge" else "fed"]
        kind = f"{'stream' if takes_many else 'unary'}_{'stream' if gives_many else 'unary'}"
        start = getattr(channel, kind)(f"/adaptsfl.{service}/{method}")

        async def sending() -> AsyncIterator[bytes]:
            for message in messages:
                self.sent += 1
                yield message

        if not takes_many:
            self.sent += 1
        call = start(sending() if takes_many else (messages or [b""])[0], timeout=PATIENCE_S)
        try:
            if gives_many:
                async for _ in call:
                    pass
            else:
                await call
            code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if error.details() == CUT_SHORT:
                code = "ENDED"
        self.ended[code] += 1
        return code

    # --- what it says ---

    def noise(self) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 2, 7, 40, 300)))

    def mutated(self, message: bytes) -> bytes:
        """Return a message with a few bytes changed, removed or added."""
        data = bytearray(message)
        for _ in range(self.rng.randint(1, 4)):
            at = self.rng.randrange(len(data) + 1)
            match self.rng.randrange(3):
                case 0 if at < len(data):
                    data[at] = self.rng.randrange(256)
                case 1:
                    del data[at : at + self.rng.randint(1, 8)]
                case _:
                    data[at:at] = self.rng.randbytes(self.rng.randint(1, 8))
        return bytes(data)

    def hello(self) -> wire.FromDevice:
        return wire.FromDevice(hello=wire.Hello(device=self.name, version=PROTOCOL))

    def absurd_ready(self) -> wire.FromDevice:
        """A Ready of which at least one number cannot be."""
        layers = self.deployment.conductor.model.layers
        good = [1e-3] * layers
        ready = wire.Ready(samples=100, forward_s=good, backward_s=good, rates=wire.Rates(uplink=1e6))
        match self.rng.randrange(4):
            case 0:
                ready.samples = self.rng.choice((0, 1, 2**40, 2**63, 2**64 - 1))
            case 1:
                ready.forward_s[self.rng.randrange(layers)] = self.rng.choice([x for x in ABSURD if x != 5e-324])
            case 2:
                ready.backward_s.extend(good * self.rng.randint(1, 3))
            case _:
                del ready.forward_s[self.rng.randrange(layers) :]
        return wire.FromDevice(ready=ready)

    def header(self) -> wire.TensorHeader:
        pick = self.rng.choice
        shape = [pick(HUGE) for _ in range(pick((0, 1, 2, 4, 5, 2000)))]
        return wire.TensorHeader(dtype=pick((*WORDS, "int64", "int8")), shape=shape)

    def activations(self) -> wire.FromDevice:
        pick = self.rng.choice
        told = wire.Activations(
            attempt=pick((0, 1, self.attempt())),
            round=pick((0, 1, 2, 2**32 - 1)),
            evaluation=pick((True, False)),
            labels=self.header(),
            tensor=self.header(),
            forward_s=pick(ABSURD),
            backward_s=pick(ABSURD),
            downlink=pick(ABSURD),
            evaluation_batches=pick(HUGE),
        )
        return wire.FromDevice(activations=told)

    def anything(self) -> wire.FromDevice:
        """Any message of a device, in no order."""
        pick = self.rng.choice
        return pick(
            (
                self.hello,
                self.absurd_ready,
                self.activations,
                lambda: wire.FromDevice(chunk=bytes(pick((0, 1, 1000, CHUNK_BYTES)))),
                lambda: wire.FromDevice(
                    delivered=wire.Delivered(attempt=self.attempt(), fed_uplink=pick(ABSURD), fed_downlink=pick(ABSURD))
                ),
                lambda: wire.FromDevice(failure=wire.Failure(reason=pick(WORDS))),
                lambda: wire.FromDevice(hello=wire.Hello(device=pick(WORDS), version=pick(HUGE))),
            )
        )()

    def attempt(self) -> int:
        block = self.deployment.conductor.protocol.block
        return 0 if block is None else block.attempt

    def part(self) -> wire.LayersPart:
        """Any message to the fed server."""
        pick = self.rng.choice
        return pick(
            (
                lambda: wire.LayersPart(
                    header=wire.Layers(
                        attempt=pick((0, self.attempt())),
                        device=pick((*WORDS, self.name, "device-2")),
                        first=pick((0, 1, 2, 2**32 - 1)),
                        last=pick((0, 1, 2, 3, 4, 2**32 - 1)),
                        size=pick((0, 1, 1000, 10_000, 2**40, 2**64 - 1)),
                    )
                ),
                lambda: wire.LayersPart(chunk=self.noise()),
                lambda: wire.LayersPart(chunk=struct.pack("<Q", pick((0, 8, 2**32, 2**63))) + b'{"1.x":{}}'),
                lambda: wire.LayersPart(
                    opening=wire.Opening(attempt=1, version=0, deepest=pick(HUGE), cuts={pick(WORDS): pick(HUGE)})
                ),
                lambda: wire.LayersPart(final=wire.Final(version=pick(HUGE))),
            )
        )()

    # --- what it does ---

    def attacks(self) -> Iterator[tuple[str, str, list[bytes]]]:
        """Yield calls without end: service, method and messages."""
        while True:
            yield self.attack()

    def attack(self) -> tuple[str, str, list[bytes]]:
        pick, count = self.rng.choice, self.rng.randint(1, 6)
        service = pick(("Edge", "Edge", "Fed"))
        method = pick(sorted(METHODS[service]))
        valid: list[bytes] = []
        if service == "Edge" and method == "train":
            begin = pick(([], [self.hello()], [self.hello(), self.absurd_ready()]))
            valid = [message.SerializeToString() for message in [*begin, *(self.anything() for _ in range(count))]]
        elif method == "echo":
            valid = [wire.Echo(chunk=bytes(pick((0, 1, 100)))).SerializeToString() for _ in range(pick((1, 2, 70)))]
        elif method == "fetch":
            wanted = wire.Wanted(attempt=self.attempt(), first=pick((0, 1, 2**32 - 1)), last=pick((0, 4, 2**32 - 1)))
            valid = [wanted.SerializeToString()]
        elif method == "close":
            weights = {pick(WORDS): pick(ABSURD), "device-1": 1.0}
            valid = [wire.Closing(attempt=self.attempt(), weights=weights).SerializeToString()]
        else:
            valid = [self.part().SerializeToString() for _ in range(count)]
        match self.rng.randrange(3):
            case 0:
                return service, method, [self.noise() for _ in range(count)]
            case 1:
                return service, method, [self.mutated(message) for message in valid]
            case _:
                return service, method, valid

    async def rage(self, messages: int) -> None:
        """Attack until so many messages are out."""
        goal = self.sent + messages
        for attack in self.attacks():
            if self.sent >= goal:
                return
            await self.call(*attack)


async def hold_open(hostile: Hostile, service: str, method: str, messages: list[Any]) -> Any:
    """Begin a call, send some messages and leave it as it is; return the call."""
    channel = hostile.channels["edge" if service == "Edge" else "fed"]
    takes_many, gives_many, kind, _ = METHODS[service][method]
    assert takes_many
    start = getattr(channel, f"stream_{'stream' if gives_many else 'unary'}")(f"/adaptsfl.{service}/{method}")
    call = start()
    for message in messages:
        assert isinstance(message, kind)
        await call.write(message.SerializeToString())
        hostile.sent += 1
    await asyncio.sleep(0)
    return call


class Liar(Hostile):
    """A hostile device that joins as it should, and lies once it is told to train.

    Attributes:
        told: how often each lie was told.
    """

    def __init__(self, deployment: Deployment, name: str, seed: int) -> None:
        super().__init__(deployment, name, seed)
        self.told: Counter[str] = Counter()

    @property
    def lies(self) -> list[str]:
        return sorted(name.removeprefix("lie_") for name in dir(self) if name.startswith("lie_"))

    async def lie(self, name: str) -> str:
        """Join, wait for a plan, tell one lie; return how the connection was ended."""
        call = self.channels["edge"].stream_stream(
            "/adaptsfl.Edge/train", wire.FromDevice.SerializeToString, wire.ToDevice.FromString
        )(timeout=PATIENCE_S)
        self.call_ = call
        try:
            await self.say(hello=wire.Hello(device=self.name, version=PROTOCOL))
            while True:
                reading = asyncio.ensure_future(call.read())
                await asyncio.wait({reading, self.deployment.run}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done() or (message := reading.result()) is grpc.aio.EOF:
                    reading.cancel()
                    raise StopAsyncIteration  # the run is over
                match message.WhichOneof("kind"):
                    case "welcome":
                        await self.say(ready=self.ready())
                    case "plan":
                        self.plan = message.plan
                        break
                    case "stop":
                        raise StopAsyncIteration
            await getattr(self, f"lie_{name}")()
            self.told[name] += 1
            with contextlib.suppress(TimeoutError):  # it came too late, or was believed, and nothing more is said
                while await asyncio.wait_for(call.read(), 1.0) is not grpc.aio.EOF:
                    pass
            code = "OK"
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.told[name] += 1
            code = (await call.code()).name
            if await call.details() == CUT_SHORT:
                code = "ENDED"
        finally:
            call.cancel()
        self.ended[code] += 1
        return code

    async def say(self, **message: Any) -> None:
        self.sent += 1
        await self.call_.write(wire.FromDevice(**message))

    def ready(self) -> wire.Ready:
        """A Ready that is accepted, with rates that are not."""
        layers, pick = self.deployment.conductor.model.layers, self.rng.choice
        rates = wire.Rates(uplink=pick(ABSURD), downlink=pick(ABSURD), fed_uplink=pick(ABSURD), fed_downlink=1e9)
        times = [pick((0.0, 5e-324, 1e-3, 1e6)) for _ in range(layers)]
        return wire.Ready(samples=100, forward_s=times, backward_s=times, rates=rates)

    def batch(self, **changes: Any) -> tuple[wire.Activations, Tensor, Tensor]:
        """A header as it should be, but for changes, with labels and activations."""
        shapes = self.deployment.conductor.shapes
        samples = shapes.batch_size // max(1, self.plan.micro_batches)
        shape = (samples, *shapes.activations[self.plan.cut - 1])
        labels = torch.zeros((samples, *shapes.labels), dtype=torch.int64)
        header, _ = pack(torch.zeros(shape), "float32")
        about, _ = pack(labels, "int64")
        told = wire.Activations(
            attempt=self.plan.attempt,
            round=self.plan.next_round,
            labels=about,
            tensor=header,
            forward_s=1,
            backward_s=1,
        )
        told.MergeFrom(wire.Activations(**changes))
        return told, labels, torch.zeros(shape)

    async def send(self, told: wire.Activations, labels: Tensor, tensor: Tensor) -> None:
        await self.say(activations=told)
        for chunk in chunks(pack(labels, "int64")[1], pack(tensor, "float32")[1]):
            await self.say(chunk=bytes(chunk.chunk))

    async def filled(self, value: float) -> None:
        told, labels, tensor = self.batch()
        await self.send(told, labels, tensor.fill_(value))

    async def lie_nan(self) -> None:
        await self.filled(float("nan"))

    async def lie_infinity(self) -> None:
        await self.filled(float("-inf"))

    async def lie_1e38(self) -> None:
        await self.filled(1e38)

    async def lie_1e19(self) -> None:
        told, labels, tensor = self.batch()
        await self.send(told, labels, tensor.copy_(1e19 * torch.randn(tensor.shape)))

    async def lie_label(self) -> None:
        told, labels, tensor = self.batch()
        await self.send(told, labels.fill_(self.rng.choice((-1, 10, 2**62))), tensor)

    async def lie_seconds(self) -> None:
        await self.send(*self.batch(forward_s=self.rng.choice([x for x in ABSURD if x != 5e-324])))

    async def lie_update_seconds(self) -> None:
        await self.send(*self.batch(update_s=self.rng.choice([x for x in ABSURD if x != 5e-324])))

    async def lie_part(self) -> None:
        await self.send(*self.batch(part=self.rng.choice((self.plan.micro_batches, 2**32 - 1))))

    async def lie_part_too_early(self) -> None:
        await self.send(*self.batch(part=self.plan.micro_batches - 1 or 1))

    async def lie_bad_later_part(self) -> None:
        await self.send(*self.batch())
        told, labels, tensor = self.batch(part=1)
        await self.send(told, labels, tensor.fill_(1e38))

    async def lie_round(self) -> None:
        await self.send(*self.batch(round=2**32 - 1))

    async def lie_shape(self) -> None:
        told, labels, tensor = self.batch()
        told.tensor.shape[0] = 2**32 - 1
        await self.send(told, labels, tensor)

    async def lie_dimensions(self) -> None:
        told, labels, tensor = self.batch(attempt=0)
        told.tensor.shape.extend([2**32 - 1] * 100_000)
        await self.send(told, labels, tensor)

    async def lie_dtype(self) -> None:
        told, labels, tensor = self.batch()
        told.tensor.dtype = "float64"
        await self.send(told, labels, tensor)

    async def lie_stale_and_huge(self) -> None:
        told, labels, tensor = self.batch()
        told.attempt ^= 1
        told.tensor.shape[:] = [2**31, 2**31]
        await self.send(told, labels, tensor)

    async def lie_small_chunks(self) -> None:
        await self.say(activations=self.batch()[0])
        for _ in range(50):
            await self.say(chunk=b"x")

    async def lie_empty_chunks(self) -> None:
        await self.say(activations=self.batch()[0])
        for _ in range(50):
            await self.say(chunk=b"")

    async def lie_too_many_chunks(self) -> None:
        await self.send(*self.batch())
        for _ in range(50):
            await self.say(chunk=bytes(CHUNK_BYTES))

    async def lie_amid_a_tensor(self) -> None:
        await self.say(activations=self.batch()[0])
        await self.say(activations=self.batch()[0])

    async def lie_oversized(self) -> None:
        await self.say(chunk=bytes(2 * CHUNK_BYTES))

    async def lie_again(self) -> None:
        await self.send(*self.batch())
        for _ in range(100):
            await self.send(*self.batch())
        await self.say(hello=wire.Hello(device=self.name, version=PROTOCOL))

    async def lie_test_samples(self) -> None:
        for _ in range(20):
            await self.send(*self.batch(evaluation=True, evaluation_batches=1))
        await self.send(*self.batch(evaluation=True, evaluation_batches=2**32 - 1))

    async def lie_delivered(self) -> None:
        for _ in range(500):
            await self.say(delivered=wire.Delivered(attempt=self.plan.attempt, fed_uplink=self.rng.choice(ABSURD)))
        await self.say(chunk=b"")

    async def lie_failure(self) -> None:
        await self.say(failure=wire.Failure(reason="\x1b]0;owned\x07\x1b[2J[red]\n" * 100))

    async def lie_layers(self) -> None:
        """Bring layers that cannot be to the fed server, in every way that there is."""
        template, cut = self.deployment.conductor.template, self.plan.cut
        good = {number: template.layer(number).state() for number in range(1, cut + 1)}
        name = next(name for name, tensor in good[1].items() if tensor.numel() > 1)
        weight = good[1][name]
        for tensor in (weight * math.nan, weight * 0 + 3.4e38, weight.double(), weight[:1], weight.flatten()):
            await self.deliver({**good, 1: {**good[1], name: tensor}})
        await self.deliver({**good, 1: {**good[1], name.replace("parameters", "momentum_buffer"): weight.clone()}})
        await self.deliver({**good, 1: {}})
        await self.deliver({**good, 99: template.layer(1).state()})
        await self.deliver(good, device="device-1")
        await self.deliver(good, last=2**32 - 1)
        await self.deliver(good, size=2**62)
        await self.deliver(good, size=8)
        await self.call("Fed", "fetch", [wire.Wanted(attempt=self.plan.attempt, first=1, last=5).SerializeToString()])
        await self.say(chunk=b"")

    async def deliver(self, states: LayerStates, **changes: Any) -> None:
        data = to_bytes(states)
        about = wire.Layers(attempt=self.plan.attempt, device=self.name, first=1, last=self.plan.cut, size=len(data))
        about.MergeFrom(wire.Layers(**changes))
        parts = [wire.LayersPart(header=about), *(wire.LayersPart(chunk=bytes(chunk.chunk)) for chunk in chunks(data))]
        code = await self.call("Fed", "deliver", [part.SerializeToString() for part in parts])
        assert code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "ENDED"), (code, changes)
