"""Our top-level import names belong to us alone, in every environment we are installed into."""

from __future__ import annotations

import importlib
import importlib.metadata
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.arch._tree import ROOT

OURS = ("services", "shared", "models", "triptych")


@pytest.mark.parametrize("name", OURS)
def test_no_other_distribution_claims_our_names(name: str) -> None:
    owners = {owner.lower() for owner in importlib.metadata.packages_distributions().get(name, [])}
    assert owners <= {"triptych"}


@pytest.mark.parametrize("name", OURS)
def test_our_names_resolve_to_this_project(name: str) -> None:
    module = importlib.import_module(name)
    expected = ROOT / "proto" / name if name == "triptych" else ROOT / name
    assert {Path(entry).resolve() for entry in module.__path__} == {expected}


def test_there_is_one_console_script() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"triptych": "services.cli.__main__:main"}
    assert "gui-scripts" not in project and "entry-points" not in project


def test_the_wheel_holds_our_packages_and_their_data_only(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    built = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(built) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(OURS)
    for needed in (
        "triptych/v1/worker_pb2.py",
        "services/cli/assets/shapes.png",
        "shared/kernels/native/kernels.c",
        "models/witness/config.json",
    ):
        assert needed in names
