"""Models and deployments that several end-to-end tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.demo_models import built


@pytest.fixture(scope="session")
def text_model() -> Path:
    """SmolLM2 alone, unpadded."""
    return built("smollm2-135m", text_only=True)
