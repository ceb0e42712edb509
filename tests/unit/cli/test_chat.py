"""A conversation on the terminal, against a server that streams."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

from services.cli import chat
from services.cli.openai_client import Piece, ServerSaid


class Talker:
    """Stands for the client: every question gets the next of these answers, which may break off."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[list[dict[str, Any]]] = []

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def model(self) -> str:
        return "m"

    def stream(self, model: str, messages: list[dict[str, Any]], **_: object) -> Iterator[Piece]:
        self.asked.append(list(messages))
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield Piece(piece)


def talk(monkeypatch: pytest.MonkeyPatch, talker: Talker, *lines: str) -> int:
    parser = argparse.ArgumentParser()
    chat.configure(parser)
    typed = iter((*lines, ""))
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    monkeypatch.setattr(chat, "OpenAIClient", lambda url: talker)
    return chat.run(parser.parse_args(["--url", "http://127.0.0.1:1"]))


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ServerSaid("too much")])
def test_an_answer_that_breaks_off_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    talker = Talker(["Hal", stop], ["Hello"])
    assert talk(monkeypatch, talker, "one", "two") == 0
    assert [[m["content"] for m in messages] for messages in talker.asked] == [["one"], ["two"]]


def test_what_was_said_goes_with_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    talker = Talker(["Hel", "lo"], ["Bye"])
    assert talk(monkeypatch, talker, "one", "two") == 0
    assert [m["content"] for m in talker.asked[1]] == ["one", "Hello", "two"]
