"""`triptych chat`: a conversation on the terminal, through the OpenAI API."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from services.cli.openai_client import OpenAIClient, ServerSaid, read_image, user_message
from services.cli.state import DEFAULT_DIR, add_state_option, state_of
from shared.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="*", help="ask this and exit; default: a conversation")
    parser.add_argument("--image", type=Path, metavar="FILE", help="a picture for the first question")
    parser.add_argument(
        "--url",
        default="",
        help="the server, with or without /v1; default: the one that is up, else port 8000",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    add_state_option(parser)


def run(args: argparse.Namespace) -> int:
    image = read_image(args.image) if args.image else None
    system = _readable(args.system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    question = _readable(" ".join(args.question))
    if args.question and not question.strip():
        raise ConfigError("the question is empty")
    if not math.isfinite(args.temperature):
        raise ConfigError("--temperature must be a finite number")
    url = args.url.rstrip("/").removesuffix("/v1") or _url_of_what_is_up(args)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {args.url}: expected http://HOST:PORT")
    with OpenAIClient(url) as client:
        model = client.model()
        if question:
            messages.append(user_message(question, image))
            _answer(client, model, messages, args)
            return 0
        print(f"{model}: an empty line or Ctrl-D ends the conversation")
        while line := _ask():
            messages.append(user_message(line, image))
            image = None
            try:
                messages.append({"role": "assistant", "content": _answer(client, model, messages, args)})
            except ServerSaid as error:
                messages.pop()
                print(f"({error.message})", file=sys.stderr)
            except KeyboardInterrupt:  # in mid-answer: that answer is not wanted, the conversation is
                messages.pop()
                print("\n(stopped)", file=sys.stderr)
    return 0


def _url_of_what_is_up(args: argparse.Namespace) -> str:
    record = state_of(args).deployed()
    if record is None and args.state_dir != DEFAULT_DIR:
        raise ConfigError(f"nothing is up in {args.state_dir}; --url names a server")
    return record.http if record is not None else "http://127.0.0.1:8000"


def _readable(text: str) -> str:
    """Bytes that are no UTF-8, as they may come from a terminal, shown as such."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _plain(text: str) -> str:
    """Without what would steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _ask() -> str:
    try:
        return _readable(input("> ")).strip()
    except EOFError:
        print()
        return ""


def _answer(
    client: OpenAIClient, model: str, messages: list[dict[str, Any]], args: argparse.Namespace
) -> str:
    """Print the answer as it comes; returns all of it."""
    text = ""
    params = {"max_completion_tokens": args.max_tokens, "temperature": args.temperature}
    for piece in client.stream(model, messages, **params):
        print(_plain(piece.text), end="", flush=True)
        text += piece.text
    print()
    return text
