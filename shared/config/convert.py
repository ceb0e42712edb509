"""Turns plain data (from YAML, TOML, environment or command line) into typed values of a field.

Owns the rules of conversion and the words of its complaints; knows nothing of where a value came from.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
#: Collects one complaint: key path, what is wrong.
Complain = Callable[[str, str], None]

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NONE = frozenset({"", "none", "null"})


class BadValue(ValueError):
    """A value that does not fit its field; the text says what was wanted."""


def ranged(default: Any, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with inclusive bounds, checked while loading."""
    return field(default=default, metadata={"low": low, "high": high})


def build(
    cls: type[T], data: Mapping[str, Any], complain: Complain, path: str = "", base: T | None = None
) -> T | None:
    """An instance of the frozen dataclass ``cls``; None when anything was complained about.

    What ``data`` leaves out is as in ``base``: a section keeps the defaults of where it stands. Strings are
    accepted for every scalar, since environment and command line have nothing else.
    """
    hints = get_type_hints(cls)
    known: dict[str, Field[Any]] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    sound = True

    def bad(key: str, problem: str) -> None:
        nonlocal sound
        sound = False
        complain(key, problem)

    for name, raw in data.items():
        key = f"{path}{name}"
        if name not in known:
            bad(key, f"unknown key (known here: {', '.join(known)})")
        elif is_dataclass(hints[name]):
            if not isinstance(raw, Mapping):
                bad(key, "expected a section")
            else:
                values[name] = build(hints[name], raw, bad, f"{key}.", _default(known[name], base))
        else:
            try:
                values[name] = _checked(known[name], convert(raw, hints[name]))
            except BadValue as error:
                bad(key, str(error))
    for name, spec in known.items():
        if name in data:
            continue
        if base is not None:
            values[name] = getattr(base, name)
        elif spec.default is MISSING and spec.default_factory is MISSING:
            bad(f"{path}{name}", "missing and has no default")
    if not sound:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # a __post_init__ that checks several fields together
        complain(path.rstrip(".") or cls.__name__, str(error))
        return None


def _default(spec: Field[Any], base: Any) -> Any:
    """The section as it is when nothing is said of it; None when it has to be said."""
    if base is not None:
        return getattr(base, spec.name)
    if spec.default_factory is not MISSING:
        return spec.default_factory()
    return None if spec.default is MISSING else spec.default


def convert(raw: Any, hint: Any) -> Any:
    """``raw`` as a value of the type ``hint``. Raises BadValue."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _optional(raw, hint)
    if origin is Literal:
        choices = get_args(hint)
        if raw not in choices:
            raise BadValue(f"expected one of {', '.join(map(str, choices))}")
        return raw
    if origin is tuple:
        return _tuple(raw, get_args(hint)[0])
    try:
        converter = _SCALARS[hint]
    except KeyError:
        raise TypeError(f"config fields cannot have the type {hint}") from None
    return converter(raw)


def _optional(raw: Any, hint: Any) -> Any:
    inner = [arg for arg in get_args(hint) if arg is not type(None)]
    if len(inner) != 1:
        raise TypeError(f"config fields cannot have the type {hint}")
    if raw is None or (isinstance(raw, str) and raw.strip().lower() in _NONE):
        return None
    return convert(raw, inner[0])


def _tuple(raw: Any, item: Any) -> tuple[Any, ...]:
    if isinstance(raw, str):
        raw = [part.strip() for part in raw.strip().strip("[]").split(",") if part.strip()]
    if not isinstance(raw, list | tuple):
        raise BadValue("expected a list")
    return tuple(convert(part, item) for part in raw)


def _str(raw: Any) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise BadValue("expected text")
    return str(raw)


def _bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = raw.strip().lower() if isinstance(raw, str) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise BadValue("expected true or false")


def _int(raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        try:
            return int(raw.strip())
        except ValueError:
            pass
    raise BadValue("expected a whole number")


def _float(raw: Any) -> float:
    if not isinstance(raw, bool) and isinstance(raw, int | float | str):
        try:
            value = float(raw)
        except (ValueError, OverflowError):
            value = math.nan
        if math.isfinite(value):
            return value
    raise BadValue("expected a finite number")


_SCALARS: dict[Any, Callable[[Any], Any]] = {str: _str, bool: _bool, int: _int, float: _float}


def _checked(spec: Field[Any], value: Any) -> Any:
    low, high = spec.metadata.get("low"), spec.metadata.get("high")
    if value is None or (low is None and high is None):
        return value
    if low is not None and value < low:
        raise BadValue(f"must be at least {low:g}")
    if high is not None and value > high:
        raise BadValue(f"must be at most {high:g}")
    return value
