"""One choice of one request while it is being computed: counts and ids, never tensors.

A sequence has tokens computed and tokens wanted; a step closes the gap. There are no phases.

    0 ........ num_computed ........ len(tokens) ........ num_tokens
    KV exists (or is in flight) |  known, to compute  |  sampled in flight, id unknown
"""

from __future__ import annotations

from shared.step import LAST_SAMPLED, MediaRows
from shared.types.request import GenerationRequest
from shared.types.worker import PREFILL


class Sequence:
    """State of one choice. Owned by the engine thread; mutated by the scheduler and the handoff only."""

    __slots__ = (
        "arrival",
        "children",
        "choice",
        "closing",
        "finish_reason",
        "inflight",
        "key",
        "kv_open",
        "media",
        "mode",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_sampled",
        "preempt_pending",
        "preemptions",
        "request",
        "row",
        "sent_blocks",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, choice: int, mode: str, arrival: int) -> None:
        self.request = request
        self.choice = choice
        self.mode = mode
        self.arrival = arrival
        self.key = f"{request.request_id}/{choice}"
        self.tokens = list(request.token_ids)
        self.num_computed = 0
        self.num_pending = 0
        self.num_sampled = 0
        self.num_cached = 0
        self.inflight = 0
        self.row = -1
        self.sent_blocks = 0
        self.preemptions = 0
        self.preempt_pending = False
        self.closing = False
        self.finish_reason = ""
        self.kv_open = False
        self.media: tuple[MediaRows, ...] = ()
        #: Choices that share this sequence's prompt and fork from it at its end.
        self.children: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens known plus tokens sampled whose ids are still in flight."""
        return len(self.tokens) + self.num_pending

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer whose ids are known."""
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Scheduling order: lower priority value first, then arrival."""
        return (self.request.priority, self.arrival)

    @property
    def recomputable(self) -> bool:
        """Whether this worker holds everything to compute the prompt's KV itself."""
        return not self.request.media or bool(self.media)

    @property
    def done(self) -> bool:
        """No more work may be scheduled."""
        return self.closing or bool(self.finish_reason)

    def wants_step(self, max_model_len: int) -> bool:
        """Whether a step may compute something now, given what is already in flight."""
        if self.done or self.preempt_pending or self.num_computed >= self.num_tokens:
            return False
        if self.num_pending == 0:
            return True
        if self.mode == PREFILL:
            return False
        emitted = self.num_emitted + self.num_pending
        return emitted < self.request.sampling.max_tokens and self.num_tokens < max_model_len

    def inputs(self, count: int) -> tuple[int, ...]:
        """Input ids at positions num_computed .. num_computed + count."""
        first = self.num_computed
        known = self.tokens[first : first + count]
        return (*known, *([LAST_SAMPLED] * (count - len(known))))

    def restart(self) -> None:
        """Forget all KV and the row: the sequence will be computed anew from its known tokens."""
        self.num_computed = 0
        self.num_cached = 0
        self.sent_blocks = 0
        self.row = -1
        self.kv_open = False
        self.preempt_pending = False


def finish_reason_for(
    sequence: Sequence, token_id: int, eos_token_ids: frozenset[int], max_model_len: int
) -> tuple[str, int | None]:
    """(finish reason or "", stop token id) after ``token_id`` was appended to the sequence's tokens."""
    sampling = sequence.request.sampling
    if token_id in eos_token_ids and not sampling.ignore_eos:
        return "stop", token_id
    if token_id in sampling.stop_token_ids:
        return "stop", token_id
    if sequence.num_emitted >= sampling.max_tokens or len(sequence.tokens) >= max_model_len:
        return "length", None
    return "", None
