"""The requests of a run: every one a function of (seed, number) alone.

Owns what is asked and how a chat becomes a prompt (written down here once more, so that the template is
checked too). Prompts share prefixes and pictures, so that prefix, store and encoder caches are hit.
"""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from PIL import Image

from shared.types.request import SamplingParams
from tests.chaos.records import Case, Media

MODEL = "witness"
START, END, PICTURE = 257, 258, 259

NUM_PREFIXES = 12
MAX_PREFIX_TOKENS = 240
NUM_PICTURES = 24
_SIDES = (16, 48, 64, 100, 130, 200, 256, 321)


class Workload:
    """Cases by number. ``scale`` multiplies the lengths of answers."""

    def __init__(self, seed: int, *, scale: float = 1.0) -> None:
        self.seed = seed
        self._scale = scale
        rng = random.Random(f"{seed}/shared")
        self._prefixes = [_text(rng, rng.randint(16, MAX_PREFIX_TOKENS)) for _ in range(NUM_PREFIXES)]
        self._pictures = [_picture(rng) for _ in range(NUM_PICTURES)]

    def case(self, number: int) -> Case:
        """The request of this number."""
        rng = random.Random(f"{self.seed}/{number}")
        sampling = self._sampling(rng)
        n = rng.choices((1, 2, 3), (70, 18, 12))[0]
        body = _body_fields(sampling) | {"model": MODEL, "n": n, "return_token_ids": True}
        stream = rng.random() < 0.8
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        media: tuple[Media, ...] = ()
        if rng.random() < 0.45:
            path, prompt, media = "/v1/chat/completions", *self._chat(rng, body)
            if sampling.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
        else:
            path, prompt = "/v1/completions", self._completion(rng, body)
            if sampling.logprobs is not None:
                body |= {"logprobs": sampling.logprobs}
        abort_after = rng.randint(1, 1 + sampling.max_tokens // 2) if stream and rng.random() < 0.06 else 0
        return Case(number, path, body, prompt, sampling, n, media, stream, abort_after)

    def _sampling(self, rng: random.Random) -> SamplingParams:
        short, long = rng.randint(1, 24), rng.randint(24, 120)
        max_tokens = max(1, round(self._scale * rng.choices((short, long), (55, 45))[0]))
        drawn = rng.random() < 0.75
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "seed": rng.getrandbits(62)}
        if drawn:
            fields["temperature"] = rng.choice((0.3, 0.8, 1.0, 1.7))
            if rng.random() < 0.4:
                fields |= {"top_p": rng.choice((0.7, 0.95)), "top_k": rng.choice((0, 3, 6))}
            if rng.random() < 0.15:
                fields["min_p"] = 0.05
        if rng.random() < 0.25:
            fields["presence_penalty"] = rng.choice((-0.5, 1.0))
            fields["frequency_penalty"] = rng.choice((0.0, 0.5))
        if rng.random() < 0.2:
            fields["repetition_penalty"] = rng.choice((0.9, 1.2))
        if rng.random() < 0.3:
            fields["ignore_eos"] = True
        if rng.random() < 0.2:
            fields["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.2:
            fields["stop_token_ids"] = tuple(sorted(rng.sample(range(256), 6)))
        if rng.random() < 0.12:
            fields["logit_bias"] = ((rng.randrange(256), 3.5),)
        if rng.random() < 0.15:
            fields["logprobs"] = rng.choice((0, 1, 5))
        return SamplingParams(**fields)

    def _words(self, rng: random.Random) -> str:
        """Text of any length, more often than not behind a shared prefix."""
        prefix = rng.choice(self._prefixes) if rng.random() < 0.6 else ""
        tail = rng.choices((rng.randint(1, 40), rng.randint(40, 220)), (75, 25))[0]
        return prefix + _text(rng, tail)

    def _completion(self, rng: random.Random, body: dict[str, Any]) -> tuple[int, ...]:
        words = self._words(rng)
        ids = tuple(words.encode())
        body["prompt"] = list(ids) if rng.random() < 0.5 else words
        return ids

    def _chat(self, rng: random.Random, body: dict[str, Any]) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        turns: list[tuple[str, list[str | bytes]]] = []
        if rng.random() < 0.3:
            turns.append(("system", [self._prefixes[rng.randrange(3)][:48]]))
        content: list[str | bytes] = [self._words(rng)]
        for _ in range(rng.choices((0, 1, 2), (35, 50, 15))[0]):
            shared = rng.random() < 0.5
            picture = rng.choice(self._pictures) if shared else _picture(rng)
            content.insert(rng.randint(0, len(content)), picture)
        turns.append(("user", content))
        body["messages"] = [{"role": role, "content": _content(parts)} for role, parts in turns]
        return render(turns)


def plain_case(seed: int, number: int, *, max_tokens: int = 24) -> Case:
    """A text of its own in one chunk, with no prefix in common with any other: what happens to its blocks
    happens to it alone."""
    rng = random.Random(f"{seed}/plain/{number}")
    words = f"{number:06d}/{seed} " + _text(rng, rng.randint(40, 80))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=number, ignore_eos=True)
    body = _body_fields(sampling) | {"model": MODEL, "n": 1, "return_token_ids": True, "prompt": words}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Case(number, "/v1/completions", body, tuple(words.encode()), sampling, 1)


def render(turns: list[tuple[str, list[str | bytes]]]) -> tuple[tuple[int, ...], tuple[Media, ...]]:
    """The prompt's ids and its pictures; parts are texts and encoded pictures."""
    ids: list[int] = []
    media: list[Media] = []
    for role, parts in turns:
        ids += [START, *role.encode(), 10]
        for part in parts:
            if isinstance(part, str):
                ids += part.encode()
            else:
                rows = _num_rows(part)
                media.append(Media(len(ids), rows, part))
                ids += [PICTURE] * rows
        ids += [END, 10]
    return (*ids, START, *b"assistant", 10), tuple(media)


def _num_rows(picture: bytes) -> int:
    with Image.open(io.BytesIO(picture)) as image:
        width, height = image.size
    return 4 + (height // 64 + width // 64) % 5


def _content(parts: list[str | bytes]) -> str | list[dict[str, Any]]:
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            url = "data:image/png;base64," + base64.b64encode(part).decode()
            content.append({"type": "image_url", "image_url": {"url": url}})
    return content


def _body_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The body's fields of these parameters; what has its default is left out."""
    plain = SamplingParams(max_tokens=0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    names += ("frequency_penalty", "ignore_eos", "min_tokens")
    fields = {name: value for name in names if (value := getattr(sampling, name)) != getattr(plain, name)}
    fields |= {"max_tokens": sampling.max_tokens, "seed": sampling.seed}
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    return fields


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz     .,\n", k=length))


def _picture(rng: random.Random) -> bytes:
    size = (rng.choice(_SIDES), rng.choice(_SIDES))
    image = Image.new("RGB", size, tuple(rng.choices(range(256), k=3)))
    image.putpixel((rng.randrange(size[0]), rng.randrange(size[1])), (rng.randrange(256), 0, 7))
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()
