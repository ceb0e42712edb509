from __future__ import annotations

import json

import pytest

from shared.api.strict_json import MAX_COUNTS, MAX_DEPTH, parse_object
from shared.errors import InvalidRequest


def test_ordinary_json_comes_through() -> None:
    body = (
        '{"a": [1, -2.5, 1e3, true, null], "b": {"c": "\\ud83d\\ude00 \\u0000 é"}, "d": 18446744073709551615}'
    )
    assert parse_object(body.encode()) == {
        "a": [1, -2.5, 1000.0, True, None],
        "b": {"c": "\U0001f600 \x00 é"},
        "d": 2**64 - 1,
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b'{"a":1,}',
        b"\xef\xbb\xbf{}",
        b"{} {}",
        b"null",
        b"[]",
        b"5",
        b'"x"',
        b'{"a":1,"a":2}',
        b'{"x":{"a":1,"a":1}}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e400}',
        b'{"a":1' + b"0" * 400 + b"}",
        b'{"a":18446744073709551616}',
        b'{"a":-9223372036854775809}',
        b'{"a":"\\ud800"}',
        b'{"a":["\\udc00x"]}',
        b'{"\\ud800":1}',
        b'{"a":"\xff"}',
        b'{"a":"\xc0\xaf"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\n"}',
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 200_000,
    ],
)
def test_anything_else_is_refused_without_repeating_it(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 150


def test_nesting_is_allowed_up_to_the_cap() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b', "b":[' + b"{}," * 80 + b"1]}"

    parse_object(nested(MAX_DEPTH))
    with pytest.raises(InvalidRequest):
        parse_object(nested(MAX_DEPTH + 1))


def bodies_of(count: int) -> list[bytes]:
    """Objects with so many of each thing that is bounded, itself included."""
    return [
        b'{"a":[' + b",".join([b"[]"] * (count - 1)) + b"]}",
        b'{"a":[' + b",".join([b"{}"] * (count - 1)) + b"]}",
        b"{" + b",".join(b'"%d":1' % n for n in range(count)) + b"}",
        b'{"a":[' + b",".join([b"1"] * (count + 1)) + b"]}",
    ]


def test_items_are_bounded_before_anything_is_built_of_them() -> None:
    for index, most in enumerate(MAX_COUNTS.values()):
        assert parse_object(bodies_of(most)[index])
        with pytest.raises(InvalidRequest, match="too many items") as caught:
            parse_object(bodies_of(most + 1)[index])
        assert caught.value.code == "invalid_json"


def test_text_is_not_counted_as_items() -> None:
    text = '[{":,\\\\"' * (max(MAX_COUNTS.values()) // 2)
    short = ["\\", '"', ",", "[", "{", ":"] * 20_000
    body = json.dumps({"a": text, "b": text, "c": short}).encode()
    assert parse_object(body) == {"a": text, "b": text, "c": short}
