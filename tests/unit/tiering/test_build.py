"""Lower tiers from configuration: the disk first, then those named in text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from shared.clock import ManualClock
from shared.config.load import load
from shared.config.services import StoreConfig
from shared.errors import ConfigError
from shared.failpoints import Failpoints
from shared.tiering.build import open_lower_tiers
from shared.tiering.lower import LowerTiers
from shared.tiering.offload import LoadItem
from shared.tiering.record import CorruptRecord, verify
from tests.contract.tiering.harness import make
from tests.fakes.tiers import DictTier, ManualReactor
from tests.unit.tiering.disk_setting import Disk, file_of

NAMED = "tests.unit.tiering.test_build:Named"


class Named(DictTier):
    """Made from options; remembers them."""

    made: list[Named] = []

    def __init__(self, name: str, **options: object) -> None:
        super().__init__(name)
        self.options = options
        self.num_closed = 0
        Named.made.append(self)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    Named.made.clear()
    yield
    Named.made.clear()


def opened(*settings: str) -> LowerTiers:
    config = load(StoreConfig, overrides=["model.path=m", *settings])
    clock = ManualClock()
    return open_lower_tiers(config, ManualReactor(clock), clock, Failpoints())


def test_without_any_there_are_none() -> None:
    lower = opened()
    assert lower.chain.is_empty and lower.upkeep == ()


def test_the_disk_comes_first_and_options_keep_their_types(tmp_path: Path) -> None:
    lower = opened(
        f"disk.path={tmp_path / 'disk'}",
        "disk.capacity_mb=2",
        f"tiers={NAMED}?name=far&size=7&on=true&path=/a/b%2Cc&empty=",
        "lower.max_loads=3",
    )
    assert [lower.chain.name(index) for index in (0, 1)] == ["disk", "far"]
    (made,) = Named.made
    assert made.options == {"size": 7, "on": True, "path": "/a/b,c", "empty": ""}
    assert lower.promotions.room == 3
    for task in lower.upkeep:
        task()
    lower.chain.close()
    assert made.num_closed == 1


@pytest.mark.parametrize("name", ["disk", "cpu", "embeddings"])
def test_names_are_unique_since_metrics_know_tiers_by_them(tmp_path: Path, name: str) -> None:
    settings = [f"disk.path={tmp_path / 'disk'}", f"tiers={NAMED}?name={name}"]
    with pytest.raises(ConfigError, match="names of their own"):
        opened(*settings)
    assert Named.made[0].num_closed == 1
    opened(settings[0]).chain.close()  # the directory is free again


@pytest.mark.parametrize("verified", [True, False])
def test_what_is_not_verified_is_not_verified_in_any_tier(tmp_path: Path, verified: bool) -> None:
    """The switch of tests that prove what checksums are worth: the disk and who asks it believe alike."""
    stored = make(0)
    first = Disk(tmp_path / "disk")
    first.store([stored])
    first.close()
    path = file_of(tmp_path / "disk", stored)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    lower = opened(f"disk.path={tmp_path / 'disk'}", f"kv.verify={str(verified).lower()}")
    into = memoryview(bytearray(stored.item.payload.nbytes))
    headers: dict[bytes, bytes] = {}
    lower.chain.load(0, [LoadItem(stored.key, into)], lambda end: headers.update(end.loaded))
    lower.chain.close()
    assert (stored.key in headers) == (not verified)
    record = stored.record
    spoiled = memoryview(bytearray(len(into)))
    call = partial(verify, record, spoiled, record.content, record.identity, record.layout)
    if verified:
        with pytest.raises(CorruptRecord, match="payload"):
            call(lower.check_payload)
    else:
        call(lower.check_payload)
        assert into[-1] == data[-1] ^ 1


def test_what_cannot_be_made_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        opened(f"tiers={NAMED}?size=1")
