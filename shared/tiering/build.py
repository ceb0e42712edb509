"""Lower tiers from the store's configuration. Owns their order: the disk first, then those from outside."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qsl

from shared.clock import Clock
from shared.config.services import StoreConfig
from shared.errors import ConfigError
from shared.failpoints import Failpoints
from shared.telemetry.logs import get_logger
from shared.tiering.disk import DiskTier
from shared.tiering.eviction import make_policy
from shared.tiering.external import load_tier
from shared.tiering.lower import LowerTiers, lower_tiers
from shared.tiering.observe import TierMetrics
from shared.tiering.offload import OffloadTier
from shared.tiering.reactor import Reactor
from shared.tiering.record import PayloadCheck, believe_payload, verify_payload

_log = get_logger(__name__)

#: Size of a record, estimated, for how many keys a disk tier's policy remembers.
_RECORD_BYTES = 256 << 10
#: Block hashes that are remembered for admission.
_REMEMBERED = 1 << 17


def open_lower_tiers(
    config: StoreConfig, reactor: Reactor, clock: Clock, failpoints: Failpoints
) -> LowerTiers:
    """The configured tiers, open; reads a disk tier's directory, which takes its time. Raises ConfigError."""
    tiers: list[OffloadTier] = []
    upkeep = []
    check_payload = verify_payload if config.kv.verify else believe_payload
    try:
        if config.disk.path:
            disk = _disk(config, clock, failpoints, check_payload)
            tiers.append(disk)
            upkeep.append(disk.reconcile)
        tiers += [_external(text) for text in config.tiers]
        names = [tier.name for tier in tiers]
        if len(set(names) | {"cpu", "embeddings"}) != len(names) + 2:
            raise ConfigError(f"tiers need names of their own: {', '.join(names)}")
    except ConfigError:
        for tier in tiers:
            tier.close()
        raise
    return lower_tiers(
        tiers,
        reactor,
        clock,
        deadline_s=config.lower.deadline_s,
        max_loads=config.lower.max_loads,
        max_stores=config.lower.max_stores,
        num_remembered=_REMEMBERED,
        upkeep=upkeep,
        check_payload=check_payload,
    )


def _disk(config: StoreConfig, clock: Clock, failpoints: Failpoints, check_payload: PayloadCheck) -> DiskTier:
    capacity = config.disk.capacity_mb << 20
    policy = make_policy(config.disk.policy, capacity // _RECORD_BYTES)
    began = clock.now()
    disk = DiskTier(
        Path(config.disk.path),
        capacity,
        policy,
        clock=clock,
        failpoints=failpoints,
        observer=TierMetrics("disk"),
        check_payload=check_payload,
    )
    _log.info("the disk tier is open", records=disk.num_records, seconds=round(clock.now() - began, 3))
    return disk


def _external(text: str) -> OffloadTier:
    module_path, _, query = text.partition("?")
    options: dict[str, object] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return load_tier(module_path, options)
