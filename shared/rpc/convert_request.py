"""Wire <-> types for requests: sampling, media, tokens' logprobs (``common.proto``)."""

from __future__ import annotations

from shared.rpc import checks
from shared.types import bounds
from shared.types.request import GenerationRequest, MediaItem, SamplingParams, TokenLogprobs
from triptych.v1 import common_pb2 as pb

FINISH_TO_WIRE: dict[str, pb.FinishReason.ValueType] = {
    "": pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    "content_filter": pb.FINISH_REASON_CONTENT_FILTER,
    "abort": pb.FINISH_REASON_ABORT,
}
FINISH_FROM_WIRE: dict[int, str] = {number: name for name, number in FINISH_TO_WIRE.items()}


def sampling_to_wire(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=token, bias=bias) for token, bias in params.logit_bias],
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
    )


def sampling_from_wire(wire: pb.SamplingParams) -> SamplingParams:
    real, number, penalty = checks.real, checks.number, bounds.MAX_PENALTY
    repetition = wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0
    if not repetition > 0:
        raise checks.refuse("repetition_penalty", "must be above 0")
    top_p = wire.top_p if wire.HasField("top_p") else 1.0
    if not top_p > 0:
        raise checks.refuse("top_p", "must be above 0")
    temperature = wire.temperature if wire.HasField("temperature") else 1.0
    checks.count("logit_bias", wire.logit_bias, checks.MAX_LOGIT_BIAS)
    return SamplingParams(
        max_tokens=number("max_tokens", wire.max_tokens, checks.MAX_TOKENS),
        temperature=real("temperature", temperature, 0.0, bounds.MAX_TEMPERATURE),
        top_k=number("top_k", wire.top_k, checks.MAX_TOKEN_ID),
        top_p=real("top_p", top_p, 0.0, 1.0),
        min_p=real("min_p", wire.min_p, 0.0, 1.0),
        seed=wire.seed,
        repetition_penalty=real("repetition_penalty", repetition, 0.0, bounds.MAX_REPETITION_PENALTY),
        presence_penalty=real("presence_penalty", wire.presence_penalty, -penalty, penalty),
        frequency_penalty=real("frequency_penalty", wire.frequency_penalty, -penalty, penalty),
        logit_bias=tuple([_bias_from_wire(entry) for entry in wire.logit_bias]),
        stop_token_ids=checks.token_ids("stop_token_ids", wire.stop_token_ids, checks.MAX_STOP_IDS),
        ignore_eos=wire.ignore_eos,
        min_tokens=number("min_tokens", wire.min_tokens, checks.MAX_TOKENS),
        logprobs=number("logprobs", wire.logprobs, checks.MAX_LOGPROBS)
        if wire.HasField("logprobs")
        else None,
    )


def _bias_from_wire(wire: pb.LogitBias) -> tuple[int, float]:
    token = checks.number("logit_bias.token_id", wire.token_id, checks.MAX_TOKEN_ID)
    return token, checks.real("logit_bias.bias", wire.bias, -bounds.MAX_BIAS, bounds.MAX_BIAS)


def logprobs_to_wire(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob, rank=entry.rank, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs
    )


def logprobs_from_wire(wire: pb.TokenLogprobs) -> TokenLogprobs:
    top_ids = checks.token_ids("logprobs.top_ids", wire.top_ids, checks.MAX_LOGPROBS)
    top_logprobs = tuple(wire.top_logprobs)
    if len(top_ids) != len(top_logprobs):
        raise checks.refuse("logprobs.top_logprobs", "must be as many as top_ids")
    return TokenLogprobs(wire.logprob, wire.rank, top_ids, top_logprobs)


def request_to_wire(request: GenerationRequest) -> pb.GenerationRequest:
    return pb.GenerationRequest(
        request_id=request.request_id,
        model=request.model,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=sampling_to_wire(request.sampling),
        num_emitted=request.num_emitted,
        choices=request.choices,
        media=[
            pb.MediaItem(mm_hash=item.mm_hash, offset=item.offset, num_tokens=item.num_tokens)
            for item in request.media
        ],
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        priority=request.priority,
        deadline_s=request.deadline_s,
        traceparent=request.traceparent,
    )


def request_from_wire(wire: pb.GenerationRequest) -> GenerationRequest:
    """Refuses a request whose parts contradict each other: its token counts, the places of its
    media, its choices."""
    checks.present(wire, "sampling")
    token_ids = checks.token_ids("token_ids", wire.token_ids)
    if wire.num_prompt_tokens < 1 or wire.num_prompt_tokens + wire.num_emitted != len(token_ids):
        raise checks.refuse("token_ids", "must be num_prompt_tokens and num_emitted together")
    checks.count("choices", wire.choices, checks.MAX_CHOICES, least=1)
    choices = tuple(wire.choices)
    if len(set(choices)) != len(choices) or max(choices) >= checks.MAX_CHOICES:
        raise checks.refuse("choices", "must be different and small")
    if wire.num_emitted and len(choices) > 1:
        raise checks.refuse("choices", "cannot share a request once tokens were emitted")
    checks.count("media", wire.media, checks.MAX_ITEMS)
    has_deadline = wire.HasField("deadline_s")
    return GenerationRequest(
        request_id=checks.request_id(wire.request_id),
        model=checks.text("model", wire.model),
        token_ids=token_ids,
        num_prompt_tokens=wire.num_prompt_tokens,
        sampling=sampling_from_wire(wire.sampling),
        num_emitted=wire.num_emitted,
        choices=choices,
        media=_media_from_wire(wire),
        cache_salt=checks.text("cache_salt", wire.cache_salt),
        adapter=checks.text("adapter", wire.adapter),
        priority=wire.priority,
        deadline_s=checks.real("deadline_s", wire.deadline_s, 0, checks.MAX_SECONDS)
        if has_deadline
        else None,
        traceparent=checks.text("traceparent", wire.traceparent, checks.MAX_ID_CHARS),
    )


def _media_from_wire(wire: pb.GenerationRequest) -> tuple[MediaItem, ...]:
    """Items in the order of the prompt, inside it, without overlap."""
    items: list[MediaItem] = []
    end = 0
    for item in wire.media:
        if item.num_tokens < 1 or item.offset < end or item.offset + item.num_tokens > wire.num_prompt_tokens:
            raise checks.refuse("media", "lies outside the prompt or overlaps")
        end = item.offset + item.num_tokens
        mm_hash = checks.text("media.mm_hash", item.mm_hash, checks.MAX_ID_CHARS, required=True)
        items.append(MediaItem(mm_hash, item.offset, item.num_tokens))
    return tuple(items)
