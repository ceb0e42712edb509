"""The client reads streams, and turns refusals and cut streams into errors a user can read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.cli.openai_client import OpenAIClient, Piece, ServerSaid, user_message
from shared.errors import InvalidRequest


class Server(ThreadingHTTPServer):
    """Answers every POST with ``answer`` and remembers the body."""

    daemon_threads = True
    answer: tuple[int, str] = (200, "")
    asked: dict[str, Any]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, '{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._send(*self.server.answer)

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(server: Server) -> Iterator[OpenAIClient]:
    with OpenAIClient(f"http://127.0.0.1:{server.server_address[1]}") as client:
        yield client


def event(content: str | None, finish: str | None = None) -> str:
    choice = {
        "index": 0,
        "delta": {"content": content} if content is not None else {},
        "finish_reason": finish,
    }
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


USAGE = f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 9}})}\n\n"


def test_a_stream_is_read_to_its_end(server: Server, client: OpenAIClient) -> None:
    server.answer = (
        200,
        event("") + event("Par") + event("is") + event(None, "stop") + USAGE + "data: [DONE]\n\n",
    )
    pieces = list(client.stream(client.model(), [user_message("?")], temperature=0))
    assert "".join(piece.text for piece in pieces) == "Paris"
    assert pieces[-2:] == [Piece("", "stop"), Piece(prompt_tokens=9)]
    assert server.asked["model"] == "tiny" and server.asked["temperature"] == 0


def test_a_refusal_carries_the_servers_words(server: Server, client: OpenAIClient) -> None:
    server.answer = (400, '{"error": {"message": "too long"}}')
    with pytest.raises(ServerSaid, match="400: too long"):
        list(client.stream("tiny", []))


def test_a_refusal_that_is_no_json_is_shown_too(server: Server, client: OpenAIClient) -> None:
    server.answer = (502, "bad gateway")
    with pytest.raises(ServerSaid, match="502: bad gateway"):
        list(client.stream("tiny", []))


def test_an_error_in_mid_stream_is_raised(server: Server, client: OpenAIClient) -> None:
    server.answer = (200, event("a") + 'data: {"error": {"message": "worker lost"}}\n\n')
    with pytest.raises(ServerSaid, match="worker lost"):
        list(client.stream("tiny", []))


def test_a_cut_stream_is_an_error(server: Server, client: OpenAIClient) -> None:
    server.answer = (200, event("a"))
    with pytest.raises(ServerSaid, match="before its end"):
        list(client.stream("tiny", []))


def test_nobody_listening_is_an_error(free_port: int) -> None:
    with OpenAIClient(f"http://127.0.0.1:{free_port}") as client, pytest.raises(ServerSaid, match="is it up"):
        client.model()


def test_a_picture_goes_before_the_text_as_a_data_url() -> None:
    message = user_message("what?", b"\x89PNG rest")
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_something_else_than_a_picture_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        user_message("what?", b"%PDF-1.7")
