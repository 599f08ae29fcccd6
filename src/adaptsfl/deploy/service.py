"""The two services of wire.proto, for servers and for clients."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.security.identity import Party, caller, require
from adaptsfl.deploy.security.limits import MOST_VIOLATIONS, STRIKES, RateLimit
from adaptsfl.deploy.transfer import CHUNK_BYTES, LARGEST_MESSAGE, Meter, parser, serializer
from adaptsfl.errors import BadMessage, NotWritten

# By service and method: whether requests and answers are streams, and their message types.
METHODS: dict[str, dict[str, tuple[bool, bool, Any, Any]]] = {
    "Edge": {
        "train": (True, True, wire.FromDevice, wire.ToDevice),
        "echo": (True, True, wire.Echo, wire.Echo),
    },
    "Fed": {
        "open": (True, False, wire.LayersPart, wire.Opened),
        "fetch": (False, True, wire.Wanted, wire.LayersPart),
        "deliver": (True, False, wire.LayersPart, wire.Received),
        "close": (False, False, wire.Closing, wire.Closed),
        "bring_moments": (True, False, wire.LayersPart, wire.Received),
        "merge_moments": (False, False, wire.Merging, wire.Merged),
        "fetch_moments": (False, True, wire.Wanted, wire.LayersPart),
        "finish": (True, False, wire.LayersPart, wire.Received),
        "echo": (True, True, wire.Echo, wire.Echo),
    },
}
OPTIONS = (("grpc.max_receive_message_length", LARGEST_MESSAGE), ("grpc.max_send_message_length", LARGEST_MESSAGE))
ECHO_BYTES, ECHO_CHUNKS = 2**22, 64  # the most that one measurement of a link may send
ECHOES_PER_MINUTE = 24  # by one device; a measurement takes up to seven
MOST_CALLS = 8  # concurrent calls of one device; calls of a broken connection may linger


class NotNow(Exception):
    """A call that does not fit the server's state: it was restarted since, or the caller is behind."""


class TooMuch(Exception):
    """A call of a device that exceeds its rate limit, or its number of concurrent calls."""


class ShutOut(Exception):
    """A call of a device that has broken the protocol too often."""


