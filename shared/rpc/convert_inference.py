"""Wire <-> types for the public interface (``inference.proto``)."""

from __future__ import annotations

from shared.errors import InvalidRequest
from shared.rpc import checks
from shared.rpc.convert_request import (
    FINISH_FROM_WIRE,
    FINISH_TO_WIRE,
    logprobs_from_wire,
    logprobs_to_wire,
    sampling_from_wire,
    sampling_to_wire,
)
from shared.types.inference import (
    Accepted,
    Delta,
    ImagePart,
    InferenceRequest,
    Message,
    ModelCard,
    Output,
    TextPart,
    Usage,
)
from triptych.v1 import inference_pb2 as pb


def inference_to_wire(request: InferenceRequest) -> pb.GenerateRequest:
    """Raises InvalidRequest when a value does not fit the wire at all."""
    try:
        return _inference_to_wire(request)
    except ValueError as error:
        raise InvalidRequest("the request does not fit the wire") from error


def _inference_to_wire(request: InferenceRequest) -> pb.GenerateRequest:
    wire = pb.GenerateRequest(
        model=request.model,
        sampling=sampling_to_wire(request.sampling),
        n=request.n,
        seed=request.seed,
        stop=request.stop,
        include_stop_str=request.include_stop_str,
        skip_special_tokens=request.skip_special_tokens,
        cache_salt=request.cache_salt,
        priority=request.priority,
        deadline_s=request.deadline_s,
        label=request.label,
        traceparent=request.traceparent,
    )
    if request.messages is not None:
        wire.chat.CopyFrom(pb.ChatPrompt(messages=[_message_to_wire(m) for m in request.messages]))
    if request.prompt is not None:
        wire.prompt = request.prompt
    if request.prompt_token_ids is not None:
        wire.tokens.CopyFrom(pb.TokenPrompt(token_ids=request.prompt_token_ids))
    return wire


def inference_from_wire(wire: pb.GenerateRequest) -> InferenceRequest:
    """Shapes only, and ranges where records have them: the router judges the rest, as for every front end
    (``shared.types.bounds``)."""
    kind = wire.WhichOneof("input")
    if kind is None:
        raise checks.refuse("input", "is missing")
    checks.present(wire, "sampling")
    checks.count("messages", wire.chat.messages, checks.MAX_ITEMS)
    has_deadline = wire.HasField("deadline_s")
    return InferenceRequest(
        model=checks.text("model", wire.model, required=True),
        sampling=sampling_from_wire(wire.sampling),
        messages=tuple([_message_from_wire(m) for m in wire.chat.messages]) if kind == "chat" else None,
        prompt=checks.text("prompt", wire.prompt, checks.MAX_TEXT_CHARS) if kind == "prompt" else None,
        prompt_token_ids=checks.token_ids("tokens", wire.tokens.token_ids) if kind == "tokens" else None,
        n=wire.n if wire.HasField("n") else 1,
        seed=wire.seed if wire.HasField("seed") else None,
        stop=tuple(wire.stop),
        include_stop_str=wire.include_stop_str,
        skip_special_tokens=wire.skip_special_tokens if wire.HasField("skip_special_tokens") else True,
        cache_salt=wire.cache_salt,
        priority=wire.priority,
        deadline_s=checks.real("deadline_s", wire.deadline_s, 0, checks.MAX_SECONDS)
        if has_deadline
        else None,
        label=wire.label,
        traceparent=checks.text("traceparent", wire.traceparent, checks.MAX_ID_CHARS),
    )


def _message_to_wire(message: Message) -> pb.ChatMessage:
    parts = [
        pb.MessagePart(text=part.text) if isinstance(part, TextPart) else pb.MessagePart(image=part.data)
        for part in message.parts
    ]
    return pb.ChatMessage(role=message.role, parts=parts)


def _message_from_wire(wire: pb.ChatMessage) -> Message:
    checks.count("messages.parts", wire.parts, checks.MAX_ITEMS)
    return Message(
        role=checks.text("messages.role", wire.role, checks.MAX_ID_CHARS, required=True),
        parts=tuple([_part_from_wire(part) for part in wire.parts]),
    )


def _part_from_wire(wire: pb.MessagePart) -> TextPart | ImagePart:
    match wire.WhichOneof("part"):
        case "text":
            return TextPart(checks.text("messages.parts.text", wire.text, checks.MAX_TEXT_CHARS))
        case "image":
            return ImagePart(wire.image)
        case _:
            raise checks.refuse("messages.parts", "has a part of an unknown kind; text and image are known")


def output_to_wire(output: Output) -> pb.Output:
    if isinstance(output, Delta):
        return pb.Output(delta=_delta_to_wire(output))
    if isinstance(output, Accepted):
        return pb.Output(
            accepted=pb.Accepted(
                request_id=output.request_id,
                prompt_token_ids=output.prompt_token_ids,
                seed=output.seed,
                created=output.created,
            )
        )
    return pb.Output(
        usage=pb.Usage(
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
        )
    )


def output_from_wire(wire: pb.Output) -> Output:
    match wire.WhichOneof("output"):
        case "delta":
            return _delta_from_wire(wire.delta)
        case "accepted":
            accepted = wire.accepted
            token_ids = checks.token_ids("prompt_token_ids", accepted.prompt_token_ids)
            request_id = checks.request_id(accepted.request_id)
            return Accepted(request_id, token_ids, accepted.seed, accepted.created)
        case "usage":
            usage = wire.usage
            return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        case _:
            raise checks.refuse("output", "is of an unknown kind")


def _delta_to_wire(delta: Delta) -> pb.Delta:
    wire = pb.Delta(
        choice=delta.choice,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=FINISH_TO_WIRE[delta.finish_reason],
    )
    if delta.logprobs:
        wire.logprobs.extend([logprobs_to_wire(entry) for entry in delta.logprobs])
    if isinstance(delta.stop_reason, str):
        wire.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        wire.stop_token_id = delta.stop_reason
    return wire


def _delta_from_wire(wire: pb.Delta) -> Delta:
    token_ids = checks.token_ids("token_ids", wire.token_ids)
    if wire.logprobs and len(wire.logprobs) != len(token_ids):
        raise checks.refuse("logprobs", "must be empty or one a token")
    stop = wire.WhichOneof("stop_reason")
    return Delta(
        choice=wire.choice,
        text=checks.text("text", wire.text, checks.MAX_TEXT_CHARS),
        token_ids=token_ids,
        logprobs=tuple([logprobs_from_wire(entry) for entry in wire.logprobs]),
        finish_reason=checks.member("finish_reason", wire.finish_reason, FINISH_FROM_WIRE),
        stop_reason=None if stop is None else getattr(wire, stop),
    )


def card_to_wire(card: ModelCard) -> pb.ModelCard:
    return pb.ModelCard(
        name=card.name,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        created=card.created,
        vision=card.vision,
    )


def card_from_wire(wire: pb.ModelCard) -> ModelCard:
    name = checks.text("name", wire.name, required=True)
    return ModelCard(name, wire.max_model_len, wire.vocab_size, wire.created, wire.vision)
