"""Where backend tcp listens, and where it tells peers that it is."""

from __future__ import annotations

import msgspec
import pytest

from services.cli import procfs
from shared.clock import SystemEntropy
from shared.config.services import ModelConfig, StoreConfig, TransferConfig
from shared.transfer.factory import make_backends
from shared.transfer.tcp import TcpBackend, _Metadata


def told(backend: TcpBackend) -> tuple[str, int]:
    metadata = msgspec.msgpack.decode(backend.describe(), type=_Metadata)
    return metadata.host, metadata.port


def test_peers_are_told_where_it_listens_or_what_the_configuration_says() -> None:
    port = next(procfs.internal_ports("127.0.0.1", SystemEntropy()))
    (plain,) = make_backends(TransferConfig(order=("tcp",), tcp_port=port), "a")
    assert isinstance(plain, TcpBackend)
    assert told(plain) == ("127.0.0.1", port)
    plain.close()
    (behind,) = make_backends(
        TransferConfig(order=("tcp",), tcp_port=port, tcp_advertise="proxy.example:81"), "b"
    )
    assert isinstance(behind, TcpBackend)
    assert behind.port == port, "the port is free again at once"
    assert told(behind) == ("proxy.example", 81)
    behind.close()


@pytest.mark.parametrize("address", ["proxy", "proxy:", "proxy:0", "proxy:65536", "proxy:x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="tcp_advertise"):
        TransferConfig(tcp_advertise=address)


def test_a_store_at_a_fixed_port_keeps_no_embeddings() -> None:
    transfer = TransferConfig(tcp_port=4000)
    with pytest.raises(ValueError, match="embeddings_mb"):
        StoreConfig(ModelConfig("m"), transfer=transfer)
    assert StoreConfig(ModelConfig("m"), transfer=transfer, embeddings_mb=0).transfer is transfer
