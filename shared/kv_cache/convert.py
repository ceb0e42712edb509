"""Whether KV blocks of one layout can become blocks of another. Owns the rule, moves nothing."""

from __future__ import annotations

from shared.types.identity import LayoutSpec


def can_convert(a: LayoutSpec, b: LayoutSpec) -> bool:
    """Whether a worker with layout ``b`` can take blocks from one with ``a``. Pure and symmetric.

    This is the one place to widen when a conversion is added: in this release blocks move as they are,
    so block sizes, tensor-parallel sizes, head ranges and groups must all be equal, and so must the extent
    order and the checksum algorithm (a copy keeps its producer's checksums). Wire versions must overlap.
    """
    return (
        a.groups == b.groups
        and a.block_size == b.block_size
        and a.tp_size == b.tp_size
        and a.head_start == b.head_start
        and a.extent_order == b.extent_order
        and a.checksum == b.checksum
        and max(a.wire_versions[0], b.wire_versions[0]) <= min(a.wire_versions[1], b.wire_versions[1])
    )
