"""Models and deployments that the end-to-end tests share; each is started when first asked for, and stopped
after the last of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import WITNESS, Serving, serving
from tests.fakes.demo_models import built


@pytest.fixture(scope="session")
def text_model() -> Path:
    """SmolLM2 alone, unpadded."""
    return built("smollm2-135m", text_only=True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo vision-language model."""
    return built("smollm2-shapes-vlm", text_only=False)


@pytest.fixture(scope="package")
def demo(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The demo: six processes with real weights."""
    with serving(demo_model, tmp_path_factory.mktemp("demo"), "e=1,p=1,d=2,s=1") as deployment:
        yield deployment


@pytest.fixture(scope="package")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The witness model on six processes: every phase apart."""
    with serving(WITNESS, tmp_path_factory.mktemp("witness"), "e=1,p=1,d=2,s=1") as deployment:
        yield deployment


@pytest.fixture(scope="package")
def witness_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The witness model on one worker that does everything but encode."""
    with serving(WITNESS, tmp_path_factory.mktemp("alone"), "e=1,p=0,d=1,s=0") as deployment:
        yield deployment
