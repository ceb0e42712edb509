"""One stored record, the same in every tier: a header that says whose bytes these are, then the bytes.

Owns the format, the keys and the verification; not where records lie. All numbers little-endian:

    magic 8s | version u32 | header bytes u32 | body bytes u32 | payload bytes u64 | key 32s
    | body | xxh3_64 u64 | zeros | payload

*header bytes* is a multiple of 4096 and counts everything before the payload; the checksum covers
all before it. Key and payload bytes follow from the body; they are in front so that a scan need not
read that. The body is a MessagePack array (every field length-prefixed) of ``Record``. The payload
is a block's extent or packed embedding rows, as they are; the checksums in the record are the
producer's own, taken once from its memory and never recomputed from a copy.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable

import msgspec
from msgspec import Struct

from shared.kernels.checksum import ALGORITHMS, Buffer, checksum, head_checksums
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import ITEM_BYTES
from shared.types.store import BlockKey

MAGIC = b"TRPRECRD"
VERSION = 1
#: Headers are padded to a multiple of this, so that the payload can go to disk by direct I/O.
ALIGNMENT = 4096
MAX_HEADER_BYTES = 1 << 20
#: Every reason a CorruptRecord may have.
REASONS = ("magic", "version", "length", "checksum", "identity", "key", "payload")

_PREFIX = struct.Struct("<8sIIIQ32s")
_SUM = struct.Struct("<Q")
_U64 = struct.Struct("<Q")


class CorruptRecord(Exception):
    """A record that may not be used. ``reason`` is one of ``REASONS``: ``identity`` and ``key`` say that an
    intact record is not the one that was asked for, the others that it is broken or of another version.

    It never crosses a process's border: whoever loads makes it a miss.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"a stored record does not verify: {reason}")
        self.reason = reason


class KvRecord(Struct, frozen=True, tag="kv", array_like=True, forbid_unknown_fields=True):
    """A full block, with all that its hash stands for."""

    group: int
    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    media: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, key: BlockKey) -> KvRecord:
        return cls(key.group, key.block_hash, key.parent, key.token_ids, key.media)


class EmbeddingRecord(Struct, frozen=True, tag="embedding", array_like=True, forbid_unknown_fields=True):
    """One media item's embeddings. ``salt_digest`` is the SHA-256 of the tenant's salt: the salt itself is
    never written down."""

    media_hash: bytes
    decode_options: str
    processor_version: str
    salt_digest: bytes
    num_rows: int
    row_bytes: int
    dtype: str


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A decoded header. ``layout`` is None for embeddings; ``checksums`` has one entry a kv_head, or one
    for all rows."""

    identity: IdentityKey
    layout: LayoutSpec | None
    content: KvRecord | EmbeddingRecord
    checksums: tuple[int, ...]
    payload_bytes: int

    @property
    def key(self) -> bytes:
        """The key under which this record is stored."""
        content = self.content
        if isinstance(content, EmbeddingRecord):
            return _embedding_key(self.identity, content)
        if self.layout is None:
            raise CorruptRecord("key")
        return record_key("kv", self.layout, content.group, content.block_hash)


#: ``verify_payload``, or ``believe_payload``.
PayloadCheck = Callable[[Record, memoryview], None]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def record_key(kind: str, layout: LayoutSpec, group: int, block_hash: bytes) -> bytes:
    """SHA-256 (32 bytes) over length-prefixed fields: what the bytes are and how they lie. The identity
    is inside ``block_hash``. Wire versions say nothing about bytes and are left out."""
    return _digest(b"record-key-v1", kind.encode(), b"%d" % group, block_hash, _layout_digest(layout))


@functools.lru_cache(maxsize=64)
def _layout_digest(layout: LayoutSpec) -> bytes:
    fields: list[object] = [layout.block_size, layout.tp_size, layout.head_start]
    fields += [layout.extent_order, layout.checksum]
    for spec in layout.groups:
        fields += [spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.window]
    return _digest(*(str(field).encode() for field in fields))


def embedding_record(
    media_hash: bytes,
    num_rows: int,
    row_bytes: int,
    dtype: str,
    *,
    decode_options: str = "",
    processor_version: str = "",
    salt: str = "",
) -> EmbeddingRecord:
    """The content of an embedding's record; ``media_hash`` in full width."""
    salt_digest = hashlib.sha256(salt.encode()).digest()
    return EmbeddingRecord(
        media_hash, decode_options, processor_version, salt_digest, num_rows, row_bytes, dtype
    )


def embedding_key(
    identity: IdentityKey,
    media_hash: bytes,
    *,
    decode_options: str = "",
    processor_version: str = "",
    salt: str = "",
) -> bytes:
    """The key (32 bytes) of a media item's embeddings: SHA-256 over whatever decides them, each field
    length-prefixed and in full width. The shape follows from these and is left out."""
    content = embedding_record(
        media_hash,
        num_rows=0,
        row_bytes=0,
        dtype="",
        decode_options=decode_options,
        processor_version=processor_version,
        salt=salt,
    )
    return _embedding_key(identity, content)


