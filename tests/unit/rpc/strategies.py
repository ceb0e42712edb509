"""Hypothesis strategies for every record that has a wire form."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shared.rpc import checks
from shared.types import bounds, store, transfer, worker
from shared.types import inference as inf
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import ITEM_BYTES, KVGroupSpec
from shared.types.request import FINISH_REASONS, GenerationRequest, MediaItem, SamplingParams, TokenLogprobs

#: Derandomised: the same examples in every run.
SETTINGS = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])

U32 = (1 << 32) - 1
U64 = (1 << 64) - 1

u32 = st.integers(0, U32)
u64 = st.integers(0, U64)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)
token = st.integers(0, checks.MAX_TOKEN_ID)
text = st.text(max_size=8)
name = st.text(min_size=1, max_size=8)
block_hash = st.binary(min_size=1, max_size=32)
finish = st.sampled_from(("", *FINISH_REASONS))
penalty = st.floats(-bounds.MAX_PENALTY, bounds.MAX_PENALTY)
bias = st.floats(-bounds.MAX_BIAS, bounds.MAX_BIAS)
logprob = st.floats(max_value=0, allow_nan=False)


def tuples(item: st.SearchStrategy[Any], least: int = 0, most: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(item, min_size=least, max_size=most).map(tuple)


identities = st.builds(IdentityKey, text, text, text, text, text, text, text)
groups = st.builds(
    KVGroupSpec,
    num_layers=st.integers(1, 100),
    num_kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 512),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    window=st.none() | u32,
)
layouts = st.builds(
    LayoutSpec,
    groups=tuples(groups, 1),
    block_size=st.integers(1, 1024),
    tp_size=st.integers(1, 64),
    head_start=st.integers(0, 64),
    extent_order=text,
    checksum=text,
    wire_versions=st.tuples(u32, u32).map(lambda pair: tuple(sorted(pair))),
)


@st.composite
def regions(draw: st.DrawFn) -> transfer.RegionInfo:
    count = draw(st.integers(0, 3))
    columns = [draw(st.lists(st.integers(0, 1 << 20), min_size=count, max_size=count)) for _ in range(4)]
    num_blocks, extents, tables, data = columns
    least = max(
        (max(t + 8 * n, d + n * e) for n, e, t, d in zip(num_blocks, extents, tables, data, strict=True)),
        default=0,
    )
    nbytes = draw(st.integers(least, U64))
    return transfer.RegionInfo(draw(name), nbytes, *(tuple(column) for column in columns))


endpoints = st.builds(transfer.Endpoint, text, st.binary(max_size=16))
agents = st.builds(
    transfer.AgentInfo, name, name, u64, tuples(endpoints), tuples(regions()), st.none() | layouts
)
blocks = st.builds(transfer.BlockRef, u32, u64, tuples(u64))
kv_params = st.builds(
    transfer.KvTransferParams, name, agents, st.integers(0, 8), st.integers(0, 4096), tuples(blocks)
)


@st.composite
def ec_params(draw: st.DrawFn) -> transfer.EcTransferParams:
    pairs = draw(st.lists(st.tuples(u32, u64), max_size=3))
    return transfer.EcTransferParams(
        handoff_id=draw(name),
        producer=draw(agents),
        mm_hash=draw(name),
        num_rows=draw(st.integers(0, 4096)),
        row_bytes=draw(st.integers(0, 1 << 20)),
        dtype=draw(text),
        block_ids=tuple(block for block, _ in pairs),
        generations=tuple(generation for _, generation in pairs),
        checksum=draw(u64),
    )


samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 4096),
    temperature=st.floats(0, bounds.MAX_TEMPERATURE),
    top_k=token,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=i64,
    repetition_penalty=st.floats(0, bounds.MAX_REPETITION_PENALTY, exclude_min=True),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    logit_bias=tuples(st.tuples(token, bias)),
    stop_token_ids=tuples(token),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 4096),
    logprobs=st.none() | st.integers(0, 20),
)


@st.composite
def token_logprobs(draw: st.DrawFn) -> TokenLogprobs:
    top = draw(st.lists(st.tuples(token, logprob), max_size=3))
    return TokenLogprobs(draw(logprob), draw(u32), tuple(t for t, _ in top), tuple(p for _, p in top))


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    num_prompt = draw(st.integers(1, 12))
    num_emitted = draw(st.integers(0, 3))
    cuts = sorted(draw(st.sets(st.integers(0, num_prompt), max_size=4)))
    media = tuple(
        MediaItem(draw(name), start, end - start) for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    )
    count = num_prompt + num_emitted
    return GenerationRequest(
        request_id=draw(name),
        model=draw(text),
        token_ids=tuple(draw(st.lists(token, min_size=count, max_size=count))),
        num_prompt_tokens=num_prompt,
        sampling=draw(samplings),
        num_emitted=num_emitted,
        choices=tuple(
            draw(st.sets(st.integers(0, 15), min_size=1, max_size=1 if num_emitted else 4)),
        ),
        media=media,
        cache_salt=draw(text),
        adapter=draw(text),
        priority=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
        deadline_s=draw(st.none() | st.floats(0, 1e6)),
        traceparent=draw(text),
    )


infos = st.builds(
    worker.WorkerInfo,
    name,
    name,
    st.sampled_from(worker.KINDS),
    name,
    text,
    identities,
    agents,
    u32,
    u32,
    u32,
    st.booleans(),
)
statuses = st.builds(
    worker.WorkerStatus, text, u32, u32, u32, u32, u32, u32, u32, u64, u64, st.booleans(), u64
)


@st.composite
def resumes(draw: st.DrawFn) -> worker.Resume:
    rows = draw(st.lists(st.tuples(token, st.booleans()), max_size=4))
    finished = tuple(flag for _, flag in rows) if draw(st.booleans()) else ()
    return worker.Resume(draw(name), tuple(t for t, _ in rows), draw(st.integers(0, 4096)), finished)


commands = st.one_of(
    st.builds(
        worker.Start,
        requests(),
        st.sampled_from((worker.AGGREGATED, worker.PREFILL, worker.DECODE)),
        tuples(ec_params(), most=2),
    ),
    st.builds(worker.Encode, name, tuples(name), text),
    st.builds(worker.Attach, name, kv_params),
    resumes(),
    st.builds(worker.Renew, tuples(name), tuples(name)),
    st.builds(worker.Abort, name, st.lists(st.integers(0, 15), max_size=4).map(tuple)),
    st.just(worker.Drain()),
)


@st.composite
def tokens(draw: st.DrawFn) -> worker.Tokens:
    token_ids = tuple(draw(st.lists(token, max_size=3)))
    with_logprobs = draw(st.booleans())
    return worker.Tokens(
        request_id=draw(name),
        choice=draw(u32),
        first_index=draw(u32),
        token_ids=token_ids,
        logprobs=tuple(draw(token_logprobs()) for _ in token_ids) if with_logprobs else (),
        finish_reason=draw(finish),
        stop_token_id=draw(st.none() | u32),
        num_cached_tokens=draw(u32),
    )


plain_tokens = st.builds(worker.Tokens, name, u32, u32, st.tuples(token))
events = st.one_of(
    st.builds(worker.Reserved, name, u32, u32),
    st.builds(worker.BlocksCommitted, name, name, st.integers(0, 8), st.integers(0, 4096), tuples(blocks)),
    st.builds(worker.HandoffReady, name, text, st.integers(0, 4096), tuples(ec_params(), most=2), u32),
    tokens(),
    plain_tokens,
    plain_tokens,
    st.builds(worker.Released, name),
    st.builds(worker.Failed, name, text, text, st.booleans(), text),
    st.builds(worker.Status, statuses),
    st.builds(worker.KvEvents, u64, tuples(block_hash), tuples(block_hash)),
)

parts = st.one_of(st.builds(inf.TextPart, text), st.builds(inf.ImagePart, st.binary(max_size=8)))
messages = st.builds(inf.Message, name, tuples(parts))


@st.composite
def inference_requests(draw: st.DrawFn) -> inf.InferenceRequest:
    prompts: list[dict[str, Any]] = [
        {"messages": draw(tuples(messages))},
        {"prompt": draw(text)},
        {"prompt_token_ids": draw(tuples(token))},
    ]
    return inf.InferenceRequest(
        model=draw(name),
        sampling=draw(samplings),
        **draw(st.sampled_from(prompts)),
        n=draw(st.integers(1, 16)),
        seed=draw(st.none() | i64),
        stop=draw(tuples(name)),
        include_stop_str=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        cache_salt=draw(text),
        priority=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
        deadline_s=draw(st.none() | st.floats(0, 1e6)),
        label=draw(text),
        traceparent=draw(text),
    )


@st.composite
def deltas(draw: st.DrawFn) -> inf.Delta:
    token_ids = tuple(draw(st.lists(token, max_size=3)))
    with_logprobs = draw(st.booleans())
    return inf.Delta(
        choice=draw(u32),
        text=draw(text),
        token_ids=token_ids,
        logprobs=tuple(draw(token_logprobs()) for _ in token_ids) if with_logprobs else (),
        finish_reason=draw(finish),
        stop_reason=draw(st.none() | text | u32),
    )


outputs = st.one_of(
    st.builds(inf.Accepted, name, tuples(token), i64, i64), deltas(), st.builds(inf.Usage, u32, u32, u32)
)
cards = st.builds(inf.ModelCard, name, u32, u32, i64, st.booleans())
keys = st.builds(
    store.BlockKey,
    st.integers(0, 8),
    block_hash,
    block_hash,
    tuples(token),
    tuples(st.tuples(text, st.integers(-(1 << 31), (1 << 31) - 1))),
)
