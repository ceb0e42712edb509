"""Fixtures of the transfer contract: one suite, over every backend, plain and behind ``faulty``."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.contract.transfer.harness import MakePeer, MakeReader, Peer, Reader

BACKENDS = ("shm", "tcp", "nixl", "mooncake")
#: Libraries without which a backend cannot be tested.
_NEEDS = {"nixl": "nixl_cu12", "mooncake": "mooncake.engine"}


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the backend under test."""
    name: str = request.param
    if name in _NEEDS:
        # Installed, it may still lack a library of the system.
        pytest.importorskip(_NEEDS[name], reason=f"{name} is not installed", exc_type=ImportError)
    return name


@pytest.fixture(params=["plain", "faulty"])
def reader(request: pytest.FixtureRequest, backend: str) -> Iterator[Reader]:
    """A reader over the backend, and over the same behind a wrapper without faults."""
    made = Reader(backend, None if request.param == "plain" else {})
    yield made
    made.close()


@pytest.fixture
def make_reader(backend: str) -> Iterator[MakeReader]:
    """Makes readers with options of their own; closes them."""
    made: list[Reader] = []

    def make(*args: object, **more: object) -> Reader:
        made.append(Reader(backend, *args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def peer(backend: str) -> Iterator[Peer]:
    """A peer process that no test harms; tests use blocks of their own in it."""
    made = Peer(backend)
    yield made
    made.close()


@pytest.fixture
def make_peer(backend: str) -> Iterator[MakePeer]:
    """Starts peer processes of the test's own; ends them."""
    made: list[Peer] = []

    def make(*args: object, **more: object) -> Peer:
        made.append(functools.partial(Peer, backend)(*args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
