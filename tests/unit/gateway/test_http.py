"""The gateway as plain sockets see it: bad input, headers, disconnects."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from services.router.gateway import routes_openai
from services.router.gateway.body import HEAVY_BYTES
from shared.api.openai import ApiCall, CallLabels, parse_completion
from shared.api.strict_json import parse_object
from shared.errors import WorkerLost
from shared.types.inference import ModelCard
from tests.unit.gateway.scripted import ScriptedService
from tests.unit.gateway.wire import CHAT, Address, exchange, get, post


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xef\xbb\xbf{}",
        b"{}",
        b"[" * 10_000,
        b'{"model":"tiny","model":"tiny"}',
        b'{"model":"tiny","messages":[]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"n":0}',
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"foo":1}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    ],
)
async def test_bad_bodies_get_a_typed_400_and_the_next_is_answered(
    address: Address, service: ScriptedService, body: bytes
) -> None:
    reply = await exchange(address, post(body))
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert service.requests == []
    assert (await exchange(address, post(json.dumps(CHAT).encode()))).status == 200


@pytest.mark.parametrize(("size", "is_aside"), [(1, False), (HEAVY_BYTES, True)])
async def test_large_bodies_are_parsed_off_the_event_loop(
    address: Address, monkeypatch: pytest.MonkeyPatch, size: int, is_aside: bool
) -> None:
    """Whoever else is served does not wait for it."""
    threads = []

    def form(fields: dict[str, Any], card: ModelCard, labels: CallLabels) -> ApiCall:
        threads.append(threading.current_thread())
        return parse_completion(fields, card, labels)

    def whole(body: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return parse_object(body)

    monkeypatch.setattr(routes_openai, "parse_completion", form)
    monkeypatch.setattr(routes_openai, "parse_object", whole)
    body = json.dumps({"model": "tiny", "prompt": "x" * size}).encode()
    assert (await exchange(address, post(body, "/v1/completions"))).status == 200
    assert [thread is not threading.current_thread() for thread in threads] == [is_aside] * 2


@pytest.mark.parametrize(
    ("url", "status", "code"),
    [
        ("https://169.254.169.254/x", 400, "url_not_allowed"),
        ("file:///etc/passwd", 400, "url_not_allowed"),
        ("data:image/png;base64,!!!!", 400, "invalid_image"),
        ("data:image/png;base64,iVBORw0KGgo=", 400, "invalid_image"),
        ("data:image/svg+xml;base64,PHN2Zy8+", 415, "unsupported_media"),
        ("data:image/png;base64,PHN2Zy8+", 415, "unsupported_media"),
    ],
)
async def test_bad_pictures(address: Address, url: str, status: int, code: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]}).encode()
    reply = await exchange(address, post(body))
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.error["param"] == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Type: text/plain",),
        ("Content-Type:",),
        ("Content-Type: application/json; charset=utf-16",),
        ("Content-Encoding: gzip",),
    ],
)
async def test_other_media_types_are_415(address: Address, headers: tuple[str, ...]) -> None:
    reply = await exchange(address, post(b"{}", "/v1/completions", *headers))
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media")
    utf8 = post(
        json.dumps(CHAT).encode(), "/v1/chat/completions", 'Content-Type: application/json; Charset="UTF-8"'
    )
    assert (await exchange(address, utf8)).status == 200


async def test_a_body_over_the_cap_is_413_declared_or_counted(address: Address) -> None:
    declared = await exchange(address, post(b"{", length=1 << 40))
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    counted = await exchange(address, post(chunk * 3, "/v1/completions", "Transfer-Encoding: chunked"))
    for reply in (declared, counted):
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert reply.headers["connection"] == "close"


async def test_a_client_that_writes_on_still_hears_the_refusal(address: Address) -> None:
    """More than the sockets between hold, so that the client is still writing when it is refused."""
    body = b"x" * (24 << 20)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(post(body))
    await asyncio.wait_for(writer.drain(), 10)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_a_slow_body_is_408(address: Address) -> None:
    reply = await exchange(address, post(b"{", length=100))
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (get("/"), 404, "not_found"),
        (get("/docs"), 404, "not_found"),
        (get("/openapi.json"), 404, "not_found"),
        (get("/metrics"), 404, "not_found"),
        (get("/v1/models/"), 404, "model_not_found"),
        (get("/v1/models/..%2f..%2fetc%2fpasswd"), 404, "model_not_found"),
        (get("/v1/models/%00"), 404, "model_not_found"),
        (get("/health/"), 404, "not_found"),
        (get("/v1/chat/completions"), 405, "method_not_allowed"),
        (post(b"{}", "/v1/models"), 405, "method_not_allowed"),
        (get("/" + "a" * 100_000), 414, "uri_too_long"),
        (get("/" + "a" * 9_000), 414, "uri_too_long"),
        (b"nonsense\r\n\r\n", 400, "invalid_request"),
        (get("/health", "Transfer-Encoding: chunked", "Content-Length: 5"), 400, "invalid_request"),
        (post(b"zz\r\n", "/v1/completions", "Transfer-Encoding: chunked"), 400, "invalid_request"),
        (get("/health", "X-A: " + "a" * 100_000), 431, "headers_too_large"),
        (get("/health", *(f"X-{i}: 1" for i in range(200))), 431, "headers_too_large"),
    ],
)
async def test_http_errors_have_the_same_form(address: Address, data: bytes, status: int, code: str) -> None:
    reply = await exchange(address, data)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/v1/models/tiny"])
async def test_what_can_be_read_has_a_head(address: Address, path: str) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(get(path, "Connection: close").replace(b"GET", b"HEAD", 1))
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"content-type: application/json" in head
    assert rest == b""
    writer.close()


async def test_an_unknown_model_is_told_which_are_served(address: Address) -> None:
    body = json.dumps(CHAT | {"model": "SECRET"}).encode()
    for data in (post(body), get("/v1/models/SECRET"), get("/v1/models/")):
        reply = await exchange(address, data)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert "group/blind, tiny" in reply.error["message"]
        assert "SECRET" not in reply.error["message"]


async def test_health_and_version(address: Address, service: ScriptedService) -> None:
    assert (await exchange(address, get("/health"))).status == 200
    service.is_ready = False
    reply = await exchange(address, get("/health"))
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert json.loads((await exchange(address, get("/version"))).body)["version"]


async def test_the_request_id_is_echoed_or_given(address: Address, service: ScriptedService) -> None:
    body = json.dumps(CHAT).encode()
    mine = await exchange(address, post(body, "/v1/chat/completions", "X-Request-Id: abc-1"))
    assert mine.headers["x-request-id"] == service.requests[-1].label == "abc-1"
    for odd in ("", 'a"b', "x" * 200):
        given = await exchange(address, post(body, "/v1/chat/completions", f"X-Request-Id: {odd}"))
        assert len(given.headers["x-request-id"]) == 32
        assert service.requests[-1].label == given.headers["x-request-id"]
    assert "x-request-id" in (await exchange(address, get("/nothing"))).headers


async def test_a_trace_context_is_passed_on_when_well_formed(
    address: Address, service: ScriptedService
) -> None:
    body, parent = json.dumps(CHAT).encode(), f"00-{'a' * 32}-{'b' * 16}-01"
    for value in (parent, "00-zz"):
        await exchange(address, post(body, "/v1/chat/completions", f"traceparent: {value}"))
    assert [request.traceparent for request in service.requests] == [parent, ""]


async def open_stream(address: Address, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    body = json.dumps(CHAT | {"stream": True} | fields).encode()
    writer.write(post(body, "/v1/chat/completions", "X-Request-Id: mine", "Connection: close"))
    return reader, writer


async def test_a_stream_is_one_write_a_batch(address: Address) -> None:
    reader, writer = await open_stream(address, n=3)
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head
    chunks = []
    while not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    # The first carries the role events too; then the words, the closing batch, and the end.
    assert [chunk.count(b"data: ") for chunk in chunks] == [6, 3, 3, 3, 3, 3, 1]
    assert chunks[-1] == b"data: [DONE]\n\n"
    writer.close()


async def test_a_broken_stream_ends_without_done(address: Address, service: ScriptedService) -> None:
    service.fail_at = (3, WorkerLost("a worker was lost"))
    reader, writer = await open_stream(address)
    data = await reader.read()
    assert b'data: {"error":{' in data
    assert b"[DONE]" not in data
    assert data.endswith(b"0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_the_request(
    address: Address, service: ScriptedService, stream: bool
) -> None:
    service.hold = asyncio.Event()
    reader, writer = await open_stream(address, stream=stream)
    if stream:
        await reader.readuntil(b"Hello")
    else:
        await service.began.wait()
    writer.close()
    assert await asyncio.wait_for(service.aborted.get(), 10) == "mine"


async def test_a_client_that_does_not_read_is_given_up(address: Address, service: ScriptedService) -> None:
    service.filler = "x" * 100_000
    _, writer = await open_stream(address)
    assert await asyncio.wait_for(service.aborted.get(), 10) == "mine"
    writer.close()


async def test_a_slow_answer_is_not_given_up(address: Address, service: ScriptedService) -> None:
    service.hold = asyncio.Event()
    reader, writer = await open_stream(address)
    await reader.readuntil(b"Hello")
    await asyncio.sleep(0.25)  # more than two stall periods in which there is nothing to write
    service.hold.set()
    assert (await reader.read()).endswith(b"0\r\n\r\n")
    assert service.aborted.empty()
    writer.close()
