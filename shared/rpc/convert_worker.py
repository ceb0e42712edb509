"""Wire <-> types for workers: info, status, commands (``common.proto``, ``worker.proto``).

Events have a module of their own, ``convert_events``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.errors import InvalidRequest
from shared.rpc import checks
from shared.rpc.convert_common import (
    agent_from_wire,
    agent_to_wire,
    ec_params_from_wire,
    ec_params_to_wire,
    identity_from_wire,
    identity_to_wire,
    kv_params_from_wire,
    kv_params_to_wire,
)
from shared.rpc.convert_request import request_from_wire, request_to_wire
from shared.types.worker import (
    AGGREGATED,
    DECODE,
    PREFILL,
    Abort,
    Attach,
    Command,
    Drain,
    Encode,
    Renew,
    Resume,
    Start,
    WorkerInfo,
    WorkerStatus,
)
from triptych.v1 import common_pb2 as common
from triptych.v1 import worker_pb2 as pb

_KIND_TO_WIRE: dict[str, common.WorkerKind.ValueType] = {
    "encoder": common.WORKER_KIND_ENCODER,
    "prefill": common.WORKER_KIND_PREFILL,
    "decode": common.WORKER_KIND_DECODE,
    "kv_store": common.WORKER_KIND_KV_STORE,
}
_KIND_FROM_WIRE: dict[int, str] = {number: kind for kind, number in _KIND_TO_WIRE.items()}
_MODE_TO_WIRE: dict[str, pb.StartMode.ValueType] = {
    AGGREGATED: pb.START_MODE_AGGREGATED,
    PREFILL: pb.START_MODE_PREFILL,
    DECODE: pb.START_MODE_DECODE,
}
_MODE_FROM_WIRE: dict[int, str] = {number: mode for mode, number in _MODE_TO_WIRE.items()}


def info_to_wire(info: WorkerInfo) -> common.WorkerInfo:
    return common.WorkerInfo(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        kind=_KIND_TO_WIRE[info.kind],
        address=info.address,
        model=info.model,
        identity=identity_to_wire(info.identity),
        agent=agent_to_wire(info.agent),
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        pid=info.pid,
        recalled=info.recalled,
    )


def info_from_wire(wire: common.WorkerInfo) -> WorkerInfo:
    checks.present(wire, "identity")
    checks.present(wire, "agent")
    return WorkerInfo(
        worker_id=checks.text("worker_id", wire.worker_id, checks.MAX_ID_CHARS, required=True),
        incarnation=checks.text("incarnation", wire.incarnation, checks.MAX_ID_CHARS, required=True),
        kind=checks.member("kind", wire.kind, _KIND_FROM_WIRE),
        address=checks.text("address", wire.address, required=True),
        model=checks.text("model", wire.model),
        identity=identity_from_wire(wire.identity),
        agent=agent_from_wire(wire.agent),
        block_size=wire.block_size,
        max_model_len=wire.max_model_len,
        pid=wire.pid,
        recalled=wire.recalled,
    )


def status_to_wire(status: WorkerStatus) -> common.WorkerStatus:
    return common.WorkerStatus(
        incarnation=status.incarnation,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_blocks=status.num_blocks,
        num_blocks_free=status.num_blocks_free,
        num_blocks_quarantined=status.num_blocks_quarantined,
        num_blocks_held=status.num_blocks_held,
        num_leases=status.num_leases,
        num_cached_tokens=status.num_cached_tokens,
        steps=status.steps,
        turns=status.turns,
        draining=status.draining,
    )


def status_from_wire(wire: common.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        incarnation=checks.text("incarnation", wire.incarnation, checks.MAX_ID_CHARS),
        num_running=wire.num_running,
        num_waiting=wire.num_waiting,
        num_blocks=wire.num_blocks,
        num_blocks_free=wire.num_blocks_free,
        num_blocks_quarantined=wire.num_blocks_quarantined,
        num_blocks_held=wire.num_blocks_held,
        num_leases=wire.num_leases,
        num_cached_tokens=wire.num_cached_tokens,
        steps=wire.steps,
        turns=wire.turns,
        draining=wire.draining,
    )


def command_to_wire(command: Command) -> pb.Command:
    """Raises InvalidRequest when a value does not fit the wire at all (a negative token id)."""
    try:
        return _COMMAND_TO_WIRE[type(command)](command)
    except ValueError as error:
        raise InvalidRequest("a command does not fit the wire") from error


def _start_to_wire(c: Start) -> pb.Command:
    start = pb.Start(request=request_to_wire(c.request), mode=_MODE_TO_WIRE[c.mode])
    start.embeddings.extend([ec_params_to_wire(params) for params in c.embeddings])
    return pb.Command(start=start)


def _encode_to_wire(c: Encode) -> pb.Command:
    return pb.Command(
        encode=pb.Encode(request_id=c.request_id, mm_hashes=c.mm_hashes, traceparent=c.traceparent)
    )


def _attach_to_wire(c: Attach) -> pb.Command:
    return pb.Command(attach=pb.Attach(request_id=c.request_id, params=kv_params_to_wire(c.params)))


def _resume_to_wire(c: Resume) -> pb.Command:
    return pb.Command(
        resume=pb.Resume(
            request_id=c.request_id, tokens=c.tokens, num_blocks=c.num_blocks, finished=c.finished
        )
    )


_COMMAND_TO_WIRE: dict[type[Any], Callable[[Any], pb.Command]] = {
    Start: _start_to_wire,
    Encode: _encode_to_wire,
    Attach: _attach_to_wire,
    Resume: _resume_to_wire,
    Renew: lambda c: pb.Command(renew=pb.Renew(handoff_ids=c.handoff_ids, request_ids=c.request_ids)),
    Abort: lambda c: pb.Command(abort=pb.Abort(request_id=c.request_id, choices=c.choices)),
    Drain: lambda c: pb.Command(drain=pb.Drain()),
}


def command_from_wire(wire: pb.Command) -> Command:
    """Raises InvalidRequest, also for a kind of command that this build does not know."""
    kind = wire.WhichOneof("command")
    if kind is None:
        raise checks.refuse("command", "is of an unknown kind")
    return _COMMAND_FROM_WIRE[kind](getattr(wire, kind))


def command_request_id(wire: pb.Command) -> str:
    """The request that a command speaks of, also of one that is refused; empty when it names none."""
    match wire.WhichOneof("command"):
        case "start":
            name = wire.start.request.request_id
        case "encode" | "attach" | "resume" | "abort" as kind:
            name = getattr(wire, kind).request_id
        case _:
            name = ""
    return name if len(name) <= checks.MAX_ID_CHARS else ""


def _start_from_wire(wire: pb.Start) -> Start:
    checks.present(wire, "request")
    checks.count("embeddings", wire.embeddings, checks.MAX_ITEMS)
    return Start(
        request=request_from_wire(wire.request),
        mode=checks.member("mode", wire.mode, _MODE_FROM_WIRE),
        embeddings=tuple([ec_params_from_wire(params) for params in wire.embeddings]),
    )


def _encode_from_wire(wire: pb.Encode) -> Encode:
    return Encode(
        request_id=checks.request_id(wire.request_id),
        mm_hashes=checks.ids("mm_hashes", wire.mm_hashes),
        traceparent=checks.text("traceparent", wire.traceparent, checks.MAX_ID_CHARS),
    )


def _attach_from_wire(wire: pb.Attach) -> Attach:
    checks.present(wire, "params")
    return Attach(checks.request_id(wire.request_id), kv_params_from_wire(wire.params))


def _resume_from_wire(wire: pb.Resume) -> Resume:
    tokens = checks.token_ids("tokens", wire.tokens, checks.MAX_CHOICES)
    finished = tuple(wire.finished)
    if finished and len(finished) != len(tokens):
        raise checks.refuse("finished", "must be empty or as many as tokens")
    num_blocks = checks.number("num_blocks", wire.num_blocks, checks.MAX_BLOCKS)
    return Resume(checks.request_id(wire.request_id), tokens, num_blocks, finished)


_COMMAND_FROM_WIRE: dict[str, Callable[[Any], Command]] = {
    "start": _start_from_wire,
    "encode": _encode_from_wire,
    "attach": _attach_from_wire,
    "resume": _resume_from_wire,
    "renew": lambda wire: Renew(
        checks.ids("handoff_ids", wire.handoff_ids, checks.MAX_BLOCKS),
        checks.ids("request_ids", wire.request_ids, checks.MAX_BLOCKS),
    ),
    "abort": lambda wire: Abort(checks.request_id(wire.request_id), tuple(wire.choices)),
    "drain": lambda wire: Drain(),
}
