"""What nobody should send: each is refused with a typed error, the next request is answered, no leak."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from PIL import Image

from shared.errors import RequestTooLarge, TriptychError
from shared.rpc.inference import InferenceClient
from shared.types.inference import ImagePart, InferenceRequest, Message, Usage
from shared.types.request import SamplingParams
from tests.e2e.serving import Serving

pytestmark = pytest.mark.e2e

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, Any] = {"model": "witness", "prompt": "still there?", "max_tokens": 4, "temperature": 0}


class Bad(NamedTuple):
    """One request that must be refused, with what."""

    name: str
    path: str
    body: bytes
    status: int
    code: str
    headers: dict[str, str] = {}


def completion(name: str, status: int, code: str, **fields: Any) -> Bad:
    return Bad(name, COMPLETIONS, json.dumps({**GOOD, **fields}).encode(), status, code)


def chat(name: str, status: int, code: str, **fields: Any) -> Bad:
    body = {"model": "witness", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    return Bad(name, CHAT, json.dumps(body).encode(), status, code)


def image(name: str, status: int, code: str, url: str, model: str = "witness") -> Bad:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return chat(name, status, code, model=model, messages=[{"role": "user", "content": parts}])


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int, rows: bytes | None = None, note: bytes = b"") -> bytes:
    """A PNG that claims this size, whatever its rows are; ``note`` is for nobody to read."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = bytes(height * (1 + 3 * width)) if rows is None else rows
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    if note:
        body = chunk(b"IHDR", head) + chunk(b"noTe", note) + body.removeprefix(chunk(b"IHDR", head))
    return b"\x89PNG\r\n\x1a\n" + body


