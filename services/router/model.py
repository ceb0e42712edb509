"""The text side of one served model: prompts in, text out; media by their headers alone.

Owns nothing that changes. Pixels are the encoder's business, weights the workers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from services.router.choice import Choice
from shared.config.services import LimitsConfig, ModelConfig
from shared.errors import ConfigError, InvalidMedia, InvalidRequest
from shared.multimodal.hashing import mm_hash
from shared.multimodal.image import ImageLimits, inspect_image
from shared.multimodal.processor import ImageProcessor, load_processor
from shared.text.prompt import check_prompt_ids, encode_prompt, render_chat
from shared.text.stops import ChoiceText
from shared.text.tokenizer import Tokenizer
from shared.types.inference import ImagePart, InferenceRequest, Message
from shared.types.request import MediaItem

ROLES = frozenset({"system", "user", "assistant"})


class Prompt(Struct, frozen=True):
    """A rendered prompt: ids with placeholders in place, the items, and their raw bytes by mm_hash."""

    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...] = ()
    media_data: Mapping[str, bytes] = {}


class ServedModel:
    """Immutable; any thread. ``max_model_len`` is the model's own, ``vocab_size`` bounds ids that a
    client may name, ``created`` is in seconds since 1970. ``vision``: the model sees; ``expects_encoder``:
    this deployment has workers for that."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        processor: ImageProcessor,
        *,
        max_model_len: int,
        vocab_size: int,
        created: int = 0,
        image_limits: ImageLimits | None = None,
        expects_encoder: bool = True,
    ) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.created = created
        self.vision = processor.image_token_id is not None
        self.expects_encoder = expects_encoder
        self._tokenizer = tokenizer
        self._processor = processor
        self._image_limits = image_limits or ImageLimits()

    def render(self, request: InferenceRequest, context: int | None = None) -> Prompt:
        """The prompt of a request. ``context``: tokens that are served; None = the model's own length.
        Raises InvalidRequest and its kin, and what is wrong with media."""
        context = context or self.max_model_len
        image_token_id = self._processor.image_token_id
        if request.prompt_token_ids is not None:
            return Prompt(check_prompt_ids(request.prompt_token_ids, image_token_id=image_token_id))
        if request.prompt is not None:
            return Prompt(
                encode_prompt(
                    request.prompt,
                    self._tokenizer,
                    image_token_id=image_token_id,
                    max_model_len=context,
                )
            )
        return self._render_chat(request.messages or (), request.cache_salt, context)

    def choice(self, index: int, request: InferenceRequest) -> Choice:
        """The output path of one choice."""
        text = ChoiceText(
            self._tokenizer,
            stops=request.stop,
            include_stop=request.include_stop_str,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=request.sampling.min_tokens,
        )
        return Choice(index, text, request.sampling.stop_token_ids)

    def token_text(self, token_ids: Sequence[int]) -> list[bytes]:
        """Each token's own bytes."""
        return [self._tokenizer.token_bytes(token_id) for token_id in token_ids]

    def _render_chat(self, messages: Sequence[Message], salt: str, context: int) -> Prompt:
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        # The template writes roles between its control tokens: no other text may get there.
        if any(message.role not in ROLES for message in messages):
            raise InvalidRequest(f"role must be one of {', '.join(sorted(ROLES))}", param="messages")
        images = [part.data for m in messages for part in m.parts if isinstance(part, ImagePart)]
        limits, processor = self._image_limits, self._processor
        if images and not self.vision:
            raise InvalidRequest("this model does not take images", param="messages")
        if len(images) > limits.max_images:
            raise InvalidMedia(
                f"a request may have at most {limits.max_images} images", code="too_many_images"
            )
        headers = [inspect_image(data, limits) for data in images]
        if sum(header.total_pixels for header in headers) > limits.max_total_pixels:
            raise InvalidMedia("the images have too many pixels together", code="image_too_large")
        rendered = render_chat(
            messages,
            self._tokenizer,
            image_rows=[processor.num_rows(header.width, header.height) for header in headers],
            image_token_id=processor.image_token_id,
            max_model_len=context,
        )
        hashes = [mm_hash(data, processor_version=processor.version, salt=salt) for data in images]
        media = tuple(
            MediaItem(h, slot.offset, slot.num_tokens)
            for h, slot in zip(hashes, rendered.media_slots, strict=True)
        )
        return Prompt(rendered.token_ids, media, dict(zip(hashes, images, strict=True)))


def load_model(
    config: ModelConfig, limits: LimitsConfig, created: int, *, expects_encoder: bool = True
) -> ServedModel:
    """Read a model directory. Raises ConfigError."""
    path = Path(config.path)
    tokenizer = Tokenizer.load(path)
    settings = _read_config(path)
    text = settings.get("text_config") or {}
    max_model_len = settings.get("max_position_embeddings") or text.get("max_position_embeddings")
    if not isinstance(max_model_len, int):
        raise ConfigError("config.json names no max_position_embeddings")
    # Padding rows of an embedding table are no tokens: nobody may name them.
    vocab_size = settings.get("triptych_vocab_size") or settings.get("vocab_size") or text.get("vocab_size")
    return ServedModel(
        config.name or path.resolve().name,
        tokenizer,
        load_processor(path),
        max_model_len=max_model_len,
        vocab_size=vocab_size if isinstance(vocab_size, int) else tokenizer.vocab_size,
        created=created,
        image_limits=image_limits(limits),
        expects_encoder=expects_encoder,
    )


def image_limits(limits: LimitsConfig) -> ImageLimits:
    """What pictures of one request may take."""
    return ImageLimits(
        max_bytes=limits.max_media_bytes,
        max_pixels=limits.max_pixels,
        max_images=limits.max_media_items,
        max_total_pixels=limits.max_media_items * limits.max_pixels,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("config.json cannot be read") from error
    if not isinstance(value, dict):
        raise ConfigError("config.json is not a JSON object")
    return value
