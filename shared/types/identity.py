"""The two records that decide whether workers may exchange KV: what it means, and how it lies in memory."""

from __future__ import annotations

from msgspec import Struct

from shared.types.kv import KVGroupSpec

EXTENT_ORDER = "kv_head,layer,kv,token,dim"
#: Versions of the worker wire that this build speaks, lowest and highest.
WIRE_VERSIONS = (1, 1)


class IdentityKey(Struct, frozen=True):
    """What KV bytes mean. Equal, or the two sides are never paired; the only key inside a block hash."""

    model: str
    revision: str
    tokenizer: str
    kv_dtype: str
    numerics: str = "fp32"
    adapter_scheme: str = "none"
    hash_scheme: str = "sha256-chain-v1"


class LayoutSpec(Struct, frozen=True):
    """How KV bytes lie in memory. Two sides pair when ``can_convert`` says so.

    ``groups`` have the heads of the whole model, which ``tp_size`` ranks share equally, in order, from head
    ``head_start`` on.
    ``checksum`` names the algorithm of the per (block, kv_head) checksum.
    """

    groups: tuple[KVGroupSpec, ...]
    block_size: int
    tp_size: int = 1
    head_start: int = 0
    extent_order: str = EXTENT_ORDER
    checksum: str = "xxh3_64"
    wire_versions: tuple[int, int] = WIRE_VERSIONS
