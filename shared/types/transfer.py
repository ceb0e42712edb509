"""The small messages that name a handoff: who holds the bytes, where, and how to verify them."""

from __future__ import annotations

from msgspec import Struct

from shared.types.identity import LayoutSpec


class Endpoint(Struct, frozen=True):
    """What one transfer backend tells its peers, so that they can connect."""

    backend: str
    metadata: bytes


class RegionInfo(Struct, frozen=True):
    """Geometry of one registered arena; all offsets and lengths in bytes.

    An arena is a header (see ``shared.transfer.arena``), a table of one uint64 generation per
    block of each group, then the blocks of group 0, group 1, ...
    """

    name: str
    nbytes: int
    num_blocks: tuple[int, ...]
    extent_bytes: tuple[int, ...]
    generation_offsets: tuple[int, ...]
    data_offsets: tuple[int, ...]


class AgentInfo(Struct, frozen=True):
    """A transfer agent. Its name is worker id + incarnation; ``epoch`` fences earlier lives."""

    worker_id: str
    incarnation: str
    epoch: int
    endpoints: tuple[Endpoint, ...]
    regions: tuple[RegionInfo, ...]
    layout: LayoutSpec | None = None


class BlockRef(Struct, frozen=True):
    """One block in its producer's arena, with one 64-bit checksum a kv_head."""

    block_id: int
    generation: int
    checksums: tuple[int, ...]


class KvTransferParams(Struct, frozen=True):
    """A run of one request's committed blocks: positions ``first`` .. of its block table of ``group``."""

    handoff_id: str
    producer: AgentInfo
    group: int
    first: int
    blocks: tuple[BlockRef, ...]


class EcTransferParams(Struct, frozen=True):
    """One media item's embeddings: ``num_rows`` rows of ``row_bytes``, packed into whole blocks of
    the producer's ``ec`` arena in order; one checksum over the valid bytes."""

    handoff_id: str
    producer: AgentInfo
    mm_hash: str
    num_rows: int
    row_bytes: int
    dtype: str
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    checksum: int
