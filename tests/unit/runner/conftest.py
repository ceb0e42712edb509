"""Model directories for runner tests: tiny ones made here, and the demo model where it can be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from models import build
from models.gguf_source import SourceError, find_gguf


def _built(root: Path, name: str, *, text_only: bool) -> Path:
    """A model of the demo, kept between runs in the project's own state folder."""
    try:
        find_gguf()
    except SourceError as error:
        pytest.skip(str(error))
    out = root / ".triptych" / "models" / name
    if not build.is_complete(out, text_only=text_only):
        build.build(out, text_only=text_only)
    return out


@pytest.fixture(scope="session")
def demo_model(repo_root: Path) -> Path:
    """The demo vision-language model."""
    return _built(repo_root, "smollm2-shapes-vlm", text_only=False)


@pytest.fixture(scope="session")
def text_model(repo_root: Path) -> Path:
    """SmolLM2 alone, unpadded."""
    return _built(repo_root, "smollm2-135m", text_only=True)


@pytest.fixture(scope="session")
def weights_cache(repo_root: Path) -> Path:
    """Where prepared weights of these models are kept between runs."""
    return repo_root / ".triptych" / "cache"
