"""The demo's models for tests: built where that is possible, and kept between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from models import build
from models.gguf_source import SourceError, find_gguf

MODELS = Path(__file__).parents[2] / ".triptych" / "models"


def built(name: str, *, text_only: bool) -> Path:
    """The directory of a model in the project's own state folder; skips the test where it cannot be
    built."""
    try:
        find_gguf()
    except SourceError as error:
        pytest.skip(str(error))
    out = MODELS / name
    if not build.is_complete(out, text_only=text_only):
        build.build(out, text_only=text_only)
    return out
