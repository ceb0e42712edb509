"""One JSON object a line, whatever is logged; nothing a client said; no floods."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest

from shared.clock import ManualClock
from shared.telemetry import logs
from shared.telemetry.logs import RATE_LIMIT, RATE_WINDOW_S, configure, get_logger


class Output:
    """What a configured process has logged."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.clock = ManualClock()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line, parse_constant=pytest.fail) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def output() -> Iterator[Output]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = Output()
    # Not through basicConfig(force=True): it would close the test runner's own handlers.
    root.handlers = []
    configure("decode", "info", stream=out.stream, clock=out.clock)
    yield out
    root.handlers = handlers
    root.setLevel(level)


def test_a_line_says_who_when_and_what(output: Output) -> None:
    get_logger("shared.engine").info("worker lost", worker="d0", blocks=3, ratio=0.5, ok=True, none=None)
    (line,) = output.lines
    assert line.pop("time").endswith("+00:00")
    assert isinstance(line.pop("pid"), int)
    assert line == {
        "level": "info",
        "service": "decode",
        "logger": "shared.engine",
        "message": "worker lost",
        "worker": "d0",
        "blocks": 3,
        "ratio": 0.5,
        "ok": True,
        "none": None,
    }


def test_levels_below_the_configured_one_are_dropped(output: Output) -> None:
    get_logger("x").debug("quiet")
    get_logger("x").warning("loud")
    assert [line["level"] for line in output.lines] == ["warning"]


def test_hostile_values_stay_inside_their_line(output: Output) -> None:
    hostile = 'a\r\n{"level":"forged"}\x1b[31m\u2028\x00"'
    get_logger("x").info("100% of %s", label=hostile, obj={"k": "\n"}, nan=math.nan)
    assert output.stream.getvalue().isascii()
    (line,) = output.lines
    assert (line["message"], line["label"], line["nan"]) == ("100% of %s", hostile, "nan")


def test_long_values_are_cut(output: Output) -> None:
    get_logger("x").info("m" * 1000, detail="d" * 1_000_000)
    (line,) = output.lines
    assert line["detail"] == "d" * 500 + "...(1000000 characters)"
    assert len(output.stream.getvalue()) < 2000


@pytest.mark.parametrize("field", sorted(logs.WITHHELD))
def test_content_of_requests_is_withheld(output: Output, field: str) -> None:
    get_logger("x").info("request", **{field: "my secret"})
    assert "secret" not in output.stream.getvalue()
    assert output.lines[0][field] == "(withheld)"


def test_a_field_cannot_replace_what_the_line_says_itself(output: Output) -> None:
    get_logger("x").info("real", level="forged", service="forged")
    (line,) = output.lines
    assert (line["level"], line["service"], line["level_"]) == ("info", "decode", "forged")


def test_exceptions_show_frames_but_not_their_text(output: Output) -> None:
    words = " ".join(["my", "secret"])
    try:
        raise ValueError(words)
    except ValueError:
        get_logger("x").exception("failed", code="c")
    (line,) = output.lines
    assert (line["error"], line["code"], line["level"]) == ("ValueError", "c", "error")
    assert "test_exceptions_show_frames" in line["trace"]
    assert "secret" not in json.dumps(line)


def test_foreign_libraries_are_structured_too(output: Output) -> None:
    logging.getLogger("uvicorn").warning("listening on %s", "127.0.0.1")
    assert output.lines[0]["message"] == "listening on 127.0.0.1"


def test_a_repeated_message_is_limited_and_counted(output: Output) -> None:
    log, other = get_logger("x"), get_logger("y")
    for number in range(RATE_LIMIT + 5):
        log.info("again", number=number)
    log.info("different")
    other.info("again")
    assert len(output.lines) == RATE_LIMIT + 2
    output.clock.advance(RATE_WINDOW_S)
    log.info("again")
    assert output.lines[-1]["suppressed"] == 5
    log.info("again")
    assert "suppressed" not in output.lines[-1]


def test_a_library_s_varying_messages_count_as_one(output: Output) -> None:
    for number in range(RATE_LIMIT + 5):
        logging.getLogger("lib").warning("number %d", number)
    assert len(output.lines) == RATE_LIMIT


def test_the_limiter_s_memory_is_bounded(output: Output) -> None:
    filters = [f for handler in logging.getLogger().handlers for f in handler.filters]
    (limit,) = [f for f in filters if isinstance(f, logs.RateLimit)]
    for number in range(3000):
        get_logger("x").info(f"message {number}")
    assert len(limit._seen) <= 1000
