"""Both ends of a worker's stream over a real connection."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from shared.errors import InvalidRequest, PermissionDenied, RequestTooLarge, WorkerLost
from shared.rpc import worker_stream
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.convert_worker import command_to_wire
from shared.rpc.server import RpcServer
from shared.rpc.worker_client import WorkerClient
from shared.rpc.worker_stream import WorkerServicer
from shared.types.worker import (
    PREFILL,
    Abort,
    Drain,
    Failed,
    KvEvents,
    Released,
    Renew,
    Start,
    Status,
    Tokens,
)
from tests.unit.rpc.samples import INFO, EchoWorker, collect, request, serving
from triptych.v1 import worker_pb2 as pb
from triptych.v1 import worker_pb2_grpc


@asynccontextmanager
async def attached(
    worker: EchoWorker, *, router_id: str = "router", epoch: int = 1
) -> AsyncIterator[WorkerClient]:
    async with serving(WorkerServicer(worker)) as address:
        client = WorkerClient(address, router_id, epoch)
        assert await client.connect() == INFO
        try:
            yield client
        finally:
            await client.close()


async def test_commands_arrive_in_order() -> None:
    worker = EchoWorker()
    async with attached(worker) as client:
        sent = [Start(request("a"), PREFILL), Abort("a"), Renew(("h",)), Drain()]
        client.send(*sent[:3])
        client.send(sent[3])
        await worker.until(lambda: len(worker.commands) == 4)
    assert worker.commands == sent


async def test_commands_queued_before_close_still_leave() -> None:
    worker = EchoWorker()
    async with attached(worker) as client:
        client.send(Abort("last"))
    await worker.until(lambda: bool(worker.commands))
    assert worker.commands == [Abort("last")]


async def test_events_of_another_thread_arrive_complete_and_in_order() -> None:
    worker = EchoWorker()
    async with attached(worker) as client:
        steps = [[Tokens(f"r{row}", 0, step, (step,)) for row in range(8)] for step in range(500)]

        def engine() -> None:
            for step in steps:
                worker.emit(*step)

        thread = threading.Thread(target=engine)
        thread.start()
        got = await collect(client.events(), 8 * 500)
        thread.join()
    assert got == [event for step in steps for event in step]


async def test_what_is_queued_travels_in_one_message() -> None:
    worker = EchoWorker()
    async with attached(worker) as client:
        for step in range(100):
            worker.emit(Tokens("r", 0, step, (step,)))
        async with asyncio.timeout(10):
            batch = await anext(client.events())
    assert len(batch) == 100


async def test_a_backlog_larger_than_a_message_is_split() -> None:
    worker = EchoWorker()
    stored = tuple(i.to_bytes(32, "big") for i in range(20_000))
    async with attached(worker) as client:
        sent = [KvEvents(sequence, stored) for sequence in range(10)]
        worker.emit(*sent)
        assert await collect(client.events(), 10) == sent


async def test_commands_larger_than_a_message_together_are_split() -> None:
    worker = EchoWorker()
    async with attached(worker) as client:
        sent = [Start(request(f"r{i}", 200_000), PREFILL) for i in range(12)]
        client.send(*sent)
        await worker.until(lambda: len(worker.commands) == 12)
    assert worker.commands == sent


async def test_a_command_that_fits_no_message_is_refused_at_once_and_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = EchoWorker()
    monkeypatch.setattr("shared.rpc.worker_client._MAX_COMMAND_BYTES", 1000)
    async with attached(worker) as client:
        with pytest.raises(RequestTooLarge):
            client.send(Abort("a"), Start(request("b", 2000), PREFILL))
        client.send(Abort("c"))
        await worker.until(lambda: bool(worker.commands))
    assert worker.commands == [Abort("c")]


async def test_a_worker_that_emits_nothing_still_says_that_it_lives() -> None:
    worker = EchoWorker()
    async with serving(WorkerServicer(worker, heartbeat_s=0.01)) as address:
        client = WorkerClient(address, "router", 1)
        await client.connect()
        try:
            assert set(await collect(client.events(), 3)) == {Status(worker.status())}
        finally:
            await client.close()


async def test_the_end_of_the_server_is_a_lost_worker() -> None:
    worker = EchoWorker()
    server = RpcServer()
    WorkerServicer(worker).add_to(server.server)
    client = WorkerClient(f"127.0.0.1:{await server.start()}", "router", 1)
    await client.connect()
    worker.emit(Released("r"))
    events = client.events()
    assert await collect(events, 1) == [Released("r")]
    await server.stop()
    with pytest.raises(WorkerLost):
        await collect(events, 1)
    client.send(Abort("goes nowhere"))
    await client.close()


async def test_close_ends_the_reader_without_an_error() -> None:
    worker = EchoWorker()
    async with attached(worker) as client:

        async def read() -> list[object]:
            return [event async for batch in client.events() for event in batch]

        reader = asyncio.create_task(read())
        worker.emit(Released("r"))
        await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(10):
            assert set(await reader) <= {Released("r")}
        await worker.until(lambda: worker.left == ["router"])
    assert worker.subscribers == []


async def test_nobody_there_is_a_lost_worker(free_port: int) -> None:
    client = WorkerClient(f"127.0.0.1:{free_port}", "router", 1)
    with pytest.raises(WorkerLost):
        await client.connect()
    await client.close()


async def test_a_silent_peer_is_a_lost_worker() -> None:
    """A peer that is connected to and never speaks HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = WorkerClient(f"127.0.0.1:{listening.getsockname()[1]}", "router", 1)
        with pytest.raises(WorkerLost):
            await client.connect(timeout_s=0.2)
        await client.close()


