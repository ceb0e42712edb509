"""Builds the transfer backends that a configuration names; each is imported only when it is named."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.services import TransferConfig
from shared.errors import ConfigError
from shared.transfer.base import TransferBackend


def make_backends(config: TransferConfig, agent_name: str) -> Sequence[TransferBackend]:
    """One backend a name in ``order``. ``agent_name`` must be unique among all peers (worker id and
    incarnation). Raises ConfigError for an unknown name, or one whose package is not installed."""
    return [_make(name, config, agent_name) for name in config.order]


def _make(name: str, config: TransferConfig, agent_name: str) -> TransferBackend:
    if name == "shm":
        from shared.transfer.shm import ShmBackend

        return ShmBackend()
    if name == "tcp":
        from shared.transfer.tcp import TcpBackend

        return TcpBackend(config.tcp_host, config.tcp_port, advertise=config.tcp_advertise)
    if name == "nixl":
        from shared.transfer.nixl import NixlBackend

        return NixlBackend(agent_name)
    if name == "mooncake":
        from shared.transfer.mooncake import MooncakeBackend

        return MooncakeBackend(config.tcp_host)
    raise ConfigError(f"no transfer backend is called {name!r}")
