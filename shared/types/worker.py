"""Who a worker is, how loaded it is, and the commands and events of its one stream."""

from __future__ import annotations

from msgspec import Struct

from shared.types.identity import IdentityKey
from shared.types.request import GenerationRequest, TokenLogprobs
from shared.types.transfer import AgentInfo, BlockRef, EcTransferParams, KvTransferParams

KINDS = ("encoder", "prefill", "decode", "kv_store")

#: How a worker treats a started request.
AGGREGATED, PREFILL, DECODE = "aggregated", "prefill", "decode"


class WorkerInfo(Struct, frozen=True):
    """What a worker announces: identity, address of its gRPC server, and its transfer agent.

    ``block_size`` and ``max_model_len`` in tokens. ``pid`` is for humans and tests. ``recalled``: blocks that
    an earlier life of the worker committed are here again.
    """

    worker_id: str
    incarnation: str
    kind: str
    address: str
    model: str
    identity: IdentityKey
    agent: AgentInfo
    block_size: int = 0
    max_model_len: int = 0
    pid: int = 0
    recalled: bool = False


class WorkerStatus(Struct, frozen=True):
    """Load and progress, sent over the stream every half second and after bursts.

    ``turns`` grows as long as the engine's thread is not stuck, idle or not; ``steps`` with each step.
    """

    incarnation: str
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_free: int = 0
    num_blocks_quarantined: int = 0
    num_blocks_held: int = 0
    num_leases: int = 0
    num_cached_tokens: int = 0
    steps: int = 0
    draining: bool = False
    turns: int = 0


# Commands: router -> worker.


class Start(Struct, frozen=True, tag=True):
    """Begin a request. ``mode`` is one of AGGREGATED, PREFILL, DECODE.

    A DECODE start reserves blocks and waits for Attach and Resume.
    """

    request: GenerationRequest
    mode: str
    embeddings: tuple[EcTransferParams, ...] = ()


class Encode(Struct, frozen=True, tag=True):
    """Encode media that was put before (encoder only); a hash already held costs nothing."""

    request_id: str
    mm_hashes: tuple[str, ...]
    traceparent: str = ""


class Attach(Struct, frozen=True, tag=True):
    """Finished blocks of the prefill worker, to be pulled now."""

    request_id: str
    params: KvTransferParams


class Resume(Struct, frozen=True, tag=True):
    """The handoff is complete: ``num_blocks`` blocks (of each group) were attached in all; go on from
    these first tokens, one a choice, in the order of the request's choices."""

    request_id: str
    tokens: tuple[int, ...]
    num_blocks: int
    finished: tuple[bool, ...] = ()


class Renew(Struct, frozen=True, tag=True):
    """Renew the leases of these handoffs, and of these requests."""

    handoff_ids: tuple[str, ...]
    request_ids: tuple[str, ...] = ()


class Abort(Struct, frozen=True, tag=True):
    """Stop a request wherever it is and give everything back; unknown ids are ignored.
    ``choices`` narrows it to these choices (none named: all)."""

    request_id: str
    choices: tuple[int, ...] = ()


class Drain(Struct, frozen=True, tag=True):
    """Take no new work; finish what runs."""


Command = Start | Encode | Attach | Resume | Renew | Abort | Drain


# Events: worker -> router.


class Reserved(Struct, frozen=True, tag=True):
    """Decode holds blocks for the prompt; ``num_blocks_held`` of them, counted from the first, were
    already there (local prefix hit) and need no transfer."""

    request_id: str
    num_blocks_held: int
    num_blocks: int


class BlocksCommitted(Struct, frozen=True, tag=True):
    """Blocks of a PREFILL request that are final in the producer's memory."""

    request_id: str
    handoff_id: str
    group: int
    first: int
    blocks: tuple[BlockRef, ...]


class HandoffReady(Struct, frozen=True, tag=True):
    """Everything of the request is committed and held under a lease. Prefill: ``num_blocks`` in all.
    Encoder: one EcTransferParams a media item, in the order asked."""

    request_id: str
    handoff_id: str
    num_blocks: int = 0
    embeddings: tuple[EcTransferParams, ...] = ()
    num_cached_tokens: int = 0


class Tokens(Struct, frozen=True, tag=True):
    """New tokens of one choice. ``first_index`` counts emitted tokens from the start of the answer,
    so that a repeat or a gap is detectable."""

    request_id: str
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""
    stop_token_id: int | None = None
    num_cached_tokens: int = 0


class Released(Struct, frozen=True, tag=True):
    """The worker holds nothing for this request any more."""

    request_id: str


class Failed(Struct, frozen=True, tag=True):
    """The request ended here without an answer; ``retryable`` = it may go on elsewhere. ``param`` = the
    field of the client's request that is to blame, if one is."""

    request_id: str
    code: str
    message: str
    retryable: bool
    param: str = ""


class Status(Struct, frozen=True, tag=True):
    status: WorkerStatus


class KvEvents(Struct, frozen=True, tag=True):
    """Changes of the set of cached block hashes, in order; ``sequence`` shows gaps."""

    sequence: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


RequestEvent = Reserved | BlocksCommitted | HandoffReady | Tokens | Released | Failed
Event = RequestEvent | Status | KvEvents