async def test_a_later_stream_of_the_same_router_replaces_the_earlier() -> None:
    worker = EchoWorker()
    async with serving(WorkerServicer(worker)) as address:
        old, new = WorkerClient(address, "router", 1), WorkerClient(address, "router", 2)
        await old.connect()
        await new.connect()
        with pytest.raises(WorkerLost):
            await collect(old.events(), 1)
        new.send(Abort("r"))
        worker.emit(Released("r"))
        assert await collect(new.events(), 1) == [Released("r")]
        assert worker.left == []
        await old.close()
        await new.close()
        await worker.until(lambda: worker.left == ["router"])


async def test_an_earlier_epoch_of_the_same_router_is_refused() -> None:
    worker = EchoWorker()
    async with serving(WorkerServicer(worker)) as address:
        new, old = WorkerClient(address, "router", 2), WorkerClient(address, "router", 1)
        await new.connect()
        with pytest.raises(PermissionDenied) as refused:
            await old.connect()
        assert refused.value.code == "stale_epoch"
        worker.emit(Released("r"))
        assert await collect(new.events(), 1) == [Released("r")]
        await old.close()
        await new.close()


async def test_two_routers_are_served_side_by_side() -> None:
    worker = EchoWorker()
    async with serving(WorkerServicer(worker)) as address:
        clients = [WorkerClient(address, router_id, 1) for router_id in ("a", "b")]
        for client in clients:
            await client.connect()
        worker.emit(Released("r"))
        for client in clients:
            assert await collect(client.events(), 1) == [Released("r")]
            await client.close()
        await worker.until(lambda: sorted(worker.left) == ["a", "b"])


@asynccontextmanager
async def raw_stream(
    address: str, *messages: pb.WorkerStreamRequest
) -> AsyncIterator[grpc.aio.StreamStreamCall[pb.WorkerStreamRequest, pb.WorkerStreamResponse]]:
    """A stream spoken by hand."""
    async with open_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).WorkerStream()
        for message in messages:
            await call.write(message)
        yield call
        call.cancel()


HELLO = pb.WorkerStreamRequest(hello=pb.RouterHello(router_id="router", epoch=1))


@pytest.mark.parametrize(
    "first",
    [
        pb.WorkerStreamRequest(),
        pb.WorkerStreamRequest(hello=pb.RouterHello()),
        pb.WorkerStreamRequest(hello=pb.RouterHello(router_id="x" * 1000)),
        pb.WorkerStreamRequest(commands=[command_to_wire(Drain())]),
    ],
)
async def test_a_stream_without_hello_is_refused(first: pb.WorkerStreamRequest) -> None:
    worker = EchoWorker()
    async with serving(WorkerServicer(worker)) as address, raw_stream(address, first) as call:
        with pytest.raises(InvalidRequest), typed_errors():
            await call.read()
    assert worker.commands == []
    assert worker.subscribers == []


async def test_a_malformed_command_fails_its_request_alone() -> None:
    worker = EchoWorker()
    unsound = command_to_wire(Start(request("bad"), PREFILL))
    unsound.start.request.ClearField("choices")
    message = pb.WorkerStreamRequest(commands=[unsound, command_to_wire(Abort("good"))])
    async with serving(WorkerServicer(worker)) as address, raw_stream(address, HELLO, message) as call:
        await call.read()
        answer = await call.read()
        await worker.until(lambda: bool(worker.commands))
    assert worker.commands == [Abort("good")]
    assert answer.events[0].failed.request_id == "bad"
    assert answer.events[0].failed.code == "invalid_value"
    assert not answer.events[0].failed.retryable


async def test_a_malformed_command_of_no_request_ends_the_stream() -> None:
    worker = EchoWorker()
    message = pb.WorkerStreamRequest(commands=[pb.Command(renew=pb.Renew(handoff_ids=[""]))])
    async with serving(WorkerServicer(worker)) as address, raw_stream(address, HELLO, message) as call:
        await call.read()
        with pytest.raises(InvalidRequest), typed_errors():
            await call.read()
        await worker.until(lambda: worker.left == ["router"])


async def test_a_router_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_stream, "MAX_PENDING_EVENTS", 1000)
    worker = EchoWorker()
    async with attached(worker) as client:
        worker.emit(*[Failed("r", "c", "m", False)] * 1001)
        worker.emit(Released("r"))
        with pytest.raises(WorkerLost):
            await collect(client.events(), 1)


async def test_status_is_told_outside_the_stream() -> None:
    worker = EchoWorker()
    async with attached(worker) as client:
        told, status = await client.status()
    assert told == INFO
    assert status == worker.status()


async def test_a_vanished_router_is_detached_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    worker = EchoWorker()
    async with serving(WorkerServicer(worker)) as address:
        client = WorkerClient(address, "router", 1)
        await client.connect()
        await client._channel.close(None)  # no goodbye on the stream
        await worker.until(lambda: worker.left == ["router"])
        worker.emit(Released("r"))
        await client.close()
    assert worker.subscribers == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_events_after_the_loop_has_closed_are_dropped() -> None:
    """An engine may outlive the event loop by a few steps."""
    loop = asyncio.new_event_loop()

    async def make() -> worker_stream._Outbox:
        return worker_stream._Outbox("router", 1)

    outbox = await asyncio.to_thread(loop.run_until_complete, make())
    loop.close()
    outbox.put([Released("r")])
    outbox.put([Released("r")])
    assert outbox.closed
