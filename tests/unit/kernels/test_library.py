"""Building the kernels: cached by content, absent compiler tolerated, broken compiler tolerated."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from shared.kernels import library

GCC = shutil.which("gcc") or shutil.which("cc")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The loader without its memory and with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library.cache_clear()
    yield monkeypatch
    library.library.cache_clear()


@pytest.mark.skipif(GCC is None, reason="no C compiler")
def test_a_build_is_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        library, "_FLAGS", ("-std=gnu11", "-O0", "-march=native", "-shared", "-fPIC", "-pthread")
    )
    first = library.build(str(GCC), tmp_path)
    stamp = first.stat().st_mtime_ns
    assert library.build(str(GCC), tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


@pytest.mark.skipif(GCC is None, reason="no C compiler")
def test_the_sources_compile_without_warnings() -> None:
    sources = Path(library.__file__).with_name("native")
    command = [str(GCC), "-std=gnu11", "-march=native", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([*command, str(sources / "kernels.c")], check=True)


def test_without_a_compiler_the_twins_serve(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert library.library() is None
    assert "no C compiler" in caplog.text
    assert not library.available()
    assert library.set_threads(2) == 1


def test_a_failing_compiler_is_not_fatal(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(shutil, "which", lambda name: "/bin/false")
    assert library.library() is None
