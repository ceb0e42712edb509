"""Whether KV blocks of one layout can become blocks of another. Owns the rule, moves nothing."""

from __future__ import annotations

from shared.types.identity import LayoutSpec

#: Tokens of the largest block that is taken by a worker whose blocks have another size.
MAX_BLOCK_SIZE = 1024


def can_convert(a: LayoutSpec, b: LayoutSpec) -> bool:
    """Whether a worker with layout ``b`` can take blocks from one with ``a``. Pure and symmetric.

    A block is read as it is, head by head, and cut anew where its size differs. So tensor-parallel sizes
    may differ, as long as each divides the heads of every group, and so may block sizes of which one divides
    the other. What the bytes are must be equal: groups (the whole model's heads), extent order, checksum
    algorithm. A layout speaks for all ranks, from the first head on. Wire versions must overlap.
    """
    return (
        a.groups == b.groups
        and a.extent_order == b.extent_order
        and a.checksum == b.checksum
        and a.head_start == b.head_start == 0
        and all(_shares_heads(layout) for layout in (a, b))
        and _same_borders(a.block_size, b.block_size)
        and max(a.wire_versions[0], b.wire_versions[0]) <= min(a.wire_versions[1], b.wire_versions[1])
    )


def _shares_heads(layout: LayoutSpec) -> bool:
    return layout.tp_size > 0 and all(group.num_kv_heads % layout.tp_size == 0 for group in layout.groups)


def _same_borders(a: int, b: int) -> bool:
    """Whether every border of the larger blocks is one of the smaller ones."""
    if a == b:
        return True
    small, large = min(a, b), max(a, b)
    return small > 0 and large <= MAX_BLOCK_SIZE and large % small == 0
