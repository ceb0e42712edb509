"""Finds the directory of the model to serve, building or downloading it when that is what was asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from services.cli.state import StateDir
from shared.errors import ConfigError

DEMO_MODEL = "smollm2-shapes-vlm"
WITNESS = "witness"


def resolve_model(wanted: str, state: StateDir, progress: Callable[[str], None]) -> Path:
    """The model directory for ``--model``: the demo model by its name (built on first use), "witness" = the
    arithmetic stand-in, a directory, or a hub id. Raises ConfigError with what to do about it."""
    if not wanted:
        raise ConfigError("--model: no model named")
    if wanted == DEMO_MODEL:
        return _demo_model(state, progress)
    if wanted == WITNESS:
        return _shipped(WITNESS)
    path = Path(wanted).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model: {path} has no config.json")
        return path.resolve()
    if wanted.count("/") == 1 and not wanted.startswith((".", "/", "~")):
        return _from_hub(wanted, state, progress)
    raise ConfigError(f"model: there is no directory {wanted}")


def is_built(state: StateDir) -> bool:
    """Whether the demo model is there. The builder's last step is to rename it into place."""
    return (state.models / DEMO_MODEL / "config.json").is_file()


def _demo_model(state: StateDir, progress: Callable[[str], None]) -> Path:
    target = state.models / DEMO_MODEL
    if not is_built(state):
        progress(f"building the demo model in {target} (once)")
        # In a session of its own, so that Ctrl-C reaches this process alone, which then ends the builder.
        done = subprocess.run(
            [sys.executable, "-m", "models.build", str(target)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if done.returncode != 0:
            raise ConfigError(f"the demo model could not be built in {target}; the reason is above")
    return target


def _shipped(name: str) -> Path:
    import models

    for root in models.__path__:
        if (Path(root) / name / "config.json").is_file():
            return Path(root) / name
    raise ConfigError(f"model: this installation has no {name} model")


def _from_hub(name: str, state: StateDir, progress: Callable[[str], None]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError("model: a hub id needs the worker extra (huggingface_hub)") from None
    target = state.models / name.replace("/", "--")
    progress(f"downloading {name}")
    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        snapshot_download(name, local_dir=target, allow_patterns=patterns)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {name} could not be downloaded ({type(error).__name__})") from None
    return target
