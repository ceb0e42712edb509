"""The contract between scheduler and runner: one frozen plan down, one frozen result up.

Owns the records and their byte codec. Owns no policy and no tensors. A plan says everything that
the runner may act on; nothing reaches back. Plans of step N+1 may be made before step N's tokens
exist: an input token is then LAST_SAMPLED, "the token sampled last for this row".
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from shared.types.request import MediaItem, SamplingParams, TokenLogprobs

#: Stands for a token id that the scheduler does not know yet: the row's last sampled token.
LAST_SAMPLED = -1


class MediaRows(Struct, frozen=True):
    """Where a media item's embedding rows lie: the blocks of the local ``ec`` arena, in order."""

    item: MediaItem
    block_ids: tuple[int, ...]


class NewRow(Struct, frozen=True):
    """A row's whole state, sent once. A row belongs to one choice of one request until freed.

    ``token_ids`` is the history so far (prompt, then emitted tokens): what penalties and the
    random position are functions of. It says nothing about which KV exists.
    """

    row: int
    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    media: tuple[MediaRows, ...] = ()


class RowStep(Struct, frozen=True):
    """Work for one row in this step: compute KV for positions ``first`` .. ``first + len(token_ids)``.

    ``token_ids`` are the inputs at those positions (ids or LAST_SAMPLED). Block tables are kept by
    the runner; before computing, ``blocks[g]`` replaces group g's table from index ``block_start``
    on. ``sample_rows``: the rows whose next token is sampled from the logits after the last
    position - none inside a prompt, the row itself in decode, all choices at the end of a prompt.
    """

    row: int
    first: int
    token_ids: tuple[int, ...]
    block_start: int
    blocks: tuple[tuple[int, ...], ...]
    sample_rows: tuple[int, ...] = ()


class BlockCopy(Struct, frozen=True):
    """Copy one whole extent, before anything of the step is computed (copy-on-write)."""

    group: int
    src: int
    dst: int


class BlockSeal(Struct, frozen=True):
    """A block that is final once this step has run; the result carries its checksums."""

    group: int
    block_id: int


class StepPlan(Struct, frozen=True):
    """One step. Order of effects: free rows, new rows, copies, compute, sample, seal."""

    step_id: int
    free_rows: tuple[int, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    rows: tuple[RowStep, ...] = ()
    seals: tuple[BlockSeal, ...] = ()


class StepResult(Struct, frozen=True):
    """What one step produced. ``rows``/``token_ids``/``logprobs`` are parallel, in the order in
    which the plan's ``sample_rows`` name them; ``logprobs`` holds None where none were asked for.
    ``checksums`` follows the plan's ``seals``, one value a kv_head. A row in ``failed_rows`` had
    non-finite logits: it has no entry in ``rows`` and its KV must not be used."""

    step_id: int
    rows: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    checksums: tuple[tuple[int, ...], ...] = ()
    failed_rows: tuple[int, ...] = ()


class EncodeItem(Struct, frozen=True):
    """One prepared media item: ``data`` is what the processor made of it (uint8 HWC pixels for a
    picture), and the blocks of the ``ec`` arena that take its ``num_rows`` embedding rows."""

    mm_hash: str
    data: bytes
    shape: tuple[int, ...]
    num_rows: int
    block_ids: tuple[int, ...]


class EncodePlan(Struct, frozen=True):
    """One encoder step: a batch of media items."""

    step_id: int
    items: tuple[EncodeItem, ...]


class EncodeResult(Struct, frozen=True):
    """One checksum a media item, over its valid bytes, in the plan's order."""

    step_id: int
    checksums: tuple[int, ...]


T = TypeVar("T", StepPlan, StepResult, EncodePlan, EncodeResult)
Record = StepPlan | StepResult | EncodePlan | EncodeResult
_encoder = msgspec.msgpack.Encoder()


def encode(record: Record) -> bytes:
    """The record as bytes, for a runner in another process."""
    return _encoder.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """The inverse of ``encode``. Raises msgspec.ValidationError on anything else."""
    return msgspec.msgpack.decode(data, type=kind)
