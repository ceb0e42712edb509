"""Tiers by name: what loads, and that everything else is a configuration error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.tiering.external import load_tier
from shared.tiering.offload import OffloadTier

EXAMPLE = "docs.examples.directory_tier:DirectoryTier"


def test_the_example_loads_with_its_options(tmp_path: Path) -> None:
    tier = load_tier(
        EXAMPLE, {"directory": str(tmp_path / "objects"), "capacity_bytes": 4096, "name": "mine"}
    )
    assert isinstance(tier, OffloadTier)
    assert (tier.name, tier.capacity_bytes) == ("mine", 4096)
    tier.close()


@pytest.mark.parametrize(
    ("module_path", "problem"),
    [
        ("", "expected package.module:Class"),
        ("docs.examples.directory_tier", "expected package.module:Class"),
        ("docs/examples/directory_tier.py:DirectoryTier", "expected package.module:Class"),
        (":DirectoryTier", "expected package.module:Class"),
        ("a..b:C", "expected package.module:Class"),
        ("docs.examples.directory_tier:DirectoryTier\n", "expected package.module:Class"),
        ("docs.examples.nowhere:Tier", "cannot be imported"),
        ("docs.examples.directory_tier:Nothing", "not a complete subclass"),
        ("docs.examples.directory_tier:ObjectStore", "not a complete subclass"),
        ("shared.tiering.offload:OffloadTier", "not a complete subclass"),
        ("shared.tiering.record:encode_header", "not a complete subclass"),
    ],
)
def test_anything_else_is_a_config_error(module_path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_tier(module_path, {})


@pytest.mark.parametrize(
    "options", [{}, {"directory": "/proc/self/nowhere", "capacity_bytes": 1}, {"other": 1}]
)
def test_bad_options_are_a_config_error(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        load_tier(EXAMPLE, options)


def test_a_module_that_fails_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_tier_module.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="at import"):
        load_tier("broken_tier_module:Tier", {})
    assert "broken_tier_module" not in sys.modules
