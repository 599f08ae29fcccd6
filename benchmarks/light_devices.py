"""Many devices in one process that speak the protocol, but train nothing.

Started by benchmarks/many_devices.py. Each device has a certificate of its own, and connections with mutual TLS to both
servers. It sends the same random activations and labels in every round, and delivers its layers as it fetched them. So
the servers do all that they do for real devices, and the devices' computing does not blur what is measured.
"""

import argparse
import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.security.identity import Party, load_credentials, open_channel
from adaptsfl.deploy.service import OPTIONS, Calls
from adaptsfl.deploy.terms import PROTOCOL
from adaptsfl.deploy.transfer import Chunk, Incoming, chunks

PASS_S = 1e-4  # of every layer and pass, as the devices report them
AT_ONCE = 16  # devices that connect at the same time


class LightDevice:
    """One device.

    Args:
        width: numbers per sample at the cut.
        layers: of the model.
        classes: of the labels.
    """

    def __init__(self, name: str, width: int, layers: int, batch_size: int, classes: int) -> None:
        self.name, self.layers, self.batch_size = name, layers, batch_size
        generator = random.Random(name)
        labels = b"".join(generator.randrange(classes).to_bytes(8, "little") for _ in range(batch_size))
        # Bytes whose every fourth is below 0x40 are positive floats below 2, and thus finite.
        numbers = bytearray(generator.randbytes(4 * width * batch_size))
        numbers[3::4] = bytes(byte & 0x3F for byte in numbers[3::4])
        self._data = [memoryview(labels), memoryview(numbers)]
        self._shapes = (batch_size,), (batch_size, width)
        self._attempt = self._last_round = 0
        self._file = b""  # its layers

    async def run(self, edge: str, fed: str, certs: Path, connecting: asyncio.Semaphore) -> None:
        """Take part until the edge server is gone."""
        credentials, party = load_credentials(certs, self.name), Party("device", self.name)
        to_edge = open_channel(edge, "edge", credentials, party, OPTIONS)
        to_fed = open_channel(fed, "fed", credentials, party, OPTIONS)
        async with to_edge, to_fed:
            stream = Calls(to_edge, "Edge").train(wait_for_ready=True)
            try:
                async with connecting:
                    hello = wire.Hello(device=self.name, version=PROTOCOL)
                    await stream.write(wire.FromDevice(hello=hello))
                    await stream.read()  # the welcome
                passes = [PASS_S] * self.layers
                samples = 10 * self.batch_size
                ready = wire.Ready(samples=samples, forward_s=passes, backward_s=passes, rates=wire.Rates())
                await stream.write(wire.FromDevice(ready=ready))
                await self._obey(stream, Calls(to_fed, "Fed"))
            except grpc.aio.AioRpcError as error:
                print(f"{self.name}: {error.code().name}: {error.details()}", flush=True)

    async def _obey(self, stream: Any, fed: Calls) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            match message.WhichOneof("kind"):
                case "plan":
                    plan = message.plan
                    self._attempt, self._last_round = plan.attempt, plan.last_round
                    self._file = await _fetched(fed, wire.Wanted(attempt=plan.attempt, first=1, last=plan.cut))
                    await self._send(stream, plan.next_round)
                case "gradients":
                    await _body(stream, 4 * self._shapes[1][0] * self._shapes[1][1])
                    await self._send(stream, message.gradients.round + 1)
                case "skip":
                    await self._send(stream, message.skip.next_round)
                case "deliver":
                    header = wire.Layers(attempt=self._attempt, device=self.name, first=1, last=1, size=len(self._file))
                    await fed.deliver(_parts(header, self._file))
                    await stream.write(wire.FromDevice(delivered=wire.Delivered(attempt=self._attempt)))
                case "stop":
                    return

    async def _send(self, stream: Any, round_: int) -> None:
        if round_ > self._last_round:
            return
        labels, tensor = self._shapes
        header = wire.Activations(
            attempt=self._attempt,
            round=round_,
            labels=wire.TensorHeader(dtype="int64", shape=labels),
            tensor=wire.TensorHeader(dtype="float32", shape=tensor),
            forward_s=PASS_S,
            backward_s=PASS_S,
        )
        await stream.write(wire.FromDevice(activations=header))
        for chunk in chunks(*self._data):
            await stream.write(chunk)


async def _body(stream: Any, size: int) -> None:
    incoming = Incoming(size)
    while not incoming.complete:
        incoming.add((await stream.read()).chunk)


async def _fetched(fed: Calls, wanted: wire.Wanted) -> bytes:
    parts = [part async for part in fed.fetch(wanted)]
    return b"".join(part.chunk for part in parts[1:])


async def _parts(header: wire.Layers, data: bytes) -> AsyncIterator[wire.LayersPart | Chunk]:
    yield wire.LayersPart(header=header)
    for chunk in chunks(data):
        yield chunk


async def _all(options: argparse.Namespace) -> None:
    connecting = asyncio.Semaphore(AT_ONCE)
    devices = [
        LightDevice(f"device-{k + 1}", options.width, options.layers, options.batch_size, options.classes)
        for k in range(options.count)
    ]
    work = asyncio.gather(*(d.run(options.edge, options.fed, options.certs, connecting) for d in devices))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    await work


def main() -> None:
    """Be all devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edge", required=True)
    parser.add_argument("--fed", required=True)
    parser.add_argument("--certs", type=Path, required=True)
    for number in ("count", "width", "layers", "batch-size", "classes"):
        parser.add_argument(f"--{number}", type=int, required=True)
    asyncio.run(_all(parser.parse_args()))


if __name__ == "__main__":
    main()
