"""A gRPC server with the house's rules: typed errors, message caps, health, graceful stop.

Owns everything that all servicers share; knows none of them.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from shared.errors import ConfigError, InternalError, InvalidRequest, RequestTooLarge, TriptychError
from shared.rpc.status import status_of
from shared.telemetry.logs import get_logger

MAX_MESSAGE_BYTES = 4 << 20
#: gRPC itself refuses what is over this many times the cap, with no error of ours; up to there we do.
_HARD_CAP = 2
_OWN_METHODS = "/triptych."
_INTERNAL = InternalError("internal error")

log = get_logger(__name__)


class RpcServer:
    """One listening server. Add servicers, ``start``, later ``stop``; all on the event loop. A message over
    ``max_message_bytes`` is refused with RequestTooLarge."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._host = host
        self._port = port
        self._health = HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor(max_message_bytes)],
            options=[
                ("grpc.max_receive_message_length", _HARD_CAP * max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                # Two servers on one port would share its connections silently.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def server(self) -> grpc.aio.Server:
        """For the generated ``add_..._to_server`` functions, before ``start``."""
        return self._server

    async def start(self) -> int:
        """Listen; returns the port. Raises ConfigError when it is taken."""
        try:
            port = self._server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError:
            raise ConfigError(f"cannot listen on port {self._port}") from None
        await self._server.start()
        return port

    async def set_serving(self, serving: bool, service: str = "") -> None:
        """What the standard health service says; ``service`` empty = the whole process."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, give running ones ``grace_s``, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Turns what a servicer raises into a status: a TriptychError into its own, everything else into
    INTERNAL with a constant message and a log line. Malformed bytes are an InvalidRequest, too many a
    RequestTooLarge.

    Stream answers must be async generators; they are closed at once when the call ends.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OWN_METHODS):
            return handler
        return _guarded(handler, method, self._max_message_bytes)


def _guarded(handler: Any, method: str, max_bytes: int) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler; bytes are parsed inside it, where a failure can be typed."""
    inner = getattr(handler, _KIND[handler.request_streaming, handler.response_streaming])

    def parse(raw: bytes) -> Any:
        if len(raw) > max_bytes:
            raise RequestTooLarge(f"a message may have at most {max_bytes} bytes")
        try:
            return handler.request_deserializer(raw)
        except DecodeError:
            raise InvalidRequest("the message is malformed") from None

    async def parse_all(raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in raws:
            yield parse(raw)

    parsed = parse_all if handler.request_streaming else parse

    async def single(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(parsed(raw), context)
        except Exception as error:
            await _abort(context, error, method)

    async def stream(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async with aclosing(inner(parsed(raw), context)) as answers:
                async for answer in answers:
                    yield answer
        except Exception as error:
            await _abort(context, error, method)

    make = getattr(grpc, f"{_KIND[handler.request_streaming, handler.response_streaming]}_rpc_method_handler")
    if handler.response_streaming and not inspect.isasyncgenfunction(inner):
        raise TypeError(f"{method} must be an async generator")
    made: grpc.RpcMethodHandler[Any, Any] = make(
        stream if handler.response_streaming else single,
        request_deserializer=None,
        response_serializer=handler.response_serializer,
    )
    return made


_KIND = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, TriptychError):
        log.exception("unexpected error in a servicer", method=method)
        error = _INTERNAL
    code, details, metadata = status_of(error)
    await context.abort(code, details, metadata)
