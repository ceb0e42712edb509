"""`triptych demo`: six processes, a text question and a picture question, and the proof of what happened.

The timeline is made of real spans, received by a collector in this process. Exit code 1 when the
picture's answer is wrong or its trace does not show that the bytes moved between three processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli import timeline
from services.cli.collector import SpanCollector
from services.cli.deployment import Deployment, deployed
from services.cli.launch import ProgressLine, add_launch_options, launch_options, prepared_state
from services.cli.openai_client import OpenAIClient, user_message
from services.cli.preflight import read_model
from services.cli.signals import Interrupted, stop_on_signals
from shared.config.services import WorkerConfig
from shared.types.kv import KVGroupSpec

TEXT_QUESTION = "What is the capital of France?"
PICTURE = Path(__file__).parent / "assets" / "shapes.png"
PICTURE_QUESTION = "Describe the picture."
PICTURE_ANSWER = "An orange circle above a blue triangle."
SPANS_TIMEOUT_S = 10.0
#: With nothing else to do a decode worker would soon serve the questions alone: here all three are shown.
SHOW_ALL_PHASES = "router:routing.placement=apart"


@dataclass(frozen=True)
class Answer:
    """What came back for one question."""

    text: str
    prompt_tokens: int


def configure(parser: argparse.ArgumentParser) -> None:
    add_launch_options(parser)


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    line = ProgressLine(console)
    state = prepared_state(args)
    try:
        topology, options = launch_options(args, state, line)
    finally:
        line.pause()
    with stop_on_signals() as stopping, SpanCollector() as collector:
        try:
            overrides = (SHOW_ALL_PHASES, *options.overrides)
            options = replace(options, otlp_endpoint=collector.endpoint, overrides=overrides)
            with deployed(
                state,
                topology,
                options,
                ready_timeout_s=args.ready_timeout,
                progress=line,
                warn=line.keep,
                stopping=stopping,
            ) as deployment:
                line.pause()
                show_processes(console, deployment)
                problems = show(console, deployment, collector)
        except Interrupted:
            return stopping.exit_code
        finally:
            line.pause()
    for problem in problems:
        console.print(f"[red]FAILED[/] {problem}")
    if not problems:
        console.print(
            "[green]ok[/] the answer is right, and the trace shows the bytes between three processes"
        )
    return 1 if problems else 0


def show_processes(console: Console, deployment: Deployment) -> None:
    names = [f"{name} (pid {pid})" for name, pid in deployment.pids().items()]
    console.print(f"{len(names)} processes: {', '.join(names)}\n", soft_wrap=True)


def show(console: Console, deployment: Deployment, collector: SpanCollector) -> list[str]:
    """Ask both questions, print answers and timeline; returns what is wrong."""
    with OpenAIClient(deployment.http_url) as client:
        ask(console, client, deployment.model, TEXT_QUESTION, None)
        picture = ask(console, client, deployment.model, PICTURE_QUESTION, PICTURE.read_bytes())
    problems = []
    if picture.text.strip() != PICTURE_ANSWER:
        problems.append(f"the picture's answer should have been: {PICTURE_ANSWER}")
    collector.wait_for(lambda spans: timeline.is_complete(timeline.picture_trace(spans)), SPANS_TIMEOUT_S)
    trace = timeline.picture_trace(collector.spans())
    console.print(timeline.render(trace))
    return problems + timeline.problems(trace, expected(deployment, picture.prompt_tokens))


def ask(
    console: Console,
    client: OpenAIClient,
    model: str,
    question: str,
    image: bytes | None,
    write: Callable[[str], Any] = sys.stdout.write,
) -> Answer:
    """One question, its answer printed as it streams."""
    console.print(f"[bold]> {question}[/]" + (f"  [dim]{PICTURE.name}[/]" if image else ""))
    text, prompt_tokens = "", 0
    for piece in client.stream(
        model, [user_message(question, image)], temperature=0, max_completion_tokens=64
    ):
        write(piece.text)
        sys.stdout.flush()
        text += piece.text
        prompt_tokens = piece.prompt_tokens or prompt_tokens
    write("\n\n")
    return Answer(text, prompt_tokens)


def expected(deployment: Deployment, prompt_tokens: int) -> timeline.Expected:
    """What the trace must show, worked out from the model's own configuration, not from the workers."""
    decode = next(spec.config for spec in deployment.specs if spec.kind == "decode")
    if not isinstance(decode, WorkerConfig):
        raise TypeError("decode workers have a WorkerConfig")
    block_size = decode.kv.block_size
    return timeline.Expected(prompt_tokens, block_size, kv_group(decode).extent_bytes(block_size))


def kv_group(worker: WorkerConfig) -> KVGroupSpec:
    """The KV geometry that the config.json of a decoder with layers of one kind implies."""
    return read_model(worker.model).groups[0]
