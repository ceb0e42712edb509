"""Ways to spoil a stored record's file, each a pure function of bytes and chance.

Owns the ways. What comes out is never what went in, and none of it is the record that was stored: whoever
takes one of these for it is wrong.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import msgspec

from shared.kernels.checksum import checksum
from shared.tiering.record import ALIGNMENT, KvRecord, Record, decode_header, encode_header, header_length

#: Magic, version, bytes of the header and of the body, bytes of the payload, key.
_PREFIX = struct.Struct("<8sIIIQ32s")
_SUM = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_VERSION_AT, _HEADER_BYTES_AT, _BODY_BYTES_AT, _PAYLOAD_BYTES_AT, _KEY_AT = 8, 12, 16, 20, 28

#: Spoils ``data``; ``other`` is the file of another record of the same length.
Way = Callable[[bytes, bytes, random.Random], bytes]


def _split(data: bytes) -> tuple[bytes, bytes]:
    length = header_length(data)
    return data[:length], data[length:]


def _body_end(header: bytes) -> int:
    return int(_PREFIX.size + _PREFIX.unpack_from(header)[3])


def _flipped(data: bytes, first: int, end: int, rng: random.Random) -> bytes:
    at = rng.randrange(first, end)
    return data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]


def _sealed(header: bytes) -> bytes:
    """With a checksum that fits."""
    end = _body_end(header)
    return header[:end] + _SUM.pack(checksum(header[:end])) + header[end + _SUM.size :]


def flip_header(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return _flipped(data, 0, _body_end(data) + _SUM.size, rng)


def flip_padding(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return _flipped(data, _body_end(data) + _SUM.size, header_length(data), rng)


def flip_payload(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return _flipped(data, header_length(data), len(data), rng)


def cut(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def grown(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randint(1, 2 * ALIGNMENT))


def torn(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """The end was never written: zeros from somewhere in the payload on."""
    at = rng.randrange(header_length(data), len(data))
    kept = data[:at] + bytes(len(data) - at)
    return kept if kept != data else flip_payload(data, other, rng)


def swapped(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """The other record, whole, under this one's name."""
    return other


def mixed(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """This record's header over the other's payload."""
    return _split(data)[0] + _split(other)[1]


def other_version(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """A good file of an older or a newer format."""
    version = rng.choice((0, 2, 3, 1 << 31))
    header, payload = _split(data)
    return _sealed(_put(header, _VERSION_AT, version)) + payload


def other_fields(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """A good file of a program whose records have a field more, or one fewer."""
    header, payload = _split(data)
    fields = msgspec.msgpack.decode(header[_PREFIX.size : _body_end(header)])
    body = msgspec.msgpack.encode([*fields, 0] if rng.random() < 0.5 else fields[:-1])
    head = _put(header[: _PREFIX.size], _BODY_BYTES_AT, len(body)) + body
    return (head + _SUM.pack(checksum(head))).ljust(len(header), b"\0") + payload


def other_magic(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return _sealed(rng.randbytes(7) + b"\0" + data[8 : header_length(data)]) + _split(data)[1]


def hostile_lengths(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """The header says of itself that it is longer or shorter than it is."""
    header, payload = _split(data)
    at = rng.choice((_HEADER_BYTES_AT, _BODY_BYTES_AT))
    lengths = (0, 1, 4095, 8192, 1 << 20, (1 << 20) + 4096, (1 << 31) - 1, (1 << 32) - 1)
    return _put(header, at, rng.choice(lengths)) + payload


def other_front(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """What stands in front for a scan is not what the body says."""
    header, payload = _split(data)
    if rng.random() < 0.5:
        key = rng.randbytes(32)
        return _sealed(header[:_KEY_AT] + key + header[_KEY_AT + 32 :]) + payload
    return _sealed(_put(header, _PAYLOAD_BYTES_AT, rng.choice((0, 1, len(payload) - 1, 1 << 31)))) + payload


def _put(header: bytes, at: int, value: int) -> bytes:
    return header[:at] + _U32.pack(value) + header[at + 4 :]


def _rewritten(data: bytes, change: Callable[[Record], Record]) -> bytes:
    header, payload = _split(data)
    return encode_header(change(decode_header(header))) + payload


def foreign_identity(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """A good record of another model, revision or tokenizer under the same key."""
    field = rng.choice(("model", "revision", "tokenizer", "numerics"))

    def change(record: Record) -> Record:
        identity = msgspec.structs.replace(record.identity, **{field: "foreign"})
        return msgspec.structs.replace(record, identity=identity)

    return _rewritten(data, change)


def foreign_tokens(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """A good record whose block has the same hash, and other tokens."""

    def change(record: Record) -> Record:
        tokens = list(_kv(record).token_ids)
        tokens[rng.randrange(len(tokens))] += 1
        content = msgspec.structs.replace(_kv(record), token_ids=tuple(tokens))
        return msgspec.structs.replace(record, content=content)

    return _rewritten(data, change)


def foreign_hash(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """A good record of a block that nobody asked for."""

    def change(record: Record) -> Record:
        content = msgspec.structs.replace(_kv(record), block_hash=rng.randbytes(32))
        return msgspec.structs.replace(record, content=content)

    return _rewritten(data, change)


def foreign_layout(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """As many bytes, which lie otherwise."""

    def change(record: Record) -> Record:
        if record.layout is None:
            raise ValueError("the record of a block has a layout")
        layout = msgspec.structs.replace(record.layout, extent_order="other")
        return msgspec.structs.replace(record, layout=layout)

    return _rewritten(data, change)


def foreign_sums(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """A header that is in order, but for the checksums of its bytes."""
    return _rewritten(data, lambda r: msgspec.structs.replace(r, checksums=tuple(c ^ 1 for c in r.checksums)))


def _kv(record: Record) -> KvRecord:
    if not isinstance(record.content, KvRecord):
        raise ValueError("not the record of a block")
    return record.content


WAYS: tuple[Way, ...] = (
    flip_header,
    flip_padding,
    flip_payload,
    cut,
    grown,
    torn,
    swapped,
    mixed,
    other_version,
    other_fields,
    other_magic,
    hostile_lengths,
    other_front,
    foreign_identity,
    foreign_tokens,
    foreign_hash,
    foreign_layout,
    foreign_sums,
)
#: Those that leave the header, and so what a directory's scan sees, in order.
BEHIND_THE_HEADER: tuple[Way, ...] = (flip_payload, torn, mixed)


def spoiled(ways: tuple[Way, ...], data: bytes, other: bytes, rng: random.Random) -> bytes:
    """``data`` spoiled one way. Never as it was."""
    while (found := rng.choice(ways)(data, other, rng)) == data:
        pass
    return found