def gif(width: int, height: int, num_frames: int) -> bytes:
    """Many frames that differ."""
    frames = [Image.new("P", (width, height), colour) for colour in range(num_frames)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


BAD = [
    Bad("not JSON", CHAT, b"{", 400, "invalid_json"),
    Bad("no body", CHAT, b"", 400, "invalid_json"),
    Bad("a list", CHAT, b"[]", 400, "invalid_json"),
    Bad("a string", COMPLETIONS, b'"hi"', 400, "invalid_json"),
    Bad("null", COMPLETIONS, b"null", 400, "invalid_json"),
    Bad("not UTF-8", CHAT, b'{"model": "\xff"}', 400, "invalid_json"),
    Bad("NaN", COMPLETIONS, b'{"model": "witness", "prompt": "a", "temperature": NaN}', 400, "invalid_json"),
    Bad("infinite", COMPLETIONS, b'{"model": "witness", "prompt": "a", "top_p": 1e999}', 400, "invalid_json"),
    Bad("a key twice", COMPLETIONS, b'{"model": "witness", "model": "witness"}', 400, "invalid_json"),
    Bad("too deep", CHAT, b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "invalid_json"),
    Bad("lone surrogate", COMPLETIONS, rb'{"model": "witness", "prompt": "\ud800"}', 400, "invalid_json"),
    Bad("another type", CHAT, b"<x/>", 415, "unsupported_media", {"content-type": "text/xml"}),
    Bad("compressed", CHAT, b"{}", 415, "unsupported_media", {"content-encoding": "gzip"}),
    Bad("too large", CHAT, b'{"model": "' + b"x" * (33 << 20) + b'"}', 413, "request_too_large"),
    Bad("no such route", "/v1/nothing", b"{}", 404, "not_found"),
    Bad("no model", CHAT, b'{"messages": []}', 400, "invalid_value"),
    completion("unknown model", 404, "model_not_found", model="gpt-4"),
    completion("unknown field", 400, "unknown_field", temprature=1),
    completion("field not served yet", 400, "not_supported", echo=True),
    chat("tools are not served yet", 400, "not_supported", tools=[{"type": "function"}]),
    chat("no messages", 400, "invalid_value", messages=[]),
    chat("message without content", 400, "invalid_value", messages=[{"role": "user"}]),
    chat("unknown role", 400, "invalid_value", messages=[{"role": "root", "content": "hi"}]),
    chat("messages of a wrong type", 400, "invalid_value", messages="hi"),
    chat("two lengths", 400, "invalid_value", max_tokens=4, max_completion_tokens=5),
    chat("top_logprobs alone", 400, "invalid_value", top_logprobs=3),
    completion("empty prompt", 400, "invalid_value", prompt=""),
    completion("prompt of a wrong type", 400, "invalid_value", prompt={"a": 1}),
    completion("negative id", 400, "invalid_value", prompt=[1, -1]),
    completion("id outside the vocabulary", 400, "invalid_value", prompt=[260]),
    completion("placeholder id", 400, "invalid_value", prompt=[65, 259]),
    completion("prompt over the context", 400, "context_length_exceeded", prompt="a" * 3000),
    completion("prompt and answer over the context", 400, "context_length_exceeded", max_tokens=2048),
    completion("answer over the context", 400, "context_length_exceeded", max_tokens=1 << 40),
    *(
        completion(f"{field} = {value}", 400, "invalid_value", **{field: value})
        for field, values in {
            "temperature": (-0.1, 2.1, "hot", [1]),
            "top_p": (0, 1.1),
            "top_k": (-2, 0.5),
            "min_p": (-1, 1.5),
            "n": (0, 17, 1.5),
            "max_tokens": (0, -1, "many"),
            "seed": (1.5,),
            "presence_penalty": (3,),
            "frequency_penalty": (-3,),
            "repetition_penalty": (0, 3),
            "logprobs": (21, -1),
            "stop": ([""], ["a"] * 5, "x" * 300, 7),
            "stop_token_ids": ([-1], [260], [1.5]),
            "logit_bias": ({"x": 1}, {"260": 1}, {"1": 101}, [1]),
            "min_tokens": (5, -1),
            "priority": (1 << 31,),
            "cache_salt": ("", "x" * 300),
            "stream_options": ({"include_usage": True},),
        }.items()
        for value in values
    ),
    image("URL of a file", 400, "url_not_allowed", "file:///etc/passwd"),
    image("URL of this machine", 400, "url_not_allowed", "http://127.0.0.1:1/a.png"),
    image("URL of the web", 400, "url_not_allowed", "https://example.com/a.png"),
    image("data without base64", 400, "invalid_image", "data:image/png,hello"),
    image("data of bad base64", 400, "invalid_image", "data:image/png;base64,!!!"),
    image("data of text", 400, "invalid_image", "data:text/plain;base64,aGk="),
    image("SVG", 415, "unsupported_media", data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml")),
    image("SVG called PNG", 415, "unsupported_media", data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>")),
    image("PNG called JPEG", 400, "invalid_image", data_url(png(8, 8), "jpeg")),
    image("empty", 400, "invalid_image", data_url(b"")),
    image("only a signature", 400, "invalid_image", data_url(png(8, 8)[:10])),
    image("no pixels", 400, "invalid_image", data_url(png(0, 8))),
    image("bomb", 400, "image_too_large", data_url(png(50_000, 50_000, b"x"))),
    image("bomb of frames", 400, "image_too_large", data_url(gif(1000, 1000, 20), "gif")),
    image("too many bytes", 413, "request_too_large", data_url(png(8, 8) + bytes(17 << 20))),
]


async def refuse(http: httpx.AsyncClient, bad: Bad) -> None:
    """Send it, and look at the refusal."""
    headers = {"content-type": "application/json", **bad.headers}
    response = await http.post(bad.path, content=bad.body, headers=headers)
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (bad.status, bad.code), error
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 500 and "Traceback" not in error["message"]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name.replace(" ", "-")[:60])
async def test_it_is_refused_and_the_next_one_answered(witness: Serving, bad: Bad) -> None:
    async with witness.client() as http:
        await refuse(http, bad)
        good = await http.post(COMPLETIONS, json=GOOD)
        assert good.status_code == 200 and good.json()["usage"]["completion_tokens"] == 4


#: The same bounds, reached by the other front end.
BAD_RECORDS: dict[str, dict[str, Any]] = {
    "n": {"n": 17},
    "stop": {"stop": ("a",) * 5},
    "cache_salt": {"cache_salt": "x" * 257},
    "temperature": {"sampling": SamplingParams(4, temperature=3.0)},
    "messages[0].content[0]": {"prompt": None, "messages": (Message("system", (ImagePart(png(32, 32)),)),)},
    "prompt": {"prompt": "a" * 3000},
    "model": {"model": "gpt-4"},
}


@pytest.fixture
async def rpc(witness: Serving) -> AsyncIterator[InferenceClient]:
    client = InferenceClient(witness.specs[0].grpc_address)
    yield client
    await client.close()


@pytest.mark.parametrize("param", BAD_RECORDS)
async def test_grpc_refuses_the_same_and_each_is_counted_once(
    witness: Serving, rpc: InferenceClient, param: str
) -> None:
    before = witness.metrics("router").value("triptych_requests_total", outcome="invalid")
    request = InferenceRequest("witness", SamplingParams(4), prompt="hi")
    with pytest.raises(TriptychError) as refused:
        await anext(rpc.generate(msgspec.structs.replace(request, **BAD_RECORDS[param])))
    assert (refused.value.http_status < 500, refused.value.param) == (True, param)
    assert witness.metrics("router").value("triptych_requests_total", outcome="invalid") == before + 1


async def test_grpc_takes_a_picture_as_large_as_http_does_and_no_larger_request(
    rpc: InferenceClient,
) -> None:
    def ask(*pictures: bytes) -> InferenceRequest:
        parts = tuple(ImagePart(picture) for picture in pictures)
        return InferenceRequest("witness", SamplingParams(4), messages=(Message("user", parts),))

    large = png(32, 32, note=bytes(6 << 20))
    outputs = [output async for batch in rpc.generate(ask(large)) for output in batch]
    assert isinstance(outputs[-1], Usage) and outputs[-1].completion_tokens > 0
    for pictures in ((png(32, 32, note=bytes(17 << 20)),), (large,) * 6):
        with pytest.raises(RequestTooLarge):
            await anext(rpc.generate(ask(*pictures)))


#: These look like pictures from outside; what they are is seen where pixels are decoded.
NO_PICTURES = {
    "truncated": png(64, 64)[:60],
    "rows missing": png(64, 64, bytes(100)),
    "rows garbled": png(64, 64, b"\xff" * 64 * 193),
    "damaged": png(64, 64).replace(b"IDAT", b"IDAX"),
}


@pytest.mark.parametrize("name", NO_PICTURES)
async def test_a_broken_picture_is_refused_where_it_is_decoded(demo: Serving, name: str) -> None:
    async with demo.client() as http:
        url = data_url(NO_PICTURES[name])
        await refuse(http, image(name, 400, "invalid_image", url, model=demo.model))
        fine = image("fine", 200, "", data_url(png(32, 32)), model=demo.model)
        good = await http.post(CHAT, content=fine.body, headers={"content-type": "application/json"})
        assert good.status_code == 200
    assert await demo.at_rest() == {}


async def test_all_of_it_left_nothing_behind(witness: Serving) -> None:
    assert await witness.at_rest() == {}
    assert witness.metrics("router").value("triptych_requests_total", outcome="failed") == 0
