"""What a peer must not send is refused with InvalidRequest that names the field, never otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.rpc import checks, convert_common, convert_events, convert_inference, convert_worker
from shared.rpc.convert_request import request_from_wire, request_to_wire, sampling_from_wire
from shared.types.request import GenerationRequest, MediaItem, SamplingParams
from tests.unit.rpc import strategies as make
from triptych.v1 import common_pb2 as common
from triptych.v1 import inference_pb2 as inference
from triptych.v1 import worker_pb2 as pb


def request(**changes: Any) -> common.GenerationRequest:
    """A sound request on the wire, with changed fields."""
    media = (MediaItem("a" * 64, 1, 2),)
    sound = GenerationRequest("r", "m", (1, 2, 3, 4), 4, SamplingParams(max_tokens=4), media=media)
    wire = request_to_wire(sound)
    for field, value in changes.items():
        if isinstance(value, list):
            wire.ClearField(field)
            getattr(wire, field).extend(value)
        else:
            setattr(wire, field, value)
    return wire


def item(offset: int, num_tokens: int, mm_hash: str = "h") -> common.MediaItem:
    return common.MediaItem(mm_hash=mm_hash, offset=offset, num_tokens=num_tokens)


def test_the_sound_request_is_sound() -> None:
    assert request_from_wire(request()).request_id == "r"


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 257}),
        ("model", {"model": "x" * 2000}),
        ("token_ids", {"token_ids": [1, 2, 3, 1 << 31]}),
        ("token_ids", {"token_ids": [1]}),
        ("token_ids", {"num_prompt_tokens": 0, "num_emitted": 4}),
        ("token_ids", {"token_ids": [1] * (checks.MAX_TOKENS + 1)}),
        ("choices", {"choices": []}),
        ("choices", {"choices": [0, 0]}),
        ("choices", {"choices": [4_000_000_000]}),
        ("choices", {"choices": [0, 1], "num_prompt_tokens": 3, "num_emitted": 1}),
        ("media", {"media": [item(3, 2)]}),
        ("media", {"media": [item(0, 2), item(1, 2)]}),
        ("media", {"media": [item(2, 1), item(0, 1)]}),
        ("media", {"media": [item(1, 0)]}),
        ("media.mm_hash", {"media": [item(1, 1, "")]}),
        ("deadline_s", {"deadline_s": -1.0}),
        ("deadline_s", {"deadline_s": math.nan}),
        ("cache_salt", {"cache_salt": "x" * 5000}),
    ],
)
def test_unsound_requests_are_refused(param: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request_from_wire(request(**changes))
    assert refused.value.param == param


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_sampling_numbers_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling_from_wire(common.SamplingParams(**{field: value}))
    assert refused.value.param == field


@pytest.mark.parametrize(
    "wire",
    [
        common.SamplingParams(top_p=0.0),
        common.SamplingParams(top_p=1.5),
        common.SamplingParams(repetition_penalty=0.0),
        common.SamplingParams(presence_penalty=math.nan),
        common.SamplingParams(frequency_penalty=math.inf),
        common.SamplingParams(temperature=2.5),
        common.SamplingParams(logprobs=21),
        common.SamplingParams(stop_token_ids=[1] * 129),
        common.SamplingParams(logit_bias=[common.LogitBias(token_id=1, bias=math.nan)]),
        common.SamplingParams(logit_bias=[common.LogitBias(token_id=1)] * 1025),
        common.SamplingParams(top_k=1 << 31),
    ],
)
def test_other_sampling_values_are_refused(wire: common.SamplingParams) -> None:
    with pytest.raises(InvalidRequest):
        sampling_from_wire(wire)


def agent(**region: Any) -> common.AgentInfo:
    sound: dict[str, Any] = {
        "name": "kv",
        "nbytes": 100,
        "num_blocks": [2],
        "extent_bytes": [16],
        "generation_offsets": [32],
        "data_offsets": [48],
    }
    return common.AgentInfo(
        worker_id="w", incarnation="i", regions=[common.RegionInfo(**{**sound, **region})]
    )


def test_the_sound_agent_is_sound() -> None:
    assert convert_common.agent_from_wire(agent()).regions[0].num_blocks == (2,)


@pytest.mark.parametrize(
    "wire",
    [
        agent(name=""),
        agent(num_blocks=[4]),
        agent(extent_bytes=[1 << 63]),
        agent(data_offsets=[85]),
        agent(generation_offsets=[85]),
        agent(data_offsets=[]),
        agent(num_blocks=[2, 2]),
        common.AgentInfo(worker_id="w"),
        common.AgentInfo(worker_id="w", incarnation="i", endpoints=[common.Endpoint()] * 17),
        common.AgentInfo(worker_id="w", incarnation="i", endpoints=[common.Endpoint(metadata=b"x" * 70_000)]),
        common.AgentInfo(worker_id="w", incarnation="i", layout=common.LayoutSpec()),
        common.AgentInfo(
            worker_id="w",
            incarnation="i",
            layout=common.LayoutSpec(
                block_size=16,
                tp_size=1,
                groups=[common.KvGroupSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype="complex128")],
            ),
        ),
    ],
)
def test_lying_agents_are_refused(wire: common.AgentInfo) -> None:
    with pytest.raises(InvalidRequest):
        convert_common.agent_from_wire(wire)


@pytest.mark.parametrize(
    "wire",
    [
        pb.Command(),
        pb.Command(start=pb.Start()),
        pb.Command(start=pb.Start(request=request(), mode=pb.START_MODE_UNSPECIFIED)),
        pb.Command(attach=pb.Attach(request_id="r")),
        pb.Command(attach=pb.Attach(request_id="r", params=common.KvTransferParams(handoff_id="h"))),
        pb.Command(resume=pb.Resume(request_id="r", tokens=[1, 2], finished=[True])),
        pb.Command(resume=pb.Resume(request_id="r", num_blocks=1 << 31)),
        pb.Command(renew=pb.Renew(handoff_ids=[""])),
        pb.Command(abort=pb.Abort()),
        pb.Command(encode=pb.Encode(request_id="r", mm_hashes=["x" * 300])),
    ],
)
def test_unsound_commands_are_refused(wire: pb.Command) -> None:
    with pytest.raises(InvalidRequest):
        convert_worker.command_from_wire(wire)


def test_an_unknown_enum_value_is_refused() -> None:
    # Proto3 enums are open: a newer peer's value arrives as a bare number.
    raw = pb.Start(request=request()).SerializeToString() + b"\x10\x63"
    with pytest.raises(InvalidRequest) as refused:
        convert_worker.command_from_wire(pb.Command(start=pb.Start.FromString(raw)))
    assert refused.value.param == "mode"


@pytest.mark.parametrize(
    "tokens",
    [
        pb.Tokens(request_ids=["r"], choices=[0], first_indices=[0]),
        pb.Tokens(request_ids=["r"], choices=[], first_indices=[0], token_ids=[1]),
        pb.Tokens(request_ids=["r"], choices=[0], first_indices=[0], counts=[2], token_ids=[1]),
        pb.Tokens(request_ids=["r"], choices=[0], first_indices=[0], counts=[1, 0], token_ids=[1]),
        pb.Tokens(request_ids=[""], choices=[0], first_indices=[0], token_ids=[1]),
        pb.Tokens(request_ids=["r"], choices=[0], first_indices=[0], token_ids=[1 << 31]),
        pb.Tokens(
            request_ids=["r"], choices=[0], first_indices=[0], token_ids=[1], details=[pb.TokensDetail(row=1)]
        ),
        pb.Tokens(
            request_ids=["r"],
            choices=[0],
            first_indices=[0],
            token_ids=[1],
            details=[pb.TokensDetail(), pb.TokensDetail()],
        ),
        pb.Tokens(
            request_ids=["r"],
            choices=[0],
            first_indices=[0],
            token_ids=[1],
            details=[pb.TokensDetail(logprobs=[common.TokenLogprobs()] * 2)],
        ),
        pb.Tokens(
            request_ids=["r"],
            choices=[0],
            first_indices=[0],
            token_ids=[1],
            details=[pb.TokensDetail(logprobs=[common.TokenLogprobs(top_ids=[1])])],
        ),
    ],
)
def test_unsound_tokens_are_refused(tokens: pb.Tokens) -> None:
    with pytest.raises(InvalidRequest):
        convert_events.events_from_wire([pb.Event(tokens=tokens)])


@pytest.mark.parametrize(
    "event",
    [
        pb.Event(),
        pb.Event(status=pb.Status()),
        pb.Event(released=pb.Released()),
        pb.Event(kv_events=pb.KvEvents(stored=[b""])),
        pb.Event(kv_events=pb.KvEvents(removed=[b"x" * 65])),
        pb.Event(blocks_committed=pb.BlocksCommitted(request_id="r")),
    ],
)
def test_unsound_events_are_refused(event: pb.Event) -> None:
    with pytest.raises(InvalidRequest):
        convert_events.events_from_wire([event])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt": "x", "model": ""},
        {"prompt": "x", "deadline_s": math.inf},
        {"chat": inference.ChatPrompt(messages=[inference.ChatMessage()])},
        {"chat": inference.ChatPrompt(messages=[inference.ChatMessage(role="user", parts=[{}])])},
        {"tokens": inference.TokenPrompt(token_ids=[1 << 31])},
    ],
)
def test_unsound_public_requests_are_refused(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"model": "m", "sampling": common.SamplingParams(), **changes}
    with pytest.raises(InvalidRequest):
        convert_inference.inference_from_wire(inference.GenerateRequest(**fields))


FUZZED: list[tuple[Any, Any, Callable[[Any], Any], type[Any]]] = [
    (make.commands, convert_worker.command_to_wire, convert_worker.command_from_wire, pb.Command),
    (
        st.lists(make.events, max_size=4),
        lambda events: pb.WorkerStreamResponse(events=convert_events.events_to_wire(events)),
        lambda wire: convert_events.events_from_wire(wire.events),
        pb.WorkerStreamResponse,
    ),
    (
        make.inference_requests(),
        convert_inference.inference_to_wire,
        convert_inference.inference_from_wire,
        inference.GenerateRequest,
    ),
]


@pytest.mark.parametrize("case", range(len(FUZZED)))
@settings(make.SETTINGS, max_examples=80)
@given(data=st.data())
def test_damaged_bytes_are_read_or_refused_but_nothing_else_happens(case: int, data: st.DataObject) -> None:
    strategy, to_wire, from_wire, message = FUZZED[case]
    raw = bytearray(to_wire(data.draw(strategy)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + 1] = data.draw(st.binary(max_size=3))
    with suppress(DecodeError, InvalidRequest):
        from_wire(message.FromString(bytes(raw)))
