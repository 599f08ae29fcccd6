"""The fed server: it holds the client-specific layers, averages the devices' copies and keeps the versions.

It sees weights of single devices, and never activations or labels. The edge server gets layers above the floor only.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from adaptsfl.checks import printable
from adaptsfl.deploy import moments_file
from adaptsfl.deploy.layers_file import LayerStates, Template, to_bytes
from adaptsfl.deploy.moments_file import MomentsTemplate, NormMoments
from adaptsfl.deploy.parties.fed.block import ClosedBlock, FedBlock, checked_weights
from adaptsfl.deploy.parties.fed.client import LARGEST_DIVERGENCE
from adaptsfl.deploy.parties.fed.versions import KEPT_VERSIONS, MODEL_FILE, VersionStore
from adaptsfl.deploy.security.identity import Party, require
from adaptsfl.deploy.service import NotNow, Service
from adaptsfl.deploy.terms import Terms
from adaptsfl.deploy.transfer import Chunk, Incoming, chunks
from adaptsfl.deploy.wire_pb2 import (
    Closed,
    Closing,
    Layers,
    LayersPart,
    Merged,
    Merging,
    Opened,
    Received,
    Wanted,
)
from adaptsfl.errors import BadMessage, NotWritten
from adaptsfl.training.divergence import divergence
from adaptsfl.training.statistics import Moments, Norm


class FedServer(Service):
    """Answers the calls of service Fed.

    Args:
        folder: the folder of the versions, and of the complete model at the end.
        say: called with every line for the log.
    """

    service = "Fed"

    def __init__(self, terms: Terms, folder: Path, say: Callable[[str], None] = lambda _text: None) -> None:
        super().__init__(say)
        self.terms, self.folder = terms, folder
        seed = secrets.randbits(63) if terms.recipe.deploy.private_start else None
        self.model, _ = terms.model(seed)
        self.template = Template(self.model, terms.optimizer)
        self.moments = MomentsTemplate(self.model)
        self.block: FedBlock | None = None
        self._merged: tuple[int, NormMoments] | None = None  # the version and moments of the last merge
        self.store = VersionStore(folder, terms, self.template)
        self.versions, self._closed = self.store.load()
        if self.versions:
            self.say(f"going on with version {max(self.versions)} of the layers")
        else:
            self.versions = {0: {k: self.template.layer(k).state() for k in range(1, terms.floor + 1)}}
            self.store.save(ClosedBlock(0, 0), self.versions[0])
        self.finished = asyncio.Event()
        self.failure: NotWritten | None = None  # the error that ended it before the model was written
        self._averaging = asyncio.Lock()

    # --- calls ---

    async def open(self, requests: AsyncIterator[LayersPart], context: Any) -> Opened:
        """Open a block; the edge server sends the layers that become client-specific with it."""
        await require(context, "edge")
        parts = aiter(requests)
        opening = (await anext(parts)).opening
        first, last, data = await self._receive(parts)
        base = self.versions.get(opening.version)
        if base is None:
            have = ", ".join(map(str, self.versions))
            raise NotNow(f"version {opening.version} of the layers is not here, but {have}")
        cuts = dict(opening.cuts)
        self._check_opening(opening.deepest, cuts, first, last, len(base))
        brought = self.template.from_bytes(data, range(first, last + 1)) if last else {}
        if self._already_closed(opening.attempt) is not None:
            return Opened(anew=False)
        anew = self.block is None or self.block.attempt != opening.attempt
        if anew:
            for version in [version for version in self.versions if version > opening.version]:
                del self.versions[version]  # the edge server went back to an earlier block
            self.block = FedBlock(opening.attempt, opening.version, opening.deepest, cuts, {**base, **brought})
        return Opened(anew=anew)

    async def fetch(self, request: Wanted, context: Any) -> AsyncIterator[LayersPart | Chunk]:
        """Send a device the layers up to its cut, or the edge server layers above the floor."""
        party = await require(context, ("device", "edge"))
        block = self._open_block(request.attempt)
        self._check_wanted(block, party, request.first, request.last)
        wanted = {number: block.base[number] for number in range(request.first, request.last + 1)}
        data = await asyncio.to_thread(to_bytes, wanted)
        header = Layers(attempt=block.attempt, first=request.first, last=request.last, size=len(data))
        yield LayersPart(header=header)
        for chunk in chunks(data):
            yield chunk

    async def deliver(self, requests: AsyncIterator[LayersPart], context: Any) -> Received:
        """Receive copies of one device's layers: up to its cut from the device, above it from the edge server."""
        party = await require(context, ("device", "edge"))
        parts = aiter(requests)
        header = _header(await anext(parts))
        block = self._open_block(header.attempt)
        device = party.name if party.role == "device" else header.device
        if device not in block.cuts or header.device not in ("", device):
            raise BadMessage(f"{party} brought layers of {header.device[:64]!r}")
        cut = block.cuts[device]
        expected = range(1, cut + 1) if party.role == "device" else range(cut + 1, block.deepest + 1)
        if not expected or (header.first, header.last) != (expected[0], expected[-1]):
            raise BadMessage(f"{party} brought layers {header.first} to {header.last} of {device}")
        data = await self._body(parts, header.size, self.template.largest_bytes(expected))
        states = await asyncio.to_thread(self.template.from_bytes, data, expected)
        (block.from_devices if party.role == "device" else block.from_edge)[device] = states
        return Received(size=len(data))

    async def close(self, request: Closing, context: Any) -> Closed:
        """Average the copies of the named devices, measure their divergence if asked, and publish the next version."""
        await require(context, "edge")
        async with self._averaging:
            closed = self._already_closed(request.attempt)
            if closed is not None:
                return Closed(version=closed.version, divergence=closed.divergence if request.divergence else ())
            block = self._open_block(request.attempt)
            weights = checked_weights(request.weights, block)
            missing = [name for name in weights if not block.delivered(name)]
            if missing:
                return Closed(version=block.version, missing=missing)
            apart = await asyncio.to_thread(self._divergence, block, weights) if request.divergence else ()
            states = await asyncio.to_thread(self._averaged, block, weights)
            closed = ClosedBlock(block.attempt, block.version + 1, apart)
            await self._written(self.store.save, closed, states)
            self.versions[closed.version] = states
            for old in sorted(self.versions)[:-KEPT_VERSIONS]:
                del self.versions[old]
            self.block, self._closed = None, closed
            self.say(f"version {closed.version}: layers 1 to {block.deepest} of {len(weights)} devices averaged")
            return Closed(version=closed.version, divergence=closed.divergence)

    async def bring_moments(self, requests: AsyncIterator[LayersPart], context: Any) -> Received:
        """Receive moments of batch-norm: of a device's layers up to its cut, or of those at the edge server."""
        party = await require(context, ("device", "edge"))
        parts = aiter(requests)
        header = _header(await anext(parts))
        block = self._open_block(header.attempt)
        layers, least = range(header.first, header.last + 1), min(block.cuts.values())
        if party.role == "device":
            right = header.device == party.name and layers == range(1, block.cuts.get(party.name, 0) + 1)
        else:
            right = least < header.first <= header.last <= len(block.base)
        if not right:
            whose = printable(header.device, 64)
            raise BadMessage(f"{party} brought moments of layers {header.first} to {header.last} of {whose!r}")
        data = await self._body(parts, header.size, self.moments.largest_bytes(layers))
        found = self.moments.from_bytes(data, layers)
        if party.role == "device":
            block.moments[party.name] = found
        else:
            block.edge_moments = found
        return Received(size=len(data))

    async def merge_moments(self, request: Merging, context: Any) -> Merged:
        """Merge the moments of the named devices, and those of the edge server; devices fetch them from here."""
        await require(context, "edge")
        block = self._open_block(request.attempt)
        weights = checked_weights(request.weights, block)
        missing = [n for n in weights if self.moments.norms(range(1, block.cuts[n] + 1)) and n not in block.moments]
        if missing:
            return Merged(missing=missing)
        merged: dict[Norm, Moments] = {}
        for norm in self.moments.norms(range(1, len(block.base) + 1)):
            parts = [block.moments[n][norm].weighing(w) for n, w in weights.items() if block.cuts[n] >= norm[0]]
            if len(parts) < len(weights):  # for the others the layer runs at the edge server
                if norm not in block.edge_moments:
                    raise BadMessage(f"the edge server brought no moments of layer {norm[0]}")
                parts.append(block.edge_moments[norm])
            merged[norm] = Moments.merged(parts)
        block.merged, self._merged = merged, (block.version, merged)
        return Merged()

    async def fetch_moments(self, request: Wanted, context: Any) -> AsyncIterator[LayersPart | Chunk]:
        """Send a device the merged moments of the layers up to its cut, or the edge server those above the floor."""
        party = await require(context, ("device", "edge"))
        block = self._open_block(request.attempt)
        self._check_wanted(block, party, request.first, request.last)
        if block.merged is None:
            raise NotNow("no moments were merged in this block")
        norms = self.moments.norms(range(request.first, request.last + 1))
        data = moments_file.to_bytes({norm: block.merged[norm] for norm in norms})
        yield LayersPart(header=Layers(attempt=block.attempt, first=request.first, last=request.last, size=len(data)))
        for chunk in chunks(data):
            yield chunk

    async def finish(self, requests: AsyncIterator[LayersPart], context: Any) -> Received:
        """Write the complete model from the averaged layers and the common ones, which the edge server sends."""
        await require(context, "edge")
        parts = aiter(requests)
        final = (await anext(parts)).final
        own = self.versions.get(final.version)
        if own is None:
            raise NotNow(f"version {final.version} of the layers is not here")
        if final.statistics and (self._merged is None or self._merged[0] != final.version):
            raise NotNow(f"batch-norm's statistics of version {final.version} are not here")
        header = _header(await anext(parts))
        expected = range(len(own) + 1, self.model.layers + 1)
        if (header.first, header.last) != ((expected[0], expected[-1]) if expected else (0, 0)):
            raise BadMessage(f"layers {header.first} to {header.last} came, {len(own) + 1} and on were expected")
        data = await self._body(parts, header.size, self.template.largest_bytes(expected))
        common = self.template.from_bytes(data, expected) if expected else {}
        merged = self._merged[1] if final.statistics and self._merged is not None else {}
        await self._written(self.store.write_model, {**own, **common}, merged)
        self.say(f"the model is in {self.folder / MODEL_FILE}")
        self.finished.set()
        return Received(size=len(data))

    # --- helpers of the calls ---

    def _open_block(self, attempt: int) -> FedBlock:
        if self.block is None or self.block.attempt != attempt:
            raise NotNow("this block is not open here")
        return self.block

    def _already_closed(self, attempt: int) -> ClosedBlock | None:
        """Return the result of a block that was closed by an earlier call; None if it was not."""
        return self._closed if self._closed is not None and self._closed.attempt == attempt else None

    def _check_opening(self, deepest: int, cuts: dict[str, int], first: int, last: int, known: int) -> None:
        if not cuts or deepest != max(cuts.values()) or not 1 <= deepest <= self.model.layers:
            raise BadMessage(f"a block was opened with {len(cuts)} cuts and L_c = {deepest}")
        if min(cuts.values()) < self.terms.floor:
            raise BadMessage(f"a block was opened with cut {min(cuts.values())}, beneath the floor {self.terms.floor}")
        brought = range(first, last + 1) if last else range(0)
        if list(brought) != list(range(known + 1, deepest + 1)):
            raise BadMessage(f"layers {first} to {last} came along with a block, {known + 1} to {deepest} are new")

    def _check_wanted(self, block: FedBlock, party: Party, first: int, last: int) -> None:
        if not 1 <= first <= last <= len(block.base):
            raise BadMessage(f"layers {first} to {last} were asked for, there are {len(block.base)}")
        if party.role == "edge" and first <= self.terms.floor:
            raise BadMessage(f"the edge server asked for layer {first}, and the floor is {self.terms.floor}")
        if party.role == "device" and (first != 1 or last != block.cuts.get(party.name, 0)):
            raise BadMessage(f"{party} asked for layers {first} to {last}")

    async def _receive(self, parts: AsyncIterator[LayersPart]) -> tuple[int, int, bytearray]:
        header = _header(await anext(parts))
        if not header.last:
            return 0, 0, bytearray()
        if not 1 <= header.first <= header.last <= self.model.layers:
            raise BadMessage(f"layers {header.first} to {header.last} came")
        most = self.template.largest_bytes(range(header.first, header.last + 1))
        data = await self._body(parts, header.size, most)
        return header.first, header.last, data

    async def _body(self, parts: AsyncIterator[LayersPart], size: int, most: int) -> bytearray:
        if size > most:
            raise BadMessage(f"{size} bytes were announced, {most} are the most")
        incoming = Incoming(size)
        async for part in parts:
            incoming.add(part.chunk)
            if incoming.complete:
                break
        if not incoming.complete:
            raise NotNow("the stream ended before all bytes had come")  # the caller may have disconnected
        return incoming.data

    def _averaged(self, block: FedBlock, weights: dict[str, float]) -> LayerStates:
        """Return the weighted mean of the devices' layers.

        Nothing is added up before: only now is it known who is averaged and with which weight, a device may have
        delivered twice, and sums of floats depend on the order, which is that of names whoever delivered first.
        """
        total = sum(weights.values())
        shares = [weight / total for weight in weights.values()]
        return self.template.mean([block.forged(name) for name in weights], shares)

    def _divergence(self, block: FedBlock, weights: dict[str, float]) -> tuple[float, ...]:
        """Return the divergence of the devices' copies of every layer, measured as in a simulation."""
        total = sum(weights.values())
        forged = [block.forged(name) for name in weights]
        shares = [weight / total for weight in weights.values()]
        found = []
        for number in range(1, block.deepest + 1):
            copies = [own[number] for own in forged]
            parameters = [[copy[name] for copy in copies] for name in copies[0] if name.startswith("parameters.")]
            found.append(min(divergence(parameters, shares), LARGEST_DIVERGENCE))
        return tuple(found)

    # --- disk ---

    async def _written(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write a file; if that fails, this server ends, and a restarted one resumes from the previous version."""
        try:
            await asyncio.to_thread(write, *arguments)
        except NotWritten as error:
            self.failure = error
            self.finished.set()
            raise


def _header(part: LayersPart) -> Layers:
    if part.WhichOneof("kind") != "header":
        raise BadMessage("a header of layers was expected")
    return part.header
