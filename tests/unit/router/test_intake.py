"""What is refused before any work, judged by what this deployment's workers serve."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.router.intake import Intake
from services.router.model import load_model
from shared.clock import CountingEntropy
from shared.config.services import LimitsConfig, ModelConfig
from shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from shared.types.inference import ImagePart, InferenceRequest, Message, TextPart
from shared.types.request import SamplingParams
from tests.unit.router.cluster import WITNESS, Cluster
from tests.unit.router.requests import PNG, ask_for, picture_request

SERVED = 64


def intake_of(cluster: Cluster, *, expects_encoder: bool = True) -> Intake:
    """An intake of its own over a cluster's workers."""
    model = load_model(ModelConfig(str(WITNESS)), LimitsConfig(), created=7, expects_encoder=expects_encoder)
    return Intake([model], cluster.dispatcher.workers, CountingEntropy(), lambda: 0)


def shorten(cluster: Cluster) -> None:
    """Let one of the workers hold SERVED tokens only."""
    worker = cluster.dispatcher.workers.live()[-1]
    worker.info = msgspec.structs.replace(worker.info, max_model_len=SERVED)


@pytest.mark.parametrize("num_chars", [SERVED + 1, 5_000, 1_000_000])
@pytest.mark.parametrize("chat", [False, True])
async def test_a_prompt_that_is_too_long_is_told_the_context_that_is_served(
    make_cluster: Any, num_chars: int, chat: bool
) -> None:
    cluster = await make_cluster("epd")
    shorten(cluster)
    request = ask_for()
    text = "x" * num_chars
    if chat:
        message = Message("user", (TextPart(text),))
        request = msgspec.structs.replace(request, prompt=None, messages=(message,))
    else:
        request = msgspec.structs.replace(request, prompt=text)
    answer = await cluster.ask(request)
    assert isinstance(answer.error, ContextLengthExceeded)
    assert str(SERVED) in answer.error.message and "4096" not in answer.error.message
    assert answer.error.param == ("messages" if chat else "prompt")


async def test_pictures_without_an_encoder_are_refused_at_once(make_cluster: Any) -> None:
    cluster = await make_cluster("pd")
    blind = intake_of(cluster, expects_encoder=False)
    assert [card.vision for card in blind.cards()] == [False]
    with pytest.raises(InvalidRequest) as refused:
        blind.check(picture_request(PNG))
    assert (refused.value.http_status, refused.value.param) == (400, "messages[0].content[0]")
    assert "no encoder" in refused.value.message
    blind.check(ask_for())


async def test_pictures_wait_for_an_encoder_that_is_expected_and_take_one_that_comes(
    make_cluster: Any,
) -> None:
    cluster = await make_cluster("pd")
    intake_of(cluster).check(picture_request(PNG))
    cluster.add("encoder", "e0")
    await cluster.settle()
    intake_of(cluster, expects_encoder=False).check(picture_request(PNG))


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 17}),
        ("stop", {"stop": ("a",) * 5}),
        ("cache_salt", {"cache_salt": "x" * 257}),
        ("temperature", {"sampling": {"temperature": 2.5}}),
        ("logprobs", {"sampling": {"logprobs": 21}}),
    ],
)
async def test_bounds_hold_whatever_the_front_end(
    make_cluster: Any, param: str, fields: dict[str, Any]
) -> None:
    cluster = await make_cluster("epd")
    answer = await cluster.ask(ask_for(**fields))
    assert isinstance(answer.error, InvalidRequest) and answer.error.param == param


async def test_pictures_stand_in_user_messages_only(make_cluster: Any) -> None:
    cluster = await make_cluster("epd")
    messages = (Message("system", (ImagePart(PNG),)), Message("user", (TextPart("?"),)))
    answer = await cluster.ask(InferenceRequest("witness", SamplingParams(4), messages=messages))
    assert isinstance(answer.error, InvalidRequest)
    assert answer.error.param == "messages[0].content[0]"


async def test_an_unknown_model_is_told_which_are_served(make_cluster: Any) -> None:
    cluster = await make_cluster("epd")
    answer = await cluster.ask(msgspec.structs.replace(ask_for(), model="SECRET"))
    assert isinstance(answer.error, ModelNotFound)
    assert "witness" in answer.error.message and "SECRET" not in answer.error.message
