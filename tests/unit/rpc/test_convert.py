"""Every record survives the wire unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.rpc import convert_common as common
from shared.rpc import convert_events, convert_inference, convert_request, convert_worker
from shared.rpc import kv_store as store
from shared.types.inference import InferenceRequest
from shared.types.request import GenerationRequest, SamplingParams
from shared.types.worker import Abort, Event, Released, Start, Tokens
from tests.unit.rpc import strategies as make
from triptych.v1 import common_pb2, inference_pb2, worker_pb2

PAIRS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "identity": (make.identities, common.identity_to_wire, common.identity_from_wire),
    "layout": (make.layouts, common.layout_to_wire, common.layout_from_wire),
    "agent": (make.agents, common.agent_to_wire, common.agent_from_wire),
    "kv_params": (make.kv_params, common.kv_params_to_wire, common.kv_params_from_wire),
    "ec_params": (make.ec_params(), common.ec_params_to_wire, common.ec_params_from_wire),
    "sampling": (make.samplings, convert_request.sampling_to_wire, convert_request.sampling_from_wire),
    "logprobs": (
        make.token_logprobs(),
        convert_request.logprobs_to_wire,
        convert_request.logprobs_from_wire,
    ),
    "request": (make.requests(), convert_request.request_to_wire, convert_request.request_from_wire),
    "info": (make.infos, convert_worker.info_to_wire, convert_worker.info_from_wire),
    "status": (make.statuses, convert_worker.status_to_wire, convert_worker.status_from_wire),
    "command": (make.commands, convert_worker.command_to_wire, convert_worker.command_from_wire),
    "inference": (
        make.inference_requests(),
        convert_inference.inference_to_wire,
        convert_inference.inference_from_wire,
    ),
    "output": (make.outputs, convert_inference.output_to_wire, convert_inference.output_from_wire),
    "card": (make.cards, convert_inference.card_to_wire, convert_inference.card_from_wire),
    "block key": (make.keys, store._key_to_wire, store._key_from_wire),
}


@pytest.mark.parametrize("kind", PAIRS)
@settings(make.SETTINGS, max_examples=40)
@given(data=st.data())
def test_record_survives_the_wire(kind: str, data: st.DataObject) -> None:
    strategy, to_wire, from_wire = PAIRS[kind]
    value = data.draw(strategy)
    wire = to_wire(value)
    assert from_wire(type(wire).FromString(wire.SerializeToString())) == value


@settings(make.SETTINGS, max_examples=60)
@given(st.lists(make.events, max_size=12))
def test_events_keep_their_order_and_content(events: list[Event]) -> None:
    message = worker_pb2.WorkerStreamResponse(events=convert_events.events_to_wire(events))
    read = worker_pb2.WorkerStreamResponse.FromString(message.SerializeToString())
    assert convert_events.events_from_wire(read.events) == events


def test_a_step_of_tokens_is_one_wire_event_of_flat_columns() -> None:
    step = [Tokens(f"r{i}", 0, 7, (i,)) for i in range(64)]
    (wire,) = convert_events.events_to_wire(step)
    assert len(wire.tokens.request_ids) == 64
    assert not wire.tokens.counts and not wire.tokens.details


def test_long_runs_of_tokens_are_cut() -> None:
    count = 2 * convert_events.RUN_LENGTH + 1
    run: list[Event] = [Tokens("r", 0, i, (i,)) for i in range(count)]
    wire = convert_events.events_to_wire([*run, Released("r")])
    assert [len(e.tokens.request_ids) for e in wire] == [1024, 1024, 1, 0]
    assert convert_events.events_from_wire(wire) == [*run, Released("r")]


def test_absent_sampling_fields_are_neutral() -> None:
    assert convert_request.sampling_from_wire(common_pb2.SamplingParams()) == SamplingParams(max_tokens=0)


def test_zero_temperature_is_not_absence() -> None:
    wire = convert_request.sampling_to_wire(SamplingParams(max_tokens=1, temperature=0.0))
    assert convert_request.sampling_from_wire(wire).temperature == 0.0


def test_a_minimal_public_request_takes_the_defaults() -> None:
    wire = inference_pb2.GenerateRequest(model="m", prompt="", sampling=common_pb2.SamplingParams())
    expected = InferenceRequest("m", SamplingParams(max_tokens=0), prompt="")
    assert convert_inference.inference_from_wire(wire) == expected


def test_a_failure_with_an_endless_message_is_cut_by_its_sender() -> None:
    from shared.types.worker import Failed

    wire = convert_events.events_to_wire([Failed("r", "internal_error", "x" * 100_000, False)])
    (read,) = convert_events.events_from_wire(wire)
    assert isinstance(read, Failed) and read.message == "x" * 1024


def test_a_value_that_fits_no_field_is_refused_while_encoding() -> None:
    from shared.errors import InvalidRequest

    request = GenerationRequest("r", "m", (-1,), 1, SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest):
        convert_worker.command_to_wire(Start(request, "prefill"))
    assert convert_worker.command_from_wire(convert_worker.command_to_wire(Abort("r"))) == Abort("r")
