"""What a client request becomes before it is sent off: checked, rendered, sized, numbered.

Owns the served models' text side and the checks that need no worker. It starts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, structs

from services.router.choice import Choice
from services.router.model import Prompt, ServedModel
from services.router.probe import RequestProbe
from shared.clock import Entropy
from shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from shared.routing.workers import WorkerPool
from shared.types.inference import Accepted, InferenceRequest, ModelCard, TextPart
from shared.types.request import GenerationRequest

MAX_CHOICES = 16
#: Rendering up to so many bytes is quicker than handing it to a thread.
HEAVY_BYTES = 16384


class Order(Struct, frozen=True):
    """A request that can be sent off. ``request`` is for all choices, under our own id."""

    accepted: Accepted
    request: GenerationRequest
    choices: tuple[Choice, ...]
    media_data: Mapping[str, bytes]


class Intake:
    """``wall_clock`` gives seconds since 1970, for answers only."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        workers: WorkerPool,
        entropy: Entropy,
        wall_clock: Callable[[], int],
    ) -> None:
        self.models = tuple(models)
        self._by_name = {model.name: model for model in models}
        self._workers = workers
        self._entropy = entropy
        self._wall_clock = wall_clock

    def model(self, name: str) -> ServedModel:
        """Raises ModelNotFound."""
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound("the model does not exist", param="model")
        return model

    def cards(self) -> list[ModelCard]:
        """The models as clients see them."""
        return [
            ModelCard(m.name, self._max_model_len(m), m.vocab_size, m.created, m.vision) for m in self.models
        ]

    def check(self, request: InferenceRequest) -> ServedModel:
        """All that can be said before any work is spent on the request. Raises InvalidRequest and its
        kin."""
        model = self.model(request.model)
        sources = (request.messages, request.prompt, request.prompt_token_ids)
        if sum(source is not None for source in sources) != 1:
            raise InvalidRequest("exactly one of messages, prompt and prompt_token_ids is needed")
        if not 1 <= request.n <= MAX_CHOICES:
            raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}", param="n")
        if request.deadline_s is not None and not request.deadline_s > 0:
            raise InvalidRequest("the deadline must be positive", param="deadline_s")
        sampling = request.sampling
        _check_ids(request.prompt_token_ids or (), model, "prompt")
        _check_ids(sampling.stop_token_ids, model, "stop_token_ids")
        _check_ids([token_id for token_id, _ in sampling.logit_bias], model, "logit_bias")
        return model

    async def render(self, model: ServedModel, request: InferenceRequest, probe: RequestProbe) -> Order:
        """Render and size a checked request, off the event loop where that may take long.

        Raises ContextLengthExceeded, InvalidRequest and what is wrong with media.
        """
        heavy = _num_bytes(request) > HEAVY_BYTES
        prompt = await asyncio.to_thread(model.render, request) if heavy else model.render(request)
        max_tokens = self._max_tokens(model, request, prompt)
        request_id = self._entropy.hex_id()
        seed = self._entropy.seed() if request.seed is None else request.seed
        probe.admitted(request_id, len(prompt.token_ids))
        return Order(
            Accepted(request_id, prompt.token_ids, seed, self._wall_clock()),
            GenerationRequest(
                request_id,
                model.name,
                prompt.token_ids,
                len(prompt.token_ids),
                structs.replace(request.sampling, max_tokens=max_tokens, seed=seed),
                choices=tuple(range(request.n)),
                media=prompt.media,
                cache_salt=request.cache_salt,
                priority=request.priority,
                traceparent=probe.traceparent,
            ),
            tuple(model.choice(index, request) for index in range(request.n)),
            prompt.media_data,
        )

    def _max_tokens(self, model: ServedModel, request: InferenceRequest, prompt: Prompt) -> int:
        """Tokens that may be emitted; what was not said is all that the context has room for."""
        num_tokens = len(prompt.token_ids)
        room = self._max_model_len(model) - num_tokens
        wanted = request.sampling.max_tokens
        if room < max(wanted, 1):
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens and {wanted} more are wanted, "
                f"but the model's context holds {room + num_tokens}",
                param="prompt" if request.messages is None else "messages",
            )
        return wanted or room

    def _max_model_len(self, model: ServedModel) -> int:
        """What every live worker of the model can hold."""
        infos = [w.info for w in self._workers.live()]
        lens = [i.max_model_len for i in infos if i.model == model.name and i.max_model_len]
        return min([model.max_model_len, *lens])


def _check_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        raise InvalidRequest(f"token ids must be between 0 and {model.vocab_size - 1}", param=param)


def _num_bytes(request: InferenceRequest) -> int:
    parts = [part for message in request.messages or () for part in message.parts]
    return len(request.prompt or "") + sum(
        len(part.text if isinstance(part, TextPart) else part.data) for part in parts
    )
