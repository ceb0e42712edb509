"""Log-probabilities in OpenAI's two shapes: owns token spelling and offsets; not which tokens are shown."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from typing import Any

from shared.types.inference import Delta
from shared.types.request import TokenLogprobs

#: Each token's bytes, for every id that is to be listed.
TokenBytes = Mapping[int, bytes]

#: JSON has no infinity; OpenAI writes impossible tokens so.
_FLOOR = -9999.0


def listed_ids(delta: Delta) -> set[int]:
    """Every id whose bytes a listing of ``delta`` needs."""
    ids = set(delta.token_ids)
    for entry in delta.logprobs:
        ids.update(entry.top_ids)
    return ids


def shown_logprobs(delta: Delta, *, keep_closing: bool) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
    """Ids and log-probabilities to list. The token that closed a choice has no part in the text, so it
    is left out, that listed tokens joined are the text, unless ``keep_closing``."""
    closed = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
    if closed and not keep_closing:
        return delta.token_ids[:-1], delta.logprobs[:-1]
    return delta.token_ids, delta.logprobs


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], names: TokenBytes
) -> list[dict[str, Any]]:
    """One entry a token: the chosen one and its alternatives."""
    return [
        _entry(token_id, entry.logprob, names)
        | {
            "top_logprobs": [
                _entry(top_id, top_logprob, names)
                for top_id, top_logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ]
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _entry(token_id: int, logprob: float, names: TokenBytes) -> dict[str, Any]:
    data = names[token_id]
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, _FLOOR), "bytes": list(data)}


class CompletionLogprobs:
    """The listing of one choice of a text completion, whose offsets go on from part to part."""

    def __init__(self) -> None:
        self._offset = 0
        self._pending = b""

    def part(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], names: TokenBytes
    ) -> dict[str, list[Any]]:
        """The four parallel lists for the next tokens."""
        return {
            "text_offset": [self._advance(names[token_id]) for token_id in token_ids],
            "token_logprobs": [max(entry.logprob, _FLOOR) for entry in logprobs],
            "tokens": [_spell(names[token_id]) for token_id in token_ids],
            "top_logprobs": [
                {
                    _spell(names[top_id]): max(top_logprob, _FLOOR)
                    for top_id, top_logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                }
                for entry in logprobs
            ],
        }

    def _advance(self, data: bytes) -> int:
        """The character offset at which these bytes begin, an unfinished character counted once whole."""
        offset = self._offset
        text, used = utf_8_decode(self._pending + data, "replace", False)
        self._pending = (self._pending + data)[used:]
        self._offset += len(text)
        return offset


def _spell(data: bytes) -> str:
    """Keys must differ, so a token that is no whole text is spelled by its bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
