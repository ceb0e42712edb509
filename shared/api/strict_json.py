"""JSON from strangers: owns what counts as JSON at all; not what a request may say."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from shared.errors import InvalidRequest

MAX_DEPTH = 64
#: Lists, objects, keys and separators that a body may have: more than any request that could be served.
MAX_COUNTS = {b"[": 1 << 16, b"{": 1 << 16, b":": 1 << 17, b",": 1 << 20}
#: Signed and unsigned 64 bit.
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(_STRING, re.DOTALL)
#: Up to a thousand strings with what stands between them; else what follows the last one.
_PIECES = re.compile(rb'(?:[^"]*+' + _STRING + rb"){1,1000}+|.++", re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """A reason that may be told to the client."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The object that ``body`` holds. Raises InvalidRequest (``invalid_json``) for anything that is not
    one UTF-8 JSON object: also NaN, infinities, repeated keys, integers over 64 bit, lone surrogates,
    nesting deeper than MAX_DEPTH, and more items than a request may have."""
    try:
        _check_size(body)
        value = _DECODER.decode(body.decode("utf-8"))
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
            _check_depth(value)
        if _SURROGATE_ESCAPE.search(body):
            _check_text(value)
    except _Refused as error:
        raise InvalidRequest(f"the body is not acceptable JSON: {error}", code="invalid_json") from None
    except UnicodeError:
        raise InvalidRequest("the body is not valid UTF-8 text", code="invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg.lower()} at character {error.pos}"
        raise InvalidRequest(message, code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


def _check_size(body: bytes) -> None:
    """Nothing is built of what has too many items. What stands in text does not count, and is told apart
    only where there is enough of it; piece by piece, so that other threads run meanwhile."""
    if all(body.count(mark) <= most for mark, most in MAX_COUNTS.items()):
        return
    counts = dict.fromkeys(MAX_COUNTS, 0)
    for piece in _PIECES.finditer(body):
        outside = _STRINGS.sub(b"", piece[0])
        for mark, most in MAX_COUNTS.items():
            counts[mark] += outside.count(mark)
            if counts[mark] > most:
                raise _Refused("it has too many items")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused("a key is repeated")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not _MIN_INT <= int(digits) <= _MAX_INT:
        raise _Refused("an integer has more than 64 bits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Refused("a number is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_number, parse_constant=_constant
)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, (dict, list))]
        if not level:
            return
    raise _Refused("it is nested too deeply")


def _check_text(value: Any) -> None:
    """Every string can be written as UTF-8. Raises UnicodeEncodeError."""
    level = [value]
    while level:
        for item in level:
            if isinstance(item, str):
                item.encode("utf-8")
            elif isinstance(item, dict):
                "".join(item).encode("utf-8")
        level = [inner for outer in level for inner in _inside(outer)]


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
