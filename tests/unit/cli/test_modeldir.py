"""Where a model comes from, and what is said when it is not there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from services.cli.modeldir import DEMO_MODEL, is_built, resolve_model
from services.cli.state import StateDir
from shared.errors import ConfigError


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "state")
    state.prepare()
    return state


def resolve(wanted: str, state: StateDir) -> Path:
    return resolve_model(wanted, state, lambda text: None)


def test_a_directory_with_a_config_is_taken_as_it_is(state: StateDir, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert resolve(str(tmp_path / "mine"), state) == tmp_path / "mine"


def test_a_directory_without_one_is_refused(state: StateDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(str(tmp_path), state)


def test_a_missing_directory_is_refused(state: StateDir) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        resolve("./nowhere", state)


def test_the_witness_ships_with_the_project(state: StateDir) -> None:
    assert (resolve("witness", state) / "config.json").is_file()


def test_a_built_demo_model_is_not_built_again(state: StateDir) -> None:
    model = state.models / "smollm2-shapes-vlm"
    model.mkdir()
    assert not is_built(state)
    (model / "config.json").write_text("{}")
    assert is_built(state) and resolve(DEMO_MODEL, state) == model


def test_a_build_that_fails_leaves_the_reason_to_the_builder(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="could not be built") as caught:
        resolve(DEMO_MODEL, state)
    assert "make setup" not in caught.value.message and str(state.models) in caught.value.message


def test_an_empty_name_is_not_taken_for_the_demo_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model named"):
        resolve_model("", StateDir(tmp_path), print)
