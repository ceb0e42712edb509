"""Several nodes as one pool of embeddings, over scripted nodes: who is asked, and who is offered what."""

from __future__ import annotations

import hashlib

import pytest

from shared.tiering.embedding_pool import NOT_FOUND, EmbeddingPool
from shared.tiering.nodes import NodeLease
from shared.tiering.remote import NO_EMBEDDING
from shared.tiering.rendezvous import ranked
from shared.types.store import EmbeddingHit, EmbeddingKey
from shared.types.transfer import AgentInfo, EcTransferParams

NAMES = ("a:1", "b:2", "c:3")
PARAMS = EcTransferParams("h", AgentInfo("w", "i", 1, (), ()), "m", 1, 8, "f", (0,), (1,), 5)


def key(n: int) -> EmbeddingKey:
    return EmbeddingKey(hashlib.sha256(bytes([n])).digest(), "o", "p", bytes(32), 1, 8, "f")


class Node:
    """Holds keys, and pauses at the next call when it ``fails``, as a client does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: set[EmbeddingKey] = set()
        self.paused = self.fails = self.closed = False
        self.num_lookups = 0
        self.released: list[str] = []

    async def lookup(self, key: EmbeddingKey, rows_per_block: int) -> EmbeddingHit:
        self.num_lookups += 1
        self.paused = self.paused or self.fails
        found = key in self.held and not self.paused
        return EmbeddingHit(f"of {self.name}", 1.0, PARAMS) if found else NO_EMBEDDING

    async def offer(self, key: EmbeddingKey, params: EcTransferParams) -> bool:
        self.paused = self.paused or self.fails
        if not self.paused:
            self.held.add(key)
        return not self.paused

    async def release(self, lease_ids: tuple[str, ...]) -> None:
        self.released += lease_ids

    async def close(self) -> None:
        self.closed = True


class Bench:
    def __init__(self, replicas: int = 1) -> None:
        self.nodes: dict[str, Node] = {}
        self.pool = EmbeddingPool(self._connect, NAMES, replicas)

    def _connect(self, name: str) -> Node:
        return self.nodes.setdefault(name, Node(name))

    def homes(self, key: EmbeddingKey) -> list[Node]:
        return [self.nodes[name] for name in ranked(NAMES, key.media_hash)]


async def test_every_key_has_a_home_that_is_offered_it_and_asked_for_it() -> None:
    bench = Bench()
    for n in range(30):
        assert await bench.pool.lookup(key(n), 4) == NOT_FOUND
        assert await bench.pool.offer(key(n), PARAMS) == 1
        home = bench.homes(key(n))[0]
        found = await bench.pool.lookup(key(n), 4)
        assert found == (PARAMS, NodeLease(home.name, f"of {home.name}"))
    assert all(node.held and node.num_lookups == 2 * len(node.held) for node in bench.nodes.values())


async def test_a_lease_goes_back_to_who_gave_it() -> None:
    bench = Bench()
    await bench.pool.release(NodeLease("b:2", "x"))
    await bench.pool.release(NodeLease("gone:9", "y"))
    assert [node.released for node in bench.nodes.values()] == [[], ["x"], []]


@pytest.mark.parametrize("trouble", ["paused", "fails", "empty"])
async def test_of_two_copies_the_second_is_found_when_the_first_is_not(trouble: str) -> None:
    bench = Bench(replicas=2)
    assert await bench.pool.offer(key(1), PARAMS) == 2
    first, second, third = bench.homes(key(1))
    assert key(1) not in third.held
    await bench.pool.lookup(key(1), 4)
    assert second.num_lookups == 0, "without trouble the second is not asked"
    if trouble == "empty":
        first.held.clear()
    else:
        setattr(first, trouble, True)
    found = await bench.pool.lookup(key(1), 4)
    assert found.lease is not None and found.lease.node == second.name


async def test_a_node_that_failed_is_passed_over_and_has_its_keys_again_when_it_is_back() -> None:
    bench = Bench()
    first, second, _ = bench.homes(key(1))
    first.fails = True
    assert await bench.pool.offer(key(1), PARAMS) == 0
    assert await bench.pool.offer(key(1), PARAMS) == 1 and key(1) in second.held
    first.fails = first.paused = False
    assert await bench.pool.lookup(key(1), 4) == NOT_FOUND
    await bench.pool.set_addresses((second.name,))
    assert first.closed and (await bench.pool.lookup(key(1), 4)).params == PARAMS


async def test_without_a_node_that_answers_it_is_a_miss() -> None:
    bench = Bench()
    for node in bench.nodes.values():
        assert bench.pool.usable
        node.paused = True
    assert not bench.pool.usable
    assert await bench.pool.lookup(key(1), 4) == NOT_FOUND
    assert await bench.pool.offer(key(1), PARAMS) == 0
