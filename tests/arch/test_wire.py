"""The wire: lint, no breaking change against the committed baseline, generated code up to date."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch._tree import ROOT

PROTO = ROOT / "proto"
BUF = Path(sys.executable).with_name("buf")


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run in the project's root with the environment's own tools first on PATH."""
    env = {**os.environ, "PATH": f"{BUF.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)


def test_wire_passes_lint() -> None:
    done = _run(str(BUF), "lint")
    assert done.returncode == 0, done.stdout + done.stderr


def test_wire_breaks_no_peer_of_the_baseline() -> None:
    done = _run(str(BUF), "breaking", "--against", "proto/baseline.binpb")
    assert done.returncode == 0, done.stdout + done.stderr


def _generated(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*_pb2*"))
        if path.suffix in {".py", ".pyi"}
    }


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of `make proto`'s compiler, made now."""
    out = tmp_path_factory.mktemp("proto")
    line = next(line for line in _make_proto().splitlines() if "grpc_tools.protoc" in line)
    words = line.split("-m grpc_tools.protoc", 1)[1].split()
    argv = [
        word.replace("=proto", f"={out}") if "_out=" in word or "_opt=" in word else word for word in words
    ]
    done = _run(sys.executable, "-m", "grpc_tools.protoc", *argv)
    assert done.returncode == 0, done.stderr
    return out


def _make_proto() -> str:
    """The command line behind `make proto`, unfolded but not run."""
    done = _run("make", "--dry-run", "--always-make", "proto")
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("\\\n", " ")


def test_generated_code_is_up_to_date(fresh: Path) -> None:
    committed, made = _generated(PROTO), _generated(fresh)
    assert sorted(committed) == sorted(made)
    assert [name for name in made if made[name] != committed[name]] == []


def test_every_field_stays_in_its_package() -> None:
    assert not (PROTO / "__init__.py").exists()
    assert sorted(p.name for p in (PROTO / "triptych/v1").glob("*.proto")) == [
        "common.proto",
        "control.proto",
        "inference.proto",
        "kv_store.proto",
        "worker.proto",
    ]
