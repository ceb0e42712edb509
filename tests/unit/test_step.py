"""Plans and results survive their byte codec, and nothing else does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import step
from shared.step import (
    LAST_SAMPLED,
    BlockCopy,
    BlockSeal,
    EncodeItem,
    EncodePlan,
    EncodeResult,
    MediaRows,
    NewRow,
    RowStep,
    StepPlan,
    StepResult,
)
from shared.types.request import MediaItem
from tests.unit.rpc.strategies import SETTINGS, name, samplings, token, token_logprobs, tuples, u32, u64

media = st.builds(MediaItem, name, u32, u32)
new_rows = st.builds(
    NewRow, u32, name, u32, tuples(token), u32, samplings, tuples(st.builds(MediaRows, media, tuples(u32)))
)
row_steps = st.builds(
    RowStep, u32, u32, tuples(token | st.just(LAST_SAMPLED)), u32, tuples(tuples(u32)), tuples(u32)
)
plans = st.builds(
    StepPlan,
    u64,
    tuples(u32),
    tuples(new_rows, most=2),
    tuples(st.builds(BlockCopy, u32, u32, u32)),
    tuples(row_steps),
    tuples(st.builds(BlockSeal, u32, u32)),
)
results = st.builds(
    StepResult,
    u64,
    tuples(u32),
    tuples(token),
    tuples(st.none() | token_logprobs()),
    tuples(tuples(u64)),
    tuples(u32),
)
items = st.builds(EncodeItem, name, st.binary(max_size=16), tuples(u32), u32, tuples(u32))
encode_plans = st.builds(EncodePlan, u64, tuples(items))
encode_results = st.builds(EncodeResult, u64, tuples(u64))


@settings(SETTINGS, max_examples=60)
@given(st.one_of(plans, results, encode_plans, encode_results))
def test_codec_gives_back_what_it_was_given(record: step.Record) -> None:
    assert step.decode(step.encode(record), type(record)) == record


def test_records_are_frozen_printable_and_hashable() -> None:
    plan = StepPlan(1, rows=(RowStep(0, 0, (LAST_SAMPLED,), 0, ((1,),), (0,)),))
    with pytest.raises(AttributeError):
        plan.step_id = 2  # type: ignore[misc]
    assert "rows=(RowStep(row=0" in repr(plan)
    assert hash(plan) == hash(step.decode(step.encode(plan), StepPlan))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        step.encode(StepPlan(1))[:-1],
        msgspec.msgpack.encode({"step_id": "1"}),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"step_id": 1, "rows": [{"row": 0}]}),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        step.decode(data, StepPlan)
