"""What all gRPC clients share: channel options and typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from shared.rpc.server import MAX_MESSAGE_BYTES
from shared.rpc.status import error_of


def open_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel of its own connection to ``address`` ("host:port"); connects on first use.

    A vanished peer is noticed within 15 s by keepalive. After a refused connection it is tried again
    within a second at most, since workers restart under the same address.
    """
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            # Channels of one process to one address do not share a connection or its backoff.
            ("grpc.use_local_subchannel_pool", 1),
            # Addresses are those of the deployment itself: never through a proxy of the environment.
            ("grpc.enable_http_proxy", 0),
        ],
    )


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raises what the peer raised (a TriptychError) in place of gRPC's own error."""
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure) from None
