"""One client request from acceptance to its last output, over as many attempts as it takes.

Owns the choices, the outputs that the client has not taken yet, and the decision what to do when an
attempt fails: go on elsewhere as a longer prompt, or end with a typed error. Which workers serve an
attempt is the dispatcher's decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from services.router.attempt import Attempt
from services.router.choice import Choice
from services.router.intake import Order
from services.router.probe import RequestProbe
from shared.config.services import RoutingConfig
from shared.errors import Cancelled, InternalError, TriptychError
from shared.routing.workers import Worker
from shared.types.inference import Accepted, Output, Usage
from shared.types.request import GenerationRequest
from shared.types.worker import Tokens

#: Pause before the second, third, ... try after a failure that was no crash; doubled each time.
BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


class Attempts(Protocol):
    """Who places attempts and delivers their events."""

    def submit(self, attempt: Attempt) -> None:
        """Place it now or as soon as workers allow."""

    def forget(self, attempt: Attempt) -> None:
        """No event of it is wanted any more."""

    def now(self) -> float: ...


class Flight:
    """``deadline`` in clock seconds. ``media``: raw bytes by mm_hash, kept for encoding again elsewhere."""

    def __init__(
        self,
        desk: Attempts,
        config: RoutingConfig,
        order: Order,
        deadline: float,
        probe: RequestProbe,
    ) -> None:
        self._desk = desk
        self._config = config
        self._base = order.request
        self._choices = order.choices
        self._num_attempts = 0
        self._attempts: dict[str, Attempt] = {}
        self._outputs: list[Output] = [order.accepted]
        self._waiter: asyncio.Future[None] | None = None
        self._crashes: set[str] = set()
        self._num_cached_tokens = 0
        self._error: TriptychError | None = None
        self._done = False
        self._closed = False
        self._probe = probe
        self.deadline = deadline
        self.media = order.media_data
        self.traceparent = order.request.traceparent

    def start(self) -> None:
        """Send all choices off together."""
        self._launch(self._choices, 0, frozenset(), 0.0)

    async def next_outputs(self) -> list[Output]:
        """What came since the last call, at least one output; empty once everything was given.

        Raises the error that ended the request, after the outputs before it. The acceptance comes
        with the first token, so that a request that fails before it has sent nothing.
        """
        if self._error is None and not self._done and not self._has_news():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._has_news() or self._done:
            outputs, self._outputs = self._outputs, []
            return outputs
        raise self._error or Cancelled("the request was closed")

    def close(self) -> None:
        """The client is gone or served: abort what still runs. Calling it twice is safe."""
        if self._closed:
            return
        self._closed = True
        for attempt in list(self._attempts.values()):
            attempt.close()
        error = None if self._done else self._error or Cancelled("the client went away")
        self._probe.ended(error, self._num_tokens())
        self._wake()

    def fail(self, error: TriptychError) -> None:
        """End with ``error``; the outputs so far are still given."""
        if self._error is None and not self._done:
            self._error = error
            self.close()

    def emit(self, choice: Choice, event: Tokens) -> None:
        """New tokens of a choice. Raises DeterminismViolation when they do not follow."""
        delta = choice.accept(event)
        self._probe.tokens(choice.index)
        self._outputs.append(delta)
        if delta.finish_reason and all(c.finish_reason for c in self._choices):
            self._done = True
            usage = Usage(self._base.num_prompt_tokens, self._num_tokens(), self._num_cached_tokens)
            self._outputs.append(usage)
        self._wake()

    def prefix_cached(self, attempt: Attempt, num_tokens: int) -> None:
        """What the first attempt found in a prefix cache; later ones only find their own prompt."""
        if attempt.number == 0:
            self._num_cached_tokens = min(num_tokens, self._base.num_prompt_tokens)

    def request_for(self, attempt: Attempt) -> GenerationRequest:
        """The worker-level request of an attempt that is about to begin."""
        base = self._base
        emitted = tuple(attempt.choices[0].token_ids)
        return GenerationRequest(
            request_id=attempt.id,
            model=base.model,
            token_ids=base.token_ids + emitted,
            num_prompt_tokens=base.num_prompt_tokens,
            sampling=base.sampling,
            num_emitted=len(emitted),
            choices=tuple(c.index for c in attempt.choices),
            media=base.media,
            cache_salt=base.cache_salt,
            adapter=base.adapter,
            priority=base.priority,
            deadline_s=max(self.deadline - self._desk.now(), 0.001),
            traceparent=self.traceparent,
        )

    def attempt_closed(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.id, None)
        self._desk.forget(attempt)

    def attempt_failed(
        self, attempt: Attempt, worker: Worker, error: TriptychError, *, retryable: bool, crashed: bool
    ) -> None:
        """Go on elsewhere, unless the error is final or the request has been moved enough."""
        if self._closed:
            return
        if crashed:
            self._crashes.add(worker.key)
        if not (retryable and self._config.recovery) or attempt.number >= self._config.recovery_limit:
            self.fail(error)
        elif len(self._crashes) >= self._config.crash_limit:
            self.fail(InternalError("the request was at too many crashes", code="request_quarantined"))
        else:
            self._probe.migrated(worker.info.kind)
            self._relaunch(attempt, worker)

    def _relaunch(self, attempt: Attempt, worker: Worker) -> None:
        """One attempt for each choice once anything was emitted, else all together."""
        open_choices = attempt.open_choices
        together = not any(c.token_ids for c in open_choices)
        groups = [open_choices] if together else [[c] for c in open_choices]
        pause = 0.0 if worker.lost else min(BACKOFF_S * 2**attempt.number, MAX_BACKOFF_S)
        for group in groups:
            self._launch(group, attempt.number + 1, attempt.avoid | {worker.key}, pause)

    def _launch(self, choices: Sequence[Choice], number: int, avoid: frozenset[str], pause_s: float) -> None:
        if self._closed:
            return
        attempt_id = f"{self._base.request_id}-{self._num_attempts}"
        self._num_attempts += 1
        now = self._desk.now()
        attempt = Attempt(self, attempt_id, choices, number, avoid, now + pause_s, now)
        self._attempts[attempt_id] = attempt
        self._desk.submit(attempt)

    def _has_news(self) -> bool:
        """Whether there is more than the acceptance alone."""
        return len(self._outputs) > 1 or (len(self._outputs) == 1 and type(self._outputs[0]) is not Accepted)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self._choices)
