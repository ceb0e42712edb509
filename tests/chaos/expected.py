"""What each request's answer must be, by the witness oracle. Also a program, so that this arithmetic runs
beside a run without touching it:

    python -m tests.chaos.expected SEED SCALE FIRST LAST

writes the answers of cases FIRST .. LAST - 1 as one msgpack list of lists.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.runner.witness_config import load_witness_config
from shared.runner.witness_oracle import WitnessOracle
from tests.chaos.records import Case, Expected
from tests.chaos.workload import Workload

WITNESS = Path(__file__).parents[2] / "models" / "witness"
#: The workers' limit, prompt and answer together.
MAX_MODEL_LEN = 1024


class Answers:
    """Expected answers of cases; a pure function of each."""

    def __init__(self) -> None:
        self._oracle = WitnessOracle(load_witness_config(WITNESS))

    def of(self, case: Case) -> list[Expected]:
        """One entry a choice."""
        return [self._choice(case, choice) for choice in range(case.n)]

    def _choice(self, case: Case, choice: int) -> Expected:
        spans = [(m.offset, m.num_tokens, m.data) for m in case.media]
        answer = self._oracle.generate(case.prompt, case.sampling, choice, spans, max_model_len=MAX_MODEL_LEN)
        ids = answer.token_ids
        # The id that ended an answer has no part in its text.
        shown = ids[:-1] if answer.finish_reason == "stop" else ids
        text = bytes(t for t in shown if t < 256).decode("utf-8", "replace")
        # Alternatives are compared where they come as a list: in chats.
        chat = case.path.endswith("/chat/completions")
        logprobs = tuple((e.logprob, e.top_logprobs if chat else ()) for e in answer.logprobs)
        return Expected(ids, answer.finish_reason, text, logprobs)


async def compute_aside(workload: Workload, scale: float, first: int, last: int) -> list[list[Expected]]:
    """The answers of these cases, computed in a process of low priority."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos.expected",
        *map(str, (workload.seed, scale, first, last)),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"the oracle's process ended with status {process.returncode}")
    return msgspec.msgpack.decode(out, type=list[list[Expected]])


def main(argv: Sequence[str]) -> None:
    os.nice(10)
    workload, answers = Workload(int(argv[0]), scale=float(argv[1])), Answers()
    found = [answers.of(workload.case(number)) for number in range(int(argv[2]), int(argv[3]))]
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main(sys.argv[1:])
