"""The two services of wire.proto, for those who serve them and those who call them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.identity import require
from adaptsfl.deploy.transfer import CHUNK_BYTES, LARGEST_MESSAGE, Incoming, parser, serializer
from adaptsfl.errors import BadMessage, NotWritten

# By service and method: whether requests and answers are streams, and what they are.
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
        "finish": (True, False, wire.LayersPart, wire.Received),
        "echo": (True, True, wire.Echo, wire.Echo),
    },
}
OPTIONS = (("grpc.max_receive_message_length", LARGEST_MESSAGE), ("grpc.max_send_message_length", LARGEST_MESSAGE))
ECHO_BYTES = 2**22  # the most that one measurement of a link may send


class NotNow(Exception):
    """A call that does not fit what the server knows: it was restarted since, or the caller is behind."""


class Service:
    """A server of one of the services: a method for each of its calls, named as in `METHODS`.

    What is wrong with a call becomes a status of gRPC; nothing else happens to the server.
    """

    service: ClassVar[str]

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server needs."""
        made = {}
        for name, (takes_many, gives_many, request, answer) in METHODS[self.service].items():
            kind = f"{'stream' if takes_many else 'unary'}_{'stream' if gives_many else 'unary'}_rpc_method_handler"
            wrapped = (_many if gives_many else _one)(getattr(self, name))
            made[name] = getattr(grpc, kind)(wrapped, parser(request), serializer(answer))
        return grpc.method_handlers_generic_handler(f"adaptsfl.{self.service}", made)

    async def echo(self, requests: AsyncIterator[wire.Echo], context: Any) -> AsyncIterator[wire.Echo]:
        """Take some bytes and send as many back: what links are measured with. A message without any goes before."""
        await require(context, ("device", "edge"))
        size, incoming = 0, Incoming(ECHO_BYTES)
        async for request in requests:
            if not size and not request.chunk:
                incoming = Incoming(ECHO_BYTES)  # from here on the time counts
                continue
            incoming.add(request.chunk)
            size += len(request.chunk)
        yield wire.Echo(uplink=incoming.bps)
        for start in range(0, size, CHUNK_BYTES):
            yield wire.Echo(chunk=bytes(min(CHUNK_BYTES, size - start)))


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

    def __getattr__(self, name: str) -> Any:  # for those who check types
        raise AttributeError(name)


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str] | None:
    """Return what a caller is told of an error that it caused or must know of; None if that is a bug of ours."""
    match error:
        case BadMessage():
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        case NotNow():
            return grpc.StatusCode.FAILED_PRECONDITION, str(error)
        case NotWritten():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        case StopAsyncIteration():
            return grpc.StatusCode.INVALID_ARGUMENT, "the stream ended too early"
    return None


def _one(method: Any) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except Exception as error:
            await _abort(context, error)

    return answer


def _many(method: Any) -> Any:
    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for answer in method(request, context):
                yield answer
        except Exception as error:
            await _abort(context, error)

    return answers


async def _abort(context: Any, error: Exception) -> None:
    status = status_of(error)
    if status is None or isinstance(error, asyncio.CancelledError):
        raise error
    await context.abort(*status)
