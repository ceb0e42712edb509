"""Model directories for runner tests: tiny ones made here, and the demo model where it can be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.demo_models import built


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo vision-language model."""
    return built("smollm2-shapes-vlm", text_only=False)


@pytest.fixture(scope="session")
def text_model() -> Path:
    """SmolLM2 alone, unpadded."""
    return built("smollm2-135m", text_only=True)


@pytest.fixture(scope="session")
def weights_cache(repo_root: Path) -> Path:
    """Where prepared weights of these models are kept between runs."""
    return repo_root / ".triptych" / "cache"
