"""An inference service that answers by script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from shared.types.inference import Accepted, Delta, InferenceRequest, ModelCard, Output, Usage
from shared.types.request import TokenLogprobs

WORDS = ("Hello", " ", "\u65e5\u672c", ' "quoted"\n', " end")
END_ID = 99
CARDS = [
    ModelCard(name="tiny", max_model_len=200, vocab_size=100, created=1700000000, vision=True),
    ModelCard(name="group/blind", max_model_len=200, vocab_size=100, created=1700000001),
]


class ScriptedService:
    """Every choice says WORDS, a token a word, then closes with END_ID.

    ``requests`` are those that came; ``aborted`` counts iterators closed before their end. ``fail_at`` =
    (batches that pass first, error). ``hold`` stops each choice after its first word until set.
    """

    def __init__(self) -> None:
        self.requests: list[InferenceRequest] = []
        self.began = asyncio.Event()
        self.aborted = asyncio.Queue[str]()
        self.fail_at: tuple[int, Exception] | None = None
        self.hold: asyncio.Event | None = None
        self.is_ready = True
        self.filler: str | None = None

    async def generate(self, request: InferenceRequest) -> AsyncIterator[list[Output]]:
        self.requests.append(request)
        self.began.set()
        finished = False
        try:
            for number, batch in enumerate(self._batches(request)):
                if self.fail_at is not None and number == self.fail_at[0]:
                    raise self.fail_at[1]
                if self.hold is not None and number == 2:
                    await self.hold.wait()
                yield batch
                await asyncio.sleep(0)
            while self.filler is not None:
                yield [Delta(0, self.filler, (1,))]
            finished = True
        finally:
            if not finished:
                self.aborted.put_nowait(request.label)

    async def models(self) -> list[ModelCard]:
        return CARDS

    async def token_text(self, model: str, token_ids: tuple[int, ...]) -> list[bytes]:
        return [b"<end>" if i == END_ID else WORDS[i % len(WORDS)].encode() for i in token_ids]

    async def ready(self) -> bool:
        return self.is_ready

    def _batches(self, request: InferenceRequest) -> Sequence[list[Output]]:
        number = len(self.requests)
        prompt_ids = request.prompt_token_ids or (1, 2, 3)
        batches: list[list[Output]] = [
            [Accepted(request_id=f"r{number}", prompt_token_ids=prompt_ids, seed=1, created=1700000005)]
        ]
        for token_id, word in enumerate(WORDS):
            batches.append([_delta(request, c, word, (token_id,)) for c in range(request.n)])
        closing: list[Output] = [_delta(request, c, "", (END_ID,), "stop") for c in range(request.n)]
        num_completion = request.n * (len(WORDS) + 1)
        return [*batches, [*closing, Usage(len(prompt_ids), num_completion, 2)]]


def _delta(
    request: InferenceRequest, choice: int, text: str, ids: tuple[int, ...], finish: str = ""
) -> Delta:
    count = request.sampling.logprobs
    logprobs = () if count is None else tuple(_logprobs(i, count) for i in ids)
    return Delta(choice, text, ids, logprobs, finish)


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    top_ids = tuple(range(token_id, token_id + count))
    return TokenLogprobs(-0.25, 0, top_ids, tuple(-0.25 - k for k in range(count)))
