"""The record format: what comes back is what went in, and anything else is refused with a reason."""

from __future__ import annotations

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.checksum import checksum, head_checksums
from shared.tiering.record import (
    MAX_HEADER_BYTES,
    REASONS,
    CorruptRecord,
    EmbeddingRecord,
    KvRecord,
    Record,
    check_header,
    decode_header,
    embedding_key,
    embedding_record,
    encode_header,
    header_length,
    record_key,
    verify,
    verify_payload,
)
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import KVGroupSpec
from shared.types.store import BlockKey
from tests.contract.tiering.harness import ALIGNED, IDENTITY, make

SPEC = ALIGNED.groups[0]


@st.composite
def kv_records(draw: st.DrawFn) -> Record:
    groups = draw(st.integers(1, 3))
    specs = tuple(
        KVGroupSpec(
            draw(st.integers(1, 9)), draw(st.integers(1, 9)), 8, "float16", draw(st.none() | st.just(64))
        )
        for _ in range(groups)
    )
    layout = LayoutSpec(specs, draw(st.sampled_from([1, 16, 512])), tp_size=draw(st.integers(1, 4)))
    group = draw(st.integers(0, groups - 1))
    media = st.lists(st.tuples(st.text(max_size=8), st.integers(-(2**40), 2**40)), max_size=3)
    content = KvRecord(
        group,
        draw(st.binary(max_size=40)),
        draw(st.binary(max_size=40)),
        tuple(draw(st.integers(0, 2**32 - 1)) for _ in range(min(layout.block_size, 2)))
        + (7,) * max(0, layout.block_size - 2),
        tuple(draw(media)),
    )
    sums = tuple(draw(st.integers(0, 2**64 - 1)) for _ in range(specs[group].num_kv_heads))
    identity = IdentityKey(*(draw(st.text(max_size=9)) for _ in range(4)))
    return Record(identity, layout, content, sums, specs[group].extent_bytes(layout.block_size))


@st.composite
def embedding_records(draw: st.DrawFn) -> Record:
    rows, row_bytes = draw(st.integers(1, 5000)), draw(st.integers(1, 9000))
    text = st.text(max_size=9)
    options = {"decode_options": draw(text), "processor_version": draw(text), "salt": draw(text)}
    content = embedding_record(draw(st.binary(max_size=32)), rows, row_bytes, "float32", **options)
    return Record(IDENTITY, None, content, (draw(st.integers(0, 2**64 - 1)),), rows * row_bytes)


RECORDS = kv_records() | embedding_records()


def reason_of(data: bytes) -> str:
    with pytest.raises(CorruptRecord) as caught:
        decode_header(data)
    assert caught.value.reason in REASONS
    return caught.value.reason