def encode_header(record: Record) -> bytes:
    """The header of a record. Raises ValueError when the record is not consistent with itself."""
    if not _is_consistent(record):
        raise ValueError("payload, checksums and layout of the record do not fit together")
    body = _encoder.encode(record)
    used = _PREFIX.size + len(body) + _SUM.size
    header_bytes = -(-used // ALIGNMENT) * ALIGNMENT
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError("the record's header is too long")
    lengths = (header_bytes, len(body), record.payload_bytes)
    head = _PREFIX.pack(MAGIC, VERSION, *lengths, record.key) + body
    return (head + _SUM.pack(checksum(head))).ljust(header_bytes, b"\0")


def header_length(start: Buffer) -> int:
    """Length of the header that begins with ``start`` (64 bytes or more). Raises CorruptRecord."""
    if len(start) < _PREFIX.size:
        raise CorruptRecord("length")
    magic, version, header_bytes, body_bytes, _, _ = _PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise CorruptRecord("magic")
    if version != VERSION:
        raise CorruptRecord("version")
    needed = _PREFIX.size + body_bytes + _SUM.size
    if header_bytes % ALIGNMENT or not needed <= header_bytes <= MAX_HEADER_BYTES:
        raise CorruptRecord("length")
    return int(header_bytes)


def check_header(header: bytes) -> tuple[bytes, int]:
    """Key and payload bytes of a whole header, every byte of it intact; what it says besides is for
    ``decode_header`` to judge. Raises CorruptRecord."""
    if header_length(header) != len(header):
        raise CorruptRecord("length")
    _, _, _, body_bytes, payload_bytes, key = _PREFIX.unpack_from(header)
    end = _PREFIX.size + body_bytes
    if _SUM.unpack_from(header, end)[0] != checksum(memoryview(header)[:end]):
        raise CorruptRecord("checksum")
    if header.count(0, end + _SUM.size) != len(header) - end - _SUM.size:
        raise CorruptRecord("checksum")
    return key, payload_bytes


def decode_header(header: Buffer) -> Record:
    """The record of a whole header, every byte of it checked. Raises CorruptRecord and nothing else."""
    data = bytes(header)
    key, payload_bytes = check_header(data)
    end = _PREFIX.size + _PREFIX.unpack_from(data)[3]
    body = data[_PREFIX.size : end]
    try:
        record = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:  # intact, but of another program
        raise CorruptRecord("version") from err
    # A field that this build does not know, or misses, must not silently be taken for its default.
    if _encoder.encode(record) != body:
        raise CorruptRecord("version")
    if not _is_consistent(record) or record.payload_bytes != payload_bytes:
        raise CorruptRecord("length")
    if record.key != key:
        raise CorruptRecord("key")
    return record


def verify_payload(record: Record, payload: memoryview) -> None:
    """Whether ``payload`` is what this record's producer had. Raises CorruptRecord."""
    if payload.nbytes != record.payload_bytes:
        raise CorruptRecord("length")
    if head_checksums(payload, len(record.checksums)) != record.checksums:
        raise CorruptRecord("payload")


def believe_payload(record: Record, payload: memoryview) -> None:
    """In place of ``verify_payload``: takes any bytes for what the producer had. For tests alone, which prove
    with it what the checksums are worth."""


def verify(
    record: Record,
    payload: memoryview,
    content: KvRecord | EmbeddingRecord,
    identity: IdentityKey,
    layout: LayoutSpec | None,
    check_payload: PayloadCheck = verify_payload,
) -> None:
    """Whether ``record`` is exactly what was asked for, and ``payload`` what its producer had. For
    embeddings the shape (rows, row bytes, dtype) is compared too. Raises CorruptRecord."""
    if record.identity != identity or not _same_bytes(record.layout, layout):
        raise CorruptRecord("identity")
    if record.content != content:
        raise CorruptRecord("key")
    check_payload(record, payload)


def _is_consistent(record: Record) -> bool:
    """Whether lengths and counts follow from each other. Every producer's record is; one that is not
    would say something about bytes that it does not have."""
    content, layout = record.content, record.layout
    if isinstance(content, EmbeddingRecord):
        return (
            layout is None
            and content.num_rows > 0
            and content.row_bytes > 0
            and len(record.checksums) == 1
            and record.payload_bytes == content.num_rows * content.row_bytes
        )
    if layout is None or not 0 <= content.group < len(layout.groups) or layout.checksum not in ALGORITHMS:
        return False
    spec = layout.groups[content.group]
    return (
        spec.dtype in ITEM_BYTES
        and record.payload_bytes > 0
        and len(content.token_ids) == layout.block_size
        and len(record.checksums) == spec.num_kv_heads
        and record.payload_bytes == spec.extent_bytes(layout.block_size)
    )


def _same_bytes(one: LayoutSpec | None, other: LayoutSpec | None) -> bool:
    """Whether extents of the two layouts lie alike; the wire they were sent over does not matter."""
    if one is None or other is None:
        return one is other
    return one == msgspec.structs.replace(other, wire_versions=one.wire_versions)


def _embedding_key(identity: IdentityKey, content: EmbeddingRecord) -> bytes:
    return _digest(
        b"embedding-key-v1",
        *(str(getattr(identity, name)).encode() for name in identity.__struct_fields__),
        content.media_hash,
        content.decode_options.encode(),
        content.processor_version.encode(),
        content.salt_digest,
    )


def _digest(*fields: bytes) -> bytes:
    return hashlib.sha256(b"".join(_U64.pack(len(part)) + part for part in fields)).digest()
