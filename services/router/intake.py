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
from shared.errors import ContextLengthExceeded
from shared.routing.workers import WorkerPool
from shared.types.bounds import check_request, unknown_model
from shared.types.inference import Accepted, InferenceRequest, ModelCard, TextPart
from shared.types.request import GenerationRequest
from shared.types.worker import WorkerInfo

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
            raise unknown_model(self._by_name)
        return model

    def cards(self) -> list[ModelCard]:
        """The models as clients see them."""
        return [self._card(model) for model in self.models]

    def check(self, request: InferenceRequest) -> ServedModel:
        """All that can be said before any work is spent on the request. Raises InvalidRequest and its
        kin."""
        model = self.model(request.model)
        check_request(request, self._card(model))
        return model

    async def render(self, model: ServedModel, request: InferenceRequest, probe: RequestProbe) -> Order:
        """Render and size a checked request, off the event loop where that may take long.

        Raises ContextLengthExceeded, InvalidRequest and what is wrong with media.
        """
        context = self._max_model_len(model)
        if _num_bytes(request) > HEAVY_BYTES:
            prompt = await asyncio.to_thread(model.render, request, context)
        else:
            prompt = model.render(request, context)
        max_tokens = _max_tokens(context, request, prompt)
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

    def _card(self, model: ServedModel) -> ModelCard:
        """Pictures are served where an encoder is, or is to be."""
        vision = model.vision and (
            model.expects_encoder or any(info.kind == "encoder" for info in self._infos(model))
        )
        return ModelCard(model.name, self._max_model_len(model), model.vocab_size, model.created, vision)

    def _max_model_len(self, model: ServedModel) -> int:
        """What every live worker of the model can hold."""
        lens = [info.max_model_len for info in self._infos(model) if info.max_model_len]
        return min([model.max_model_len, *lens])

    def _infos(self, model: ServedModel) -> list[WorkerInfo]:
        return [w.info for w in self._workers.live() if w.info.model == model.name]


def _max_tokens(context: int, request: InferenceRequest, prompt: Prompt) -> int:
    """Tokens that may be emitted; what was not said is all that the context has room for."""
    num_tokens, wanted = len(prompt.token_ids), request.sampling.max_tokens
    room = context - num_tokens
    if room < max(wanted, 1):
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens and {max(wanted, 1)} more are wanted, "
            f"but the served context holds {context}",
            param="prompt" if request.messages is None else "messages",
        )
    return wanted or room


def _num_bytes(request: InferenceRequest) -> int:
    parts = [part for message in request.messages or () for part in message.parts]
    return len(request.prompt or "") + sum(
        len(part.text if isinstance(part, TextPart) else part.data) for part in parts
    )