class Service:
    """A server of one of the services: a method for each of its calls, named as in `METHODS`.

    An error of a call becomes a gRPC status; the server goes on.

    Args:
        say: called with every line for the log.
    """

    service: ClassVar[str]

    def __init__(self, say: Callable[[str], None] = lambda _text: None) -> None:
        self.say = say
        self._calls: Counter[Party] = Counter()
        self._strikes: Counter[Party] = Counter()  # violations in a row
        self._violations: Counter[Party] = Counter()  # all violations
        self._echoes: dict[Party, RateLimit] = defaultdict(lambda: RateLimit(ECHOES_PER_MINUTE))

    def violated(self, party: Party, reason: str) -> None:
        """Count a violation of the protocol by a device."""
        self._strikes[party] += 1
        self._violations[party] += 1
        self.say(f"{party}: {reason}" + (" (shut out)" if self.shut_out(party) else ""))

    def behaved(self, party: Party) -> None:
        """Reset a device's violations in a row, after a call that succeeded."""
        self._strikes.pop(party, None)

    def shut_out(self, party: Party) -> str:
        """Return why a device is shut out; empty if it is not."""
        often = self._strikes[party] >= STRIKES or self._violations[party] >= MOST_VIOLATIONS
        return "it broke the protocol too often" if often else ""

    @contextmanager
    def _watching(self, party: Party | None) -> Iterator[None]:
        """Limit a device's calls, and count its violations. Servers are not limited."""
        if party is None or party.role != "device":
            yield  # `require` decides whether it may call
            return
        if why := self.shut_out(party):
            raise ShutOut(f"{party} is shut out: {why}")
        if self._calls[party] >= MOST_CALLS:
            raise TooMuch(f"{party} has {MOST_CALLS} calls open, which are the most")
        self._calls[party] += 1
        try:
            yield
        except BadMessage as error:
            self.violated(party, str(error))
            raise
        finally:
            self._calls[party] -= 1
            if not self._calls[party]:
                del self._calls[party]
        self.behaved(party)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers of all calls, for a gRPC server."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(_not_cancelled)
        made = {}
        for name, (takes_many, gives_many, request, answer) in METHODS[self.service].items():
            kind = f"{'stream' if takes_many else 'unary'}_{'stream' if gives_many else 'unary'}_rpc_method_handler"
            wrapped = self._wrapped(getattr(self, name), parser(request), takes_many, gives_many)
            made[name] = getattr(grpc, kind)(wrapped, None, serializer(answer))
        return grpc.method_handlers_generic_handler(f"adaptsfl.{self.service}", made)

    def _wrapped(self, method: Any, parse: Any, takes_many: bool, gives_many: bool) -> Any:
        """Return a method that parses requests itself: gRPC would log every request that it cannot parse."""

        async def one(request: Any, context: Any) -> Any:
            try:
                with self._watching(caller(context)):
                    return await method(_read_all(parse, request) if takes_many else _read(parse, request), context)
            except Exception as error:
                await _abort(context, error)

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                with self._watching(caller(context)):
                    read = _read_all(parse, request) if takes_many else _read(parse, request)
                    async for answer in method(read, context):
                        yield answer
            except Exception as error:
                await _abort(context, error)

        return many if gives_many else one

    async def echo(self, requests: AsyncIterator[wire.Echo], context: Any) -> AsyncIterator[wire.Echo]:
        """Receive bytes and send as many back, to measure a link. An empty message starts the clock."""
        party = await require(context, ("device", "edge"))
        if not self._echoes[party].allows():
            raise TooMuch(f"{party} measured its link {ECHOES_PER_MINUTE} times within a minute")
        meter, count = Meter(), 0
        async for request in requests:
            count += 1
            if count == 1 and not request.chunk:
                meter = Meter()  # the time counts from here on
                continue
            meter.count(len(request.chunk))
            if not request.chunk or count > ECHO_CHUNKS or meter.size > ECHO_BYTES:
                raise BadMessage(f"{meter.size} bytes in {count} messages came to measure a link")
        yield wire.Echo(uplink=meter.bps)
        for start in range(0, meter.size, CHUNK_BYTES):
            yield wire.Echo(chunk=bytes(min(CHUNK_BYTES, meter.size - start)))


class Calls:
    """The calls of one service over a channel, as attributes named as in `METHODS`."""

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        for name, (takes_many, gives_many, request, answer) in METHODS[service].items():
            kind = f"{'stream' if takes_many else 'unary'}_{'stream' if gives_many else 'unary'}"
            call = getattr(channel, kind)(
                f"/adaptsfl.{service}/{name}",
                request_serializer=serializer(request),
                response_deserializer=parser(answer),
            )
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:  # for type checkers
        raise AttributeError(name)


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str] | None:
    """Return the gRPC status of an error that the caller caused or must know of; None if it is a bug of ours."""
    match error:
        case BadMessage():
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        case ShutOut():
            return grpc.StatusCode.PERMISSION_DENIED, str(error)
        case NotNow():
            return grpc.StatusCode.FAILED_PRECONDITION, str(error)
        case TooMuch() | NotWritten():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        case StopAsyncIteration():
            return grpc.StatusCode.INVALID_ARGUMENT, "the stream ended too early"
    return None


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Drop gRPC's log records of cancelled calls: with their tracebacks any caller could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _read(parse: Any, data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        raise BadMessage(f"{len(data)} bytes came that are no message") from None


async def _read_all(parse: Any, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield _read(parse, data)


async def _abort(context: Any, error: Exception) -> None:
    status = status_of(error)
    if status is None or isinstance(error, asyncio.CancelledError):
        raise error
    await context.abort(*status)
