"""The reader's side of a handoff: a decode worker reserves, pulls, verifies, commits and goes on.

A request here waits for blocks and for its first tokens. Whatever did not arrive whole is computed
locally: the sequence simply starts with fewer computed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.engine.desk import PullDesk
from shared.engine.landing import Landing
from shared.engine.observe import observe_pull
from shared.errors import OutOfBlocks
from shared.kv_cache.manager import KVCacheManager
from shared.scheduler.sequence import Sequence
from shared.telemetry.tracing import Span, Tracer
from shared.transfer.handoff import PullOutcome
from shared.types.request import GenerationRequest
from shared.types.transfer import AgentInfo
from shared.types.worker import DECODE, Attach, Released, RequestEvent, Reserved, Resume


@dataclass(slots=True)
class Receiving:
    """One request on its way in."""

    request: GenerationRequest
    key: str
    span: Span
    landing: Landing | None = None
    attached: list[Attach] = field(default_factory=list)
    resume: Resume | None = None
    producer: AgentInfo | None = None
    handoff_id: str = ""
    aborted_choices: set[int] = field(default_factory=set)


class Intake:
    """Requests that a decode worker is receiving. Engine thread only.

    ``arrived(request, sequences)`` is called when a request is whole, with one sequence a choice
    that is still open; ``lost(request, why)`` when it cannot go on here.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        desk: PullDesk,
        emit: Callable[[RequestEvent], None],
        tracer: Tracer,
        deadline_s: float,
        *,
        arrived: Callable[[GenerationRequest, dict[int, Sequence]], None],
        lost: Callable[[GenerationRequest, str], None],
    ) -> None:
        self._kv = kv
        self._desk = desk
        self._emit = emit
        self._tracer = tracer
        self._deadline_s = deadline_s
        self._arrived = arrived
        self._lost = lost
        self._receiving: dict[str, Receiving] = {}
        self._unreserved: list[Receiving] = []
        self._arrivals = 0

    @property
    def num_receiving(self) -> int:
        return len(self._receiving)

    def start(self, request: GenerationRequest) -> None:
        """Reserve blocks for the whole prompt, now or as soon as there are enough."""
        span = self._tracer.span("kv.transfer", parent=request.traceparent)
        receiving = Receiving(request, f"{request.request_id}/in", span)
        self._receiving[request.request_id] = receiving
        self._unreserved.append(receiving)
        self.retry()

    def retry(self) -> None:
        """Reserve for those that wait, in order of arrival, as far as the pool allows."""
        while self._unreserved and self._reserve(self._unreserved[0]):
            receiving = self._unreserved.pop(0)
            for attach in receiving.attached:
                self._pull(receiving, attach)
            receiving.attached.clear()
            self._finish_if_whole(receiving)

    def attach(self, command: Attach) -> None:
        """Pull these blocks; unknown requests are ignored (aborted meanwhile)."""
        receiving = self._receiving.get(command.request_id)
        if receiving is None:
            return
        receiving.producer = command.params.producer
        receiving.handoff_id = command.params.handoff_id
        if receiving.landing is None:
            receiving.attached.append(command)
        else:
            self._pull(receiving, command)

    def resume(self, command: Resume) -> None:
        """The first tokens are known and all blocks were attached."""
        receiving = self._receiving.get(command.request_id)
        if receiving is not None:
            receiving.resume = command
            self._finish_if_whole(receiving)

    def abort(self, request_id: str, choices: tuple[int, ...]) -> bool:
        """Give everything back (or drop single choices); False when the request is not here."""
        receiving = self._receiving.get(request_id)
        if receiving is None:
            return False
        receiving.aborted_choices.update(choices or receiving.request.choices)
        if receiving.aborted_choices.issuperset(receiving.request.choices):
            self._drop(receiving)
            self._emit(Released(request_id))
        return True

    def receives(self, request_id: str) -> bool:
        """Whether the request is being received now."""
        return request_id in self._receiving

    def request_ids(self) -> list[str]:
        """Requests being received now."""
        return list(self._receiving)

    # -- inside -------------------------------------------------------------------------------

    def _reserve(self, receiving: Receiving) -> bool:
        request = receiving.request
        num_tokens = len(request.token_ids)
        held = self._kv.open(
            receiving.key,
            request.token_ids,
            request.media,
            request.cache_salt,
            request.adapter,
            max_cached_tokens=num_tokens,
        )
        try:
            self._kv.reserve(receiving.key, num_tokens, writable_from=held)
        except OutOfBlocks:
            self._kv.close(receiving.key)
            return False
        num_held = held // self._kv.spec.block_size
        receiving.landing = Landing(
            receiving.key,
            num_held,
            self._kv,
            self._desk,
            self._deadline_s,
            lambda outcome: self._on_landed(receiving, outcome),
            num_tokens,
        )
        self._emit(Reserved(request.request_id, num_held, self._kv.spec.num_blocks_for(num_tokens)))
        return True

    def _pull(self, receiving: Receiving, attach: Attach) -> None:
        landing, params = receiving.landing, attach.params
        if landing is not None:
            landing.pull(params.producer, params.group, params.first, params.blocks)

    def _on_landed(self, receiving: Receiving, outcome: PullOutcome) -> None:
        observe_pull("kv", outcome)
        if self._receiving.get(receiving.request.request_id) is receiving:
            self._finish_if_whole(receiving)

    def _finish_if_whole(self, receiving: Receiving) -> None:
        landing = receiving.landing
        if receiving.resume is None or landing is None or not landing.idle:
            return
        request = receiving.request
        if landing.lost:
            self._drop(receiving)
            self._lost(request, "no blocks left to receive into")
            return
        if self._num_computed(receiving, landing) < media_end(request):
            # We hold no embeddings, so what is missing cannot be computed here.
            self._drop(receiving)
            self._lost(request, "blocks of the media did not arrive")
            return
        sequences = self._commit(receiving, landing, receiving.resume)
        self._release_producer(receiving)
        del self._receiving[request.request_id]
        receiving.span.set("kv.bytes", landing.nbytes)
        receiving.span.set("kv.blocks_held", landing.num_held)
        receiving.span.set("transfer.backend", landing.backend)
        receiving.span.end()
        self._arrived(request, sequences)

    def _num_computed(self, receiving: Receiving, landing: Landing) -> int:
        """Tokens of the prompt whose KV is here and verified."""
        spec, num_tokens = self._kv.spec, len(receiving.request.token_ids)
        return min(landing.num_valid(spec.num_blocks_for(num_tokens)) * spec.block_size, num_tokens)

    def _commit(self, receiving: Receiving, landing: Landing, resume: Resume) -> dict[int, Sequence]:
        """Publish what landed, then fork one sequence a choice off it."""
        request, spec = receiving.request, self._kv.spec
        num_computed = self._num_computed(receiving, landing)
        # The tail will be filled by us, so its producer's checksum ends here.
        full = num_computed // spec.block_size
        self._kv.commit(receiving.key, full * spec.block_size, landing.checksums(full))
        sequences: dict[int, Sequence] = {}
        self._arrivals += 1
        finished = resume.finished or (False,) * len(resume.tokens)
        for choice, token, over in zip(request.choices, resume.tokens, finished, strict=True):
            if over or choice in receiving.aborted_choices:
                continue
            sequence = Sequence(request, choice, DECODE, self._arrivals)
            self._kv.fork(receiving.key, sequence.key)
            self._kv.append(sequence.key, (token,))
            sequence.tokens.append(token)
            sequence.kv_open = True
            sequence.num_computed = num_computed
            sequence.num_cached = min(landing.num_held * spec.block_size, num_computed)
            sequences[choice] = sequence
        self._kv.close(receiving.key)
        return sequences

    def _release_producer(self, receiving: Receiving) -> None:
        if receiving.producer is not None:
            self._desk.notify(receiving.producer, receiving.handoff_id.encode())

    def _drop(self, receiving: Receiving) -> None:
        del self._receiving[receiving.request.request_id]
        if receiving in self._unreserved:
            self._unreserved.remove(receiving)
        if receiving.landing is not None:
            receiving.landing.close()
        receiving.span.end()


def media_end(request: GenerationRequest) -> int:
    """Where the last placeholder position ends; 0 without media. The KV before it takes embeddings."""
    return max((item.offset + item.num_tokens for item in request.media), default=0)
