"""The chaos workload: a function of its seed, with everything in it that the run is meant to meet."""

from __future__ import annotations

import base64

from services.router.model import load_model
from shared.api.openai import CallLabels, parse_chat, parse_completion
from shared.config.services import LimitsConfig, ModelConfig
from shared.types.inference import ModelCard
from tests.chaos.expected import MAX_MODEL_LEN, WITNESS, Answers
from tests.chaos.workload import Workload, plain_case

CARD = ModelCard("witness", MAX_MODEL_LEN, 260, 0, vision=True)


def read_image(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def test_a_case_is_a_function_of_seed_and_number() -> None:
    assert Workload(5).case(17) == Workload(5).case(17)
    assert Workload(5).case(17) != Workload(6).case(17)


def test_every_sort_of_request_occurs() -> None:
    workload = Workload(1)
    cases = [workload.case(number) for number in range(400)]
    assert {case.n for case in cases} == {1, 2, 3}
    assert {len(case.media) for case in cases} == {0, 1, 2}
    assert {case.stream for case in cases} == {True, False}
    assert any(case.abort_after for case in cases)
    for name in ("logprobs", "min_tokens", "stop_token_ids", "logit_bias", "ignore_eos", "min_p"):
        assert any(getattr(case.sampling, name) for case in cases), name
    heads = [case.prompt[:32] for case in cases]
    assert len(set(heads)) < len(heads) - 50, "prefixes are shared"
    assert max(len(case.prompt) + case.sampling.max_tokens for case in cases) < MAX_MODEL_LEN


def test_bodies_mean_what_the_cases_say() -> None:
    workload, model = Workload(2), load_model(ModelConfig(str(WITNESS)), LimitsConfig(), 0)
    cases = [*(workload.case(number) for number in range(120)), plain_case(2, 3)]
    for case in cases:
        call = (
            parse_chat(case.body, CARD, read_image, CallLabels())
            if "messages" in case.body
            else parse_completion(case.body, CARD, CallLabels())
        )
        (request,) = call.requests
        prompt = model.render(request)
        assert prompt.token_ids == case.prompt
        assert [(m.offset, m.num_tokens) for m in prompt.media] == [
            (m.offset, m.num_tokens) for m in case.media
        ]
        assert (request.n, request.seed, call.options.stream) == (case.n, case.sampling.seed, case.stream)
        for name in case.sampling.__struct_fields__:
            if name != "seed":
                assert getattr(request.sampling, name) == getattr(case.sampling, name), name


def test_answers_have_one_entry_a_choice() -> None:
    workload = Workload(3)
    case = next(case for case in map(workload.case, range(50)) if case.n == 3)
    answers = Answers().of(case)
    assert len(answers) == 3
    assert all(0 < len(answer.token_ids) <= case.sampling.max_tokens for answer in answers)
