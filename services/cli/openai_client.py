"""A small client of the OpenAI API: what `chat` and `demo` say to the gateway, over HTTP like anyone else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from shared.errors import InternalError, InvalidRequest

Messages = Sequence[Mapping[str, Any]]

#: Picture types by the bytes they begin with.
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}


class ServerSaid(InternalError):
    """The server refused or failed; the message is its own."""

    code = "server_error"


@dataclass(frozen=True)
class Piece:
    """One event of a stream: more text, and at the end the finish reason or the prompt's length."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0


class OpenAIClient:
    """Use as a context manager. Raises ServerSaid when the server answers with an error or not at all."""

    def __init__(self, url: str, timeout_s: float = 120.0) -> None:
        self._client = httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def model(self) -> str:
        """The first model served."""
        try:
            answer = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerSaid(
                f"no answer from {self._client.base_url} ({type(error).__name__}); is it up?"
            ) from None
        _raise_for(answer.status_code, answer.content)
        models = answer.json()["data"]
        if not models:
            raise ServerSaid("the server serves no model yet")
        return str(models[0]["id"])

    def stream(self, model: str, messages: Messages, **params: Any) -> Iterator[Piece]:
        """Ask and yield the answer as it comes."""
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **params,
        }
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    _raise_for(answer.status_code, answer.read())
                yield from _pieces(answer.iter_lines())
        except httpx.HTTPError as error:
            raise ServerSaid(f"the connection broke ({type(error).__name__})") from None


def user_message(text: str, image: bytes | None = None) -> dict[str, Any]:
    """One user turn, the picture (if any) before the text."""
    if image is None:
        return {"role": "user", "content": text}
    kind = next((name for magic, name in _MAGIC.items() if image.startswith(magic)), "")
    if not kind:
        raise InvalidRequest("the picture is not a PNG, JPEG, WebP or GIF file")
    url = f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def read_image(path: Path) -> bytes:
    """The bytes of a picture file. Raises InvalidRequest when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from None


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    """Server-sent events to pieces. A stream that breaks off before [DONE] is an error."""
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerSaid(str(event["error"].get("message", "unknown error")))
        usage = event.get("usage")
        if usage:
            yield Piece(prompt_tokens=int(usage["prompt_tokens"]))
        for choice in event["choices"]:
            yield Piece(choice["delta"].get("content") or "", choice["finish_reason"] or "")
    raise ServerSaid("the stream ended before its end mark")


def _raise_for(status: int, body: bytes) -> None:
    if status == httpx.codes.OK:
        return
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", errors="replace")
    raise ServerSaid(f"{status}: {message}")
