"""The witness oracle: what a request's answer must be, computed straight from the definition.

Owns an implementation of its own of the text in ``shared.runner.witness_config`` (no blocks, no
batches, no arrays), and the rule for when an answer ends. Of the served system it shares only the
record types and the reference of the sampling chain.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from shared.runner.witness_config import WitnessConfig
from shared.sampling.chain import sample
from shared.sampling.row import Sampled
from shared.types.request import SamplingParams, TokenLogprobs

_M = 2**64 - 1
_record = struct.Struct("<6Q").pack
_word = struct.Struct("<Q").pack


class MediaSpan(NamedTuple):
    """``num_tokens`` placeholder positions from ``offset``; ``data``: the bytes that the encoder is given."""

    offset: int
    num_tokens: int
    data: bytes


class Answer(NamedTuple):
    """``finish_reason`` is "stop" or "length"; the id that ended the answer is part of it. ``logprobs``: of
    each token, when they were asked for."""

    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class WitnessOracle:
    """Answers of one witness model. Holds no state between requests; any thread."""

    def __init__(self, config: WitnessConfig) -> None:
        self._config = config

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        choice: int = 0,
        media: Sequence[tuple[int, int, bytes]] = (),
        *,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> Answer:
        """The whole answer of one choice.

        It ends with "stop" at an end-of-sequence id (unless ignored) or a stop id, else with
        "length" after ``max_tokens`` tokens (0: no limit) or at ``max_model_len`` tokens in all.
        """
        limit = max_model_len or self._config.max_position_embeddings
        eos = tuple(eos_token_ids or (self._config.eos_token_id,))
        sequence = _Sequence(self._config)
        for kind, word in self._words(prompt_token_ids, media):
            sequence.push(kind, word)
        history = list(prompt_token_ids)
        logprobs: list[TokenLogprobs] = []
        while True:
            sampled = self._next(sequence.state(), sampling, choice, history, len(prompt_token_ids), eos)
            token = sampled.token_id
            history.append(token)
            if sampled.logprobs is not None:
                logprobs.append(sampled.logprobs)
            emitted = len(history) - len(prompt_token_ids)
            if (token in eos and not sampling.ignore_eos) or token in sampling.stop_token_ids:
                return Answer(tuple(history[-emitted:]), "stop", tuple(logprobs))
            if emitted == sampling.max_tokens or len(history) >= limit:
                return Answer(tuple(history[-emitted:]), "length", tuple(logprobs))
            sequence.push(0, token)

    def state(self, token_ids: Sequence[int], media: Sequence[tuple[int, int, bytes]] = ()) -> int:
        """The state after all of these tokens."""
        sequence = _Sequence(self._config)
        for kind, word in self._words(token_ids, media):
            sequence.push(kind, word)
        return sequence.state()

    def embedding_rows(self, data: bytes, num_rows: int) -> list[bytes]:
        """The rows that the encoder makes of a media item."""
        head = _word(self._config.key) + hashlib.sha256(data).digest()
        return [hashlib.shake_128(head + _word(i)).digest(self._config.row_bytes) for i in range(num_rows)]

    def _words(
        self, token_ids: Sequence[int], media: Sequence[tuple[int, int, bytes]]
    ) -> Iterator[tuple[int, int]]:
        embedded: dict[int, bytes] = {}
        for offset, num_tokens, data in media:
            for i, row in enumerate(self.embedding_rows(data, num_tokens)):
                embedded[offset + i] = row
        for position, token in enumerate(token_ids):
            row_bytes = embedded.get(position)
            if row_bytes is None:
                yield 0, token
            else:
                yield 1, xxhash.xxh3_64_intdigest(row_bytes, self._config.key)

    def _next(
        self,
        state: int,
        sampling: SamplingParams,
        choice: int,
        history: Sequence[int],
        num_prompt_tokens: int,
        eos: Sequence[int],
    ) -> Sampled:
        return sample(
            self._logits(state),
            sampling,
            choice=choice,
            history=history,
            num_prompt_tokens=num_prompt_tokens,
            eos_token_ids=eos,
        )

    def _logits(self, state: int) -> np.ndarray:
        config = self._config
        count = config.candidates
        segment = config.num_text_tokens // (count - 1)
        logits_V = np.full(config.vocab_size, -np.inf)
        for i in range(count):
            draw = _mix((state + (i + 1) * 0x9E3779B97F4A7C15) & _M)
            if i < count - 1:
                logits_V[i * segment + draw % segment] = ((draw >> 48) * count + i) / 2**13 / count
            else:
                logits_V[config.eos_token_id] = 9.0 if draw % config.eos_period == 0 else -8.0
        return logits_V


class _Lane(NamedTuple):
    """One (layer, head): the seeds of its two planes and the planes so far."""

    layer: int
    head: int
    k_seed: int
    v_seed: int
    keys: bytearray
    values: bytearray


class _Sequence:
    """The planes of one sequence, as plain growing strings."""

    def __init__(self, config: WitnessConfig) -> None:
        self._key = config.key
        self._length = 0
        self._parents: list[int] = []
        self._lanes: list[_Lane] = []
        for layer in range(config.num_layers):
            for head in range(config.num_kv_heads):
                seed = config.key + 1 + 2 * (layer * config.num_kv_heads + head)
                self._lanes.append(_Lane(layer, head, seed & _M, (seed + 1) & _M, bytearray(), bytearray()))
                self._parents.append(0)

    def push(self, kind: int, word: int) -> None:
        """Append one position."""
        for i, lane in enumerate(self._lanes):
            record = _record(lane.layer, lane.head, self._length, kind, word, self._parents[i])
            entry = xxhash.xxh3_64_intdigest(record, self._key)
            self._parents[i] = entry
            lane.keys.extend(_word(entry))
            lane.values.extend(_word(_mix(entry)))
        self._length += 1

    def state(self) -> int:
        """The state after everything pushed so far."""
        total = 0
        for lane in self._lanes:
            total += xxhash.xxh3_64_intdigest(lane.keys, lane.k_seed)
            total += xxhash.xxh3_64_intdigest(lane.values, lane.v_seed)
        return total & _M


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M
    return x ^ (x >> 31)
