"""Which nodes of a pool keep a key: rendezvous hashing (highest random weight; Thaler & Ravishankar 1998).

Owns that rule. It is a pure function of names and key: everybody who knows the same nodes gives the same
answer, whatever their order, and a node that comes or goes moves only the keys that are its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def weight(node: str, key: bytes) -> int:
    """64 bits, as good as random for each pair of node and key."""
    return xxhash.xxh3_64_intdigest(key, xxhash.xxh3_64_intdigest(node.encode()))


def ranked(nodes: Iterable[str], key: bytes) -> list[str]:
    """The nodes, the heaviest for ``key`` first: it belongs to the first, its copy to the second."""
    return sorted(nodes, key=lambda node: (weight(node, key), node), reverse=True)
