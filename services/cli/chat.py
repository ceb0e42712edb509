"""`triptych chat`: a conversation on the terminal, through the OpenAI API."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from services.cli.openai_client import OpenAIClient, ServerSaid, read_image, user_message
from services.cli.state import add_state_option, state_of


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="*", help="ask this and exit; default: a conversation")
    parser.add_argument("--image", type=Path, metavar="FILE", help="a picture for the first question")
    parser.add_argument(
        "--url", default="", help="the server; default: the one that is up, else 127.0.0.1:8000"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    add_state_option(parser)


def run(args: argparse.Namespace) -> int:
    image = read_image(args.image) if args.image else None
    messages: list[dict[str, Any]] = [{"role": "system", "content": args.system}] if args.system else []
    question = " ".join(args.question)
    with OpenAIClient(args.url or _url_of_what_is_up(args)) as client:
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
    return 0


def _url_of_what_is_up(args: argparse.Namespace) -> str:
    record = state_of(args).deployed()
    return record.http if record is not None else "http://127.0.0.1:8000"


def _ask() -> str:
    try:
        return input("> ").strip()
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
        print(piece.text, end="", flush=True)
        text += piece.text
    print()
    return text
