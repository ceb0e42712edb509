"""What one client request may ask for: owns the bounds that hold whatever front end it came through.

Not the form in which a front end takes its fields, and not what only rendering can tell (the length of a
prompt in tokens, media).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from shared.types.inference import ImagePart, InferenceRequest, Message, ModelCard
from shared.types.request import SamplingParams

MAX_CHOICES = 16
#: Of all messages of a request together; one of plain text is one part.
MAX_PARTS = 8192
MAX_STOPS = 4
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
MAX_TEMPERATURE = 2.0
#: Of presence and frequency, either way from 0.
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 2.0
MAX_SALT_CHARS = 256
MAX_LABEL_CHARS = 128
#: The only role whose messages may hold pictures.
PICTURE_ROLE = "user"
#: Names of models that an error lists.
_MAX_LISTED = 8


def check_request(request: InferenceRequest, card: ModelCard) -> None:
    """Refuse what no answer can be given to. ``card`` is that of the request's model.

    Raises InvalidRequest that names the field and never echoes its value; ContextLengthExceeded when more
    tokens are asked for than the context has.
    """
    sources = (request.messages, request.prompt, request.prompt_token_ids)
    if sum(source is not None for source in sources) != 1:
        raise InvalidRequest("exactly one of messages, prompt and prompt_token_ids is needed")
    if request.messages is None and not (request.prompt or request.prompt_token_ids):
        raise InvalidRequest("the prompt is empty", param="prompt")
    _within("n", request.n, 1, MAX_CHOICES)
    _check_stops(request.stop)
    _short("cache_salt", request.cache_salt, MAX_SALT_CHARS)
    _short("label", request.label, MAX_LABEL_CHARS)
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise InvalidRequest("the deadline must be positive", param="deadline_s")
    check_length(len(request.prompt_token_ids or ()), card, "prompt")
    check_ids(request.prompt_token_ids or (), card, "prompt")
    check_parts(sum(len(message.parts) for message in request.messages or ()))
    _check_sampling(request.sampling, card)
    for index, message in enumerate(request.messages or ()):
        _check_pictures(message, card, f"messages[{index}]")


def check_parts(num_parts: int) -> None:
    """Whether messages of so many parts are looked at at all."""
    if num_parts > MAX_PARTS:
        raise InvalidRequest(f"messages may have at most {MAX_PARTS} parts over all", param="messages")


def check_length(num_ids: int, card: ModelCard, param: str) -> None:
    """Whether so many token ids can fit. Raises ContextLengthExceeded."""
    if num_ids > card.max_model_len:
        message = f"the prompt has {num_ids} tokens, but the served context holds {card.max_model_len}"
        raise ContextLengthExceeded(message, param=param)


def check_picture(role: str, card: ModelCard, param: str) -> None:
    """Whether a message of this role may hold a picture at all."""
    if not card.vision:
        message = "pictures are not served here: this model or this deployment has no encoder"
        raise InvalidRequest(message, param=param, code="not_supported")
    if role != PICTURE_ROLE:
        raise InvalidRequest(f"only messages of the role {PICTURE_ROLE} may hold pictures", param=param)


def check_ids(token_ids: Sequence[int], card: ModelCard, param: str) -> None:
    """Every id is one that a client may name."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < card.vocab_size:
        raise InvalidRequest(f"{param}: token ids must be between 0 and {card.vocab_size - 1}", param=param)


def unknown_model(served: Iterable[str]) -> ModelNotFound:
    """The error for a model that is not among ``served``."""
    names = sorted(served)
    listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
    return ModelNotFound(f"no such model; served here: {listed or 'none'}", param="model")


def _check_pictures(message: Message, card: ModelCard, where: str) -> None:
    for index, part in enumerate(message.parts):
        if isinstance(part, ImagePart):
            check_picture(message.role, card, f"{where}.content[{index}]")


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"there may be at most {MAX_STOPS} stop strings", param="stop")
    if any(not 0 < len(stop.encode()) <= MAX_STOP_BYTES for stop in stops):
        raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_BYTES} bytes", param="stop")


def _check_sampling(sampling: SamplingParams, card: ModelCard) -> None:
    """``max_tokens`` 0 = as many as the context allows."""
    context = card.max_model_len
    if sampling.max_tokens > context:
        message = f"max_tokens is over the model's context of {context} tokens"
        raise ContextLengthExceeded(message, param="max_tokens")
    _within("max_tokens", sampling.max_tokens, 0, context)
    if sampling.min_tokens > (sampling.max_tokens or context):
        raise InvalidRequest("min_tokens is over max_tokens", param="min_tokens")
    _within("min_tokens", sampling.min_tokens, 0, context)
    _within("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _within("top_p", sampling.top_p, 0, 1, above=True)
    _within("min_p", sampling.min_p, 0, 1)
    _within("repetition_penalty", sampling.repetition_penalty, 0, MAX_REPETITION_PENALTY, above=True)
    _within("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("logprobs", sampling.logprobs or 0, 0, MAX_TOP_LOGPROBS)
    _few("stop_token_ids", sampling.stop_token_ids, MAX_STOP_IDS)
    _few("logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS)
    for _, bias in sampling.logit_bias:
        _within("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    check_ids(sampling.stop_token_ids, card, "stop_token_ids")
    check_ids([token_id for token_id, _ in sampling.logit_bias], card, "logit_bias")


def _within(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """``above``: ``low`` itself is outside. NaN is always outside."""
    if not low <= value <= high or (above and value == low):
        bounds = f"above {low:.9g} and at most {high:.9g}" if above else f"between {low:.9g} and {high:.9g}"
        raise InvalidRequest(f"{field} must be {bounds}", param=field)


def _short(field: str, value: str, limit: int) -> None:
    if len(value) > limit:
        raise InvalidRequest(f"{field} may have at most {limit} characters", param=field)


def _few(field: str, values: Sequence[object], limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"{field} may have at most {limit} entries", param=field)
