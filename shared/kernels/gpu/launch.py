"""How kernels of one step follow each other without a gap.

With programmatic dependent launch (Hopper and later) a kernel may begin while the one before it still runs:
it says at its top that the next may begin too, loads what no kernel writes (weights, block tables), and
waits before it reads what the one before wrote. Owns the launch option and the two instructions.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["chained", "gdc_launch_dependents", "gdc_wait", "is_chained", "to_l2"]


@functools.cache
def is_chained() -> bool:
    """Whether kernels are launched so here."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


def chained() -> dict[str, bool]:
    """Launch options of a kernel that waits for the one before it by itself."""
    return {"launch_pdl": True} if is_chained() else {}


@triton.jit
def to_l2(pointers):
    """Ask for these addresses to be brought into the second-level cache; nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [tl.cast(pointers, tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
