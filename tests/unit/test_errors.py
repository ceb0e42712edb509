"""The error tree agrees with its drawing, and every class is rebuilt from its code."""

from __future__ import annotations

import re

import grpc
import pytest

from shared import errors
from shared.errors import InternalError, TriptychError, all_errors, from_code

DRAWN = re.findall(
    r"^ {4}[│ ]*(?:[├└]── )?(\w+)(?: +([A-Z_]+) +(\d{3})( +retryable)?)?$", errors.__doc__ or "", re.M
)


def own_errors() -> list[type[TriptychError]]:
    return [cls for cls in all_errors() if cls.__module__ == errors.__name__]


def test_every_class_is_drawn_with_its_codes() -> None:
    drawn = {name: (code, int(status or 0), bool(again)) for name, code, status, again in DRAWN}
    assert set(drawn) == {cls.__name__ for cls in own_errors()}
    for cls in own_errors():
        if cls is not TriptychError:
            code, status, _ = drawn[cls.__name__]
            assert (cls.grpc_code, cls.http_status) == (code, status), cls


def test_the_tree_has_no_members_elsewhere_but_in_the_command_line() -> None:
    """The command's own errors never cross the wire."""
    elsewhere = [cls for cls in all_errors() if not cls.__module__.startswith("services.cli.")]
    assert own_errors() == elsewhere


@pytest.mark.parametrize("cls", own_errors())
def test_class_is_sound(cls: type[TriptychError]) -> None:
    error = cls("message", param="field")
    assert (error.message, error.param, str(error)) == ("message", "field", "message")
    assert error.grpc_code in grpc.StatusCode.__members__
    assert 400 <= error.http_status <= 599
    assert error.code and error.type


@pytest.mark.parametrize("cls", own_errors())
def test_class_is_rebuilt_from_its_code(cls: type[TriptychError]) -> None:
    error = from_code(cls.code, "message")
    assert (error.code, error.http_status, error.grpc_code, error.retryable, error.message) == (
        cls.code,
        cls.http_status,
        cls.grpc_code,
        cls.retryable,
        "message",
    )


def test_an_unknown_code_is_an_internal_error_that_keeps_it() -> None:
    error = from_code("of_the_future", "message")
    assert type(error) is InternalError
    assert error.code == "of_the_future"
    assert InternalError("other").code == "internal_error"


def test_parents_come_before_children() -> None:
    order = all_errors()
    assert all(order.index(cls.__bases__[0]) < order.index(cls) for cls in order[1:])
