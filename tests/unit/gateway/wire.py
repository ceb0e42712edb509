"""Raw HTTP over plain sockets: requests as bytes, replies taken apart."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

Address = tuple[str, int]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.body)["error"]
        assert set(fields) == {"message", "type", "param", "code"}
        assert isinstance(fields["code"], str)
        return fields


async def exchange(address: Address, data: bytes) -> Reply:
    """Send raw bytes and read one reply."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    reply = await read_reply(reader)
    writer.close()
    return reply


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """One reply to its end, which its length says, if it says one."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = headers.get("content-length")
    body = await reader.readexactly(int(length)) if length is not None else b""
    return Reply(int(status.split()[1]), headers, body)


def post(body: bytes, path: str = "/v1/chat/completions", *headers: str, length: int | None = None) -> bytes:
    given = {line.split(":")[0].lower() for line in headers}
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    if "content-type" not in given:
        lines.append("Content-Type: application/json")
    if "transfer-encoding" not in given:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()
