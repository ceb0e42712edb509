"""One choice of a request on its way out: token indices, text, stop strings, finish.

Owns what was emitted so far. It knows no workers; whose tokens these are is the attempt's business.
"""

from __future__ import annotations

from shared.errors import DeterminismViolation
from shared.text.stops import ChoiceText
from shared.types.inference import Delta
from shared.types.worker import Tokens


class Choice:
    """``token_ids`` = all that was sent to the client; ``finish_reason`` is set once, at the end;
    ``worker_finished``: the worker ended it by itself."""

    __slots__ = ("_stop_token_ids", "_text", "finish_reason", "index", "token_ids", "worker_finished")

    def __init__(self, index: int, text: ChoiceText, stop_token_ids: tuple[int, ...] = ()) -> None:
        """``stop_token_ids`` as the client asked: only they are reported as a stop reason."""
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.worker_finished = False
        self._text = text
        self._stop_token_ids = stop_token_ids

    def accept(self, event: Tokens) -> Delta:
        """Take new tokens over and return what the client gets of them: up to the one that completed
        a stop string, which finishes the choice here whatever the worker thinks.

        Raises DeterminismViolation when they are not exactly the next ones.
        """
        if event.first_index != len(self.token_ids):
            raise DeterminismViolation(
                f"choice {self.index}: token {event.first_index} came where {len(self.token_ids)} was due"
            )
        token_ids, logprobs, reason = event.token_ids, event.logprobs, event.finish_reason
        piece = self._text.push(token_ids, closed=event.stop_token_id is not None)
        text = piece.text
        stop_reason: str | int | None = piece.stop
        if piece.stop is not None:
            self.worker_finished = bool(reason)
            token_ids, logprobs, reason = token_ids[: piece.num_tokens], logprobs[: piece.num_tokens], "stop"
        elif reason:
            self.worker_finished = True
            text += self._text.finish()
            if event.stop_token_id in self._stop_token_ids:
                stop_reason = event.stop_token_id
        self.token_ids += token_ids
        self.finish_reason = reason
        return Delta(self.index, text, token_ids, logprobs, reason, stop_reason)