@settings(max_examples=80, deadline=None)
@given(RECORDS)
def test_a_header_comes_back_as_it_was(record: Record) -> None:
    header = encode_header(record)
    assert len(header) % 4096 == 0
    assert header_length(header[:64]) == len(header)
    assert decode_header(header) == record
    assert check_header(header) == (record.key, record.payload_bytes)
    assert len(record.key) == 32


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.data())
def test_a_mutated_header_never_becomes_another_record(record: Record, data: st.DataObject) -> None:
    header = bytearray(encode_header(record))
    how = data.draw(st.sampled_from(["bit", "bytes", "cut", "grow", "splice"]))
    at = data.draw(st.integers(0, len(header) - 1) | st.integers(0, 400))
    if how == "bit":
        header[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "bytes":
        header[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    elif how == "cut":
        del header[at:]
    elif how == "grow":
        header += data.draw(st.binary(min_size=1, max_size=5000))
    else:
        other = encode_header(data.draw(RECORDS))
        header[at:] = other[at:]
    try:
        found = decode_header(bytes(header))
    except CorruptRecord as error:
        assert error.reason in REASONS
    else:
        assert encode_header(found) == header
        assert found == record or how == "splice"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_reason(data: bytes) -> None:
    reason_of(data)
    reason_of(data.ljust(4096, b"\0"))


def _sealed(header: bytes, body: bytes, prefix: bytes = b"") -> bytes:
    """A header with another body, or other bytes before it, and a checksum that fits."""
    prefix = prefix or header[:16] + len(body).to_bytes(4, "little") + header[20:60]
    return (prefix + body + checksum(prefix + body).to_bytes(8, "little")).ljust(len(header), b"\0")


def _body(header: bytes) -> bytes:
    return header[60 : 60 + int.from_bytes(header[16:20], "little")]


def test_each_kind_of_damage_has_its_reason() -> None:
    header = make(0).item.header
    assert reason_of(b"X" + header[1:]) == "magic"
    assert reason_of(header[:8] + b"\2" + header[9:]) == "version"
    assert reason_of(header[:100]) == "length"
    assert reason_of(header + bytes(4096)) == "length"
    assert reason_of(header[:12] + (MAX_HEADER_BYTES + 4096).to_bytes(4, "little") + header[16:]) == "length"
    for at in (21, 30, 70):
        assert reason_of(header[:at] + bytes((header[at] ^ 1,)) + header[at + 1 :]) == "checksum"
    assert reason_of(header[:-1] + b"\1") == "checksum"


def test_an_intact_header_of_another_program_is_refused() -> None:
    header = make(0).item.header
    fields = msgspec.msgpack.decode(_body(header))
    assert decode_header(_sealed(header, _body(header))) == make(0).record

    def reason_with(position: int, value: object) -> str:
        return reason_of(
            _sealed(header, msgspec.msgpack.encode([*fields[:position], value, *fields[position + 1 :]]))
        )

    assert reason_with(1, {**fields[1], "rotation": 3}) == "version"  # a field that is not known here
    assert reason_with(1, {"groups": fields[1]["groups"], "block_size": 16}) == "version"  # fields left out
    assert reason_with(2, ["mystery"]) == "version"
    assert reason_with(0, 5) == "version"
    assert reason_with(3, fields[3][:1]) == "length"
    assert reason_with(4, 4096) == "length"
    assert reason_with(1, None) == "length"
    assert reason_with(1, {**fields[1], "checksum": "crc"}) == "length"
    assert reason_of(_sealed(header, b"\x93" * 900)) == "version"
    assert reason_of(_sealed(header, _body(header), header[:20] + b"\1" + header[21:60])) == "length"
    assert reason_of(_sealed(header, _body(header), header[:28] + bytes(32))) == "key"


def test_a_record_that_contradicts_itself_is_not_written() -> None:
    record = make(0).record
    for change in (
        {"payload_bytes": record.payload_bytes + 1},
        {"checksums": record.checksums[:1]},
        {"layout": None},
        {"content": msgspec.structs.replace(record.content, group=1)},
        {"content": msgspec.structs.replace(record.content, token_ids=(1,))},
    ):
        with pytest.raises(ValueError, match="fit together"):
            encode_header(msgspec.structs.replace(record, **change))
    media = (("x" * MAX_HEADER_BYTES, 0),)
    with pytest.raises(ValueError, match="too long"):
        encode_header(
            msgspec.structs.replace(record, content=msgspec.structs.replace(record.content, media=media))
        )


class TestVerify:
    def check(
        self,
        content: KvRecord | EmbeddingRecord | None = None,
        identity: IdentityKey = IDENTITY,
        layout: LayoutSpec | None = ALIGNED,
        payload: memoryview | None = None,
    ) -> str:
        stored = make(0)
        try:
            verify(
                stored.record,
                stored.item.payload if payload is None else payload,
                content or stored.record.content,
                identity,
                layout,
            )
        except CorruptRecord as error:
            return error.reason
        return ""

    def test_what_was_asked_for_passes(self) -> None:
        assert self.check() == ""
        assert self.check(layout=msgspec.structs.replace(ALIGNED, wire_versions=(1, 9))) == ""

    def test_another_model_or_layout(self) -> None:
        assert self.check(identity=msgspec.structs.replace(IDENTITY, revision="2")) == "identity"
        assert self.check(layout=msgspec.structs.replace(ALIGNED, head_start=2)) == "identity"
        assert self.check(layout=None) == "identity"

    def test_an_equal_hash_of_other_content(self) -> None:
        """Whatever a block hash stands for is compared, not the hash alone."""
        content = make(0).record.content
        assert isinstance(content, KvRecord)
        for change in (
            {"token_ids": (9, *content.token_ids[1:])},
            {"parent": b"another"},
            {"media": (("picture", -3),)},
            {"group": 1},
            {"block_hash": b"another"},
        ):
            assert self.check(msgspec.structs.replace(content, **change)) == "key"
        assert self.check(embedding_record(b"m", 1, 1, "float32")) == "key"

    def test_every_byte_of_the_payload_counts(self) -> None:
        payload = bytearray(make(0).item.payload)
        for at in (0, 4095, 4096, 8191):
            payload[at] ^= 0x80
            assert self.check(payload=memoryview(payload)) == "payload"
            payload[at] ^= 0x80
        assert self.check(payload=memoryview(payload)) == ""
        assert self.check(payload=memoryview(payload)[:-1]) == "length"

    def test_heads_that_changed_places(self) -> None:
        payload = bytes(make(0).item.payload)
        assert self.check(payload=memoryview(payload[4096:] + payload[:4096])) == "payload"

    def test_embeddings_have_one_checksum(self) -> None:
        rows = bytes(range(240))
        content = embedding_record(b"m" * 32, 10, 24, "float32")
        record = Record(IDENTITY, None, content, (xxhash.xxh3_64_intdigest(rows),), 240)
        found = decode_header(encode_header(record))
        verify(found, memoryview(rows), content, IDENTITY, None)
        for other in ({"num_rows": 24, "row_bytes": 10}, {"dtype": "float16"}, {"salt_digest": b"x"}):
            with pytest.raises(CorruptRecord, match="key"):
                verify(found, memoryview(rows), msgspec.structs.replace(content, **other), IDENTITY, None)
        with pytest.raises(CorruptRecord, match="payload"):
            verify_payload(found, memoryview(rows[::-1]))


class TestKeys:
    def test_every_field_counts(self) -> None:
        layouts = [
            ALIGNED,
            msgspec.structs.replace(ALIGNED, block_size=32),
            msgspec.structs.replace(ALIGNED, tp_size=2),
            msgspec.structs.replace(ALIGNED, head_start=2),
            msgspec.structs.replace(ALIGNED, extent_order="layer,kv_head"),
            msgspec.structs.replace(ALIGNED, checksum="other"),
            msgspec.structs.replace(ALIGNED, groups=(SPEC, SPEC)),
            msgspec.structs.replace(ALIGNED, groups=(msgspec.structs.replace(SPEC, window=4),)),
        ]
        keys = [record_key("kv", layout, 0, b"hash") for layout in layouts]
        keys += [record_key("kv", ALIGNED, 1, b"hash"), record_key("kv", ALIGNED, 0, b"hash2")]
        keys += [record_key("other", ALIGNED, 0, b"hash")]
        assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {32}
        same = msgspec.structs.replace(ALIGNED, wire_versions=(3, 4))
        assert record_key("kv", same, 0, b"hash") == keys[0]

    def test_embeddings_of_other_settings_or_tenants_never_meet(self) -> None:
        base = {"decode_options": "d", "processor_version": "p", "salt": "s"}
        keys = [embedding_key(IDENTITY, b"m", **base)]
        keys += [embedding_key(IDENTITY, b"m", **{**base, name: "x"}) for name in base]
        keys += [embedding_key(IDENTITY, b"m", decode_options="dp", processor_version="", salt="s")]
        keys += [embedding_key(IDENTITY, b"n", **base)]
        keys += [embedding_key(msgspec.structs.replace(IDENTITY, model="other"), b"m", **base)]
        assert len(set(keys)) == len(keys)
        content = embedding_record(b"m", 2, 3, "float32", **base)
        assert Record(IDENTITY, None, content, (1,), 6).key == keys[0]

    def test_the_salt_is_not_written_down(self) -> None:
        content = embedding_record(b"m", 2, 3, "float32", salt="tenant-secret")
        assert b"tenant-secret" not in encode_header(Record(IDENTITY, None, content, (1,), 6))

    def test_a_block_key_becomes_content(self) -> None:
        key = BlockKey(0, b"h", b"p", tuple(range(16)), (("m", -2),))
        record = Record(IDENTITY, ALIGNED, KvRecord.of(key), (1, 2), SPEC.extent_bytes(ALIGNED.block_size))
        assert decode_header(encode_header(record)).content == KvRecord(
            0, b"h", b"p", key.token_ids, key.media
        )
        assert record.key == record_key("kv", ALIGNED, 0, b"h")


def test_checksums_are_the_producers_own() -> None:
    """The record carries what it was given; nothing in the format takes a checksum of a payload."""
    stored = make(0)
    record = msgspec.structs.replace(stored.record, checksums=(1, 2))
    assert decode_header(encode_header(record)).checksums == (1, 2)
    assert head_checksums(stored.item.payload, 2) == stored.record.checksums
