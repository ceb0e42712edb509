"""Wire <-> types for a worker's events (``worker.proto``).

A run of Tokens events travels as one message of flat columns: this is the path every token takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shared.errors import InvalidRequest
from shared.rpc import checks
from shared.rpc.convert_common import block_from_wire, block_to_wire, ec_params_from_wire, ec_params_to_wire
from shared.rpc.convert_request import (
    FINISH_FROM_WIRE,
    FINISH_TO_WIRE,
    logprobs_from_wire,
    logprobs_to_wire,
)
from shared.rpc.convert_worker import status_from_wire, status_to_wire
from shared.types.worker import (
    BlocksCommitted,
    Event,
    Failed,
    HandoffReady,
    KvEvents,
    Released,
    Reserved,
    Status,
    Tokens,
)
from triptych.v1 import worker_pb2 as pb

MAX_ROWS = 1 << 16
#: Most events that ``events_to_wire`` puts into one wire event.
RUN_LENGTH = 1024


def events_to_wire(events: Sequence[Event]) -> list[pb.Event]:
    """The events in order; runs of Tokens become one wire event each."""
    wire: list[pb.Event] = []
    run: list[Tokens] = []
    for event in events:
        if type(event) is Tokens:
            run.append(event)
            if len(run) == RUN_LENGTH:
                wire.append(_tokens_to_wire(run))
                run = []
            continue
        if run:
            wire.append(_tokens_to_wire(run))
            run = []
        wire.append(_EVENT_TO_WIRE[type(event)](event))
    if run:
        wire.append(_tokens_to_wire(run))
    return wire


def events_from_wire(wire: Iterable[pb.Event]) -> list[Event]:
    """Raises InvalidRequest, also for a kind of event that this build does not know."""
    events: list[Event] = []
    for entry in wire:
        kind = entry.WhichOneof("event")
        if kind == "tokens":
            _tokens_from_wire(entry.tokens, events)
        elif kind is None:
            raise checks.refuse("event", "is of an unknown kind")
        else:
            events.append(_EVENT_FROM_WIRE[kind](getattr(entry, kind)))
    return events


# Tokens.


def _tokens_to_wire(run: list[Tokens]) -> pb.Event:
    counts = [len(tokens.token_ids) for tokens in run]
    if counts.count(1) == len(run):
        counts = []
        token_ids = [tokens.token_ids[0] for tokens in run]
    else:
        token_ids = [token for tokens in run for token in tokens.token_ids]
    return pb.Event(
        tokens=pb.Tokens(
            request_ids=[tokens.request_id for tokens in run],
            choices=[tokens.choice for tokens in run],
            first_indices=[tokens.first_index for tokens in run],
            counts=counts,
            token_ids=token_ids,
            details=[
                _detail_to_wire(row, tokens)
                for row, tokens in enumerate(run)
                if tokens.finish_reason
                or tokens.logprobs
                or tokens.num_cached_tokens
                or tokens.stop_token_id is not None
            ],
        )
    )


def _detail_to_wire(row: int, tokens: Tokens) -> pb.TokensDetail:
    return pb.TokensDetail(
        row=row,
        finish_reason=FINISH_TO_WIRE[tokens.finish_reason],
        stop_token_id=tokens.stop_token_id,
        num_cached_tokens=tokens.num_cached_tokens,
        logprobs=[logprobs_to_wire(entry) for entry in tokens.logprobs],
    )


def _tokens_from_wire(wire: pb.Tokens, events: list[Event]) -> None:
    request_ids = checks.ids("request_ids", wire.request_ids, MAX_ROWS)
    token_ids = checks.token_ids("token_ids", wire.token_ids)
    choices, firsts = list(wire.choices), list(wire.first_indices)
    rows = len(request_ids)
    if len(choices) != rows or len(firsts) != rows:
        raise checks.refuse("tokens", "has columns of unequal lengths")
    start = len(events)
    if not wire.counts:
        if len(token_ids) != rows:
            raise checks.refuse("token_ids", "must be one a row")
        events.extend(
            [
                Tokens(request_id, choice, first, (token,))
                for request_id, choice, first, token in zip(
                    request_ids, choices, firsts, token_ids, strict=True
                )
            ]
        )
    else:
        counts = list(wire.counts)
        if len(counts) != rows or sum(counts) != len(token_ids):
            raise checks.refuse("counts", "does not add up to token_ids")
        at = 0
        for request_id, choice, first, number in zip(request_ids, choices, firsts, counts, strict=True):
            events.append(Tokens(request_id, choice, first, token_ids[at : at + number]))
            at += number
    last = -1
    for detail in wire.details:
        if not last < detail.row < rows:
            raise checks.refuse("details.row", "is out of range or order")
        last = detail.row
        plain = events[start + last]
        if not isinstance(plain, Tokens):  # unreachable: the rows above are Tokens
            raise InvalidRequest("tokens are malformed")
        events[start + last] = _detail_from_wire(plain, detail)


def _detail_from_wire(plain: Tokens, wire: pb.TokensDetail) -> Tokens:
    if wire.logprobs and len(wire.logprobs) != len(plain.token_ids):
        raise checks.refuse("details.logprobs", "must be empty or one a token")
    return Tokens(
        plain.request_id,
        plain.choice,
        plain.first_index,
        plain.token_ids,
        logprobs=tuple([logprobs_from_wire(entry) for entry in wire.logprobs]),
        finish_reason=checks.member("finish_reason", wire.finish_reason, FINISH_FROM_WIRE),
        stop_token_id=wire.stop_token_id if wire.HasField("stop_token_id") else None,
        num_cached_tokens=wire.num_cached_tokens,
    )


# The other events.


def _reserved_to_wire(e: Reserved) -> pb.Event:
    return pb.Event(
        reserved=pb.Reserved(
            request_id=e.request_id, num_blocks_held=e.num_blocks_held, num_blocks=e.num_blocks
        )
    )


def _committed_to_wire(e: BlocksCommitted) -> pb.Event:
    return pb.Event(
        blocks_committed=pb.BlocksCommitted(
            request_id=e.request_id,
            handoff_id=e.handoff_id,
            group=e.group,
            first=e.first,
            blocks=[block_to_wire(block) for block in e.blocks],
        )
    )


def _handoff_to_wire(e: HandoffReady) -> pb.Event:
    return pb.Event(
        handoff_ready=pb.HandoffReady(
            request_id=e.request_id,
            handoff_id=e.handoff_id,
            num_blocks=e.num_blocks,
            embeddings=[ec_params_to_wire(params) for params in e.embeddings],
            num_cached_tokens=e.num_cached_tokens,
        )
    )


def _failed_to_wire(e: Failed) -> pb.Event:
    return pb.Event(
        failed=pb.Failed(
            request_id=e.request_id,
            code=e.code,
            message=e.message[: checks.MAX_NAME_CHARS],
            retryable=e.retryable,
            param=e.param[: checks.MAX_ID_CHARS],
        )
    )


def _kv_events_to_wire(e: KvEvents) -> pb.Event:
    return pb.Event(kv_events=pb.KvEvents(sequence=e.sequence, stored=e.stored, removed=e.removed))


_EVENT_TO_WIRE: dict[type[Any], Callable[[Any], pb.Event]] = {
    Reserved: _reserved_to_wire,
    BlocksCommitted: _committed_to_wire,
    HandoffReady: _handoff_to_wire,
    Released: lambda e: pb.Event(released=pb.Released(request_id=e.request_id)),
    Failed: _failed_to_wire,
    Status: lambda e: pb.Event(status=pb.Status(status=status_to_wire(e.status))),
    KvEvents: _kv_events_to_wire,
}


def _reserved_from_wire(wire: pb.Reserved) -> Reserved:
    return Reserved(checks.request_id(wire.request_id), wire.num_blocks_held, wire.num_blocks)


def _committed_from_wire(wire: pb.BlocksCommitted) -> BlocksCommitted:
    checks.count("blocks", wire.blocks, checks.MAX_BLOCKS)
    return BlocksCommitted(
        request_id=checks.request_id(wire.request_id),
        handoff_id=checks.text("handoff_id", wire.handoff_id, checks.MAX_ID_CHARS, required=True),
        group=checks.number("group", wire.group, checks.MAX_GROUPS),
        first=checks.number("first", wire.first, checks.MAX_TOKENS),
        blocks=tuple([block_from_wire(block) for block in wire.blocks]),
    )


def _handoff_from_wire(wire: pb.HandoffReady) -> HandoffReady:
    checks.count("embeddings", wire.embeddings, checks.MAX_ITEMS)
    return HandoffReady(
        request_id=checks.request_id(wire.request_id),
        handoff_id=checks.text("handoff_id", wire.handoff_id, checks.MAX_ID_CHARS),
        num_blocks=checks.number("num_blocks", wire.num_blocks, checks.MAX_BLOCKS),
        embeddings=tuple([ec_params_from_wire(params) for params in wire.embeddings]),
        num_cached_tokens=wire.num_cached_tokens,
    )


def _failed_from_wire(wire: pb.Failed) -> Failed:
    return Failed(
        request_id=checks.request_id(wire.request_id),
        code=checks.text("code", wire.code, checks.MAX_ID_CHARS),
        message=checks.text("message", wire.message),
        retryable=wire.retryable,
        param=checks.text("param", wire.param, checks.MAX_ID_CHARS),
    )


def _status_from_wire(wire: pb.Status) -> Status:
    checks.present(wire, "status")
    return Status(status_from_wire(wire.status))


def _kv_events_from_wire(wire: pb.KvEvents) -> KvEvents:
    return KvEvents(
        wire.sequence, checks.hashes("stored", wire.stored), checks.hashes("removed", wire.removed)
    )


_EVENT_FROM_WIRE: dict[str, Callable[[Any], Event]] = {
    "reserved": _reserved_from_wire,
    "blocks_committed": _committed_from_wire,
    "handoff_ready": _handoff_from_wire,
    "released": lambda wire: Released(checks.request_id(wire.request_id)),
    "failed": _failed_from_wire,
    "status": _status_from_wire,
    "kv_events": _kv_events_from_wire,
}
