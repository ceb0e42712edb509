"""What the router remembers about caches: which worker was last sent a prefix or a media item.

Owns two bounded LRU maps. They are hints: a wrong one costs time, never correctness, so they need
no invalidation; a holder that is gone is simply no candidate any more.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeVar

import xxhash

from shared.types.request import MediaItem

K = TypeVar("K")


class LruMap(OrderedDict[K, str]):
    """A map that forgets what was set or touched longest ago, beyond ``max_entries``."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def put(self, key: K, value: str) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._max_entries:
            self.popitem(last=False)


class PrefixIndex:
    """Chains of prompt blocks -> key of the worker that computed them last."""

    def __init__(self, block_size: int = 16, max_entries: int = 65536) -> None:
        self._block_size = block_size
        self._holders: LruMap[int] = LruMap(max_entries)

    def chain(self, token_ids: Sequence[int], media: Sequence[MediaItem] = (), salt: str = "") -> list[int]:
        """One number per full block of the prompt, each a function of everything before it.

        64-bit and unkeyed: good for hints only.
        """
        step = 4 * self._block_size
        data = array("I", token_ids).tobytes()
        parent = xxhash.xxh3_64_intdigest(salt.encode())
        starts: dict[int, str] = {}
        for item in media:
            index = item.offset // self._block_size
            starts[index] = starts.get(index, "") + item.mm_hash
        chain: list[int] = []
        for index in range(len(token_ids) // self._block_size):
            if index in starts:
                parent = xxhash.xxh3_64_intdigest(starts[index].encode(), parent)
            parent = xxhash.xxh3_64_intdigest(data[index * step : (index + 1) * step], parent)
            chain.append(parent)
        return chain

    def match(self, chain: Sequence[int]) -> Mapping[str, int]:
        """Tokens from the front that each worker was last sent, by its key."""
        matched: dict[str, int] = {}
        for index, link in enumerate(chain):
            holder = self._holders.get(link)
            if holder is None:
                break
            matched[holder] = (index + 1) * self._block_size
        return matched

    def record(self, chain: Sequence[int], holder: str) -> None:
        """Remember that ``holder`` computes this chain; its head outlives its tail."""
        for link in reversed(chain):
            self._holders.put(link, holder)

    def renamed(self, old: str, new: str) -> None:
        """What ``old`` held is ``new``'s."""
        for link, holder in self._holders.items():
            if holder == old:
                self._holders[link] = new

    def __len__(self) -> int:
        return len(self._holders)


class MediaIndex:
    """mm_hash -> key of the encoder that was last asked for it."""

    def __init__(self, max_entries: int = 8192) -> None:
        self._holders: LruMap[str] = LruMap(max_entries)

    def holder(self, mm_hash: str) -> str:
        """The key, or "" when unknown."""
        return self._holders.get(mm_hash, "")

    def record(self, mm_hash: str, holder: str) -> None:
        self._holders.put(mm_hash, holder)

    def __len__(self) -> int:
        return len(self._holders)
