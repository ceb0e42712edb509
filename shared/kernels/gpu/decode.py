"""All of a decode step's kernels, five a layer, at one number of rows.

Owns the order of the kernels, their memory, and which tile each product takes. For batches at which a step
waits for arithmetic rather than for weights there is no plan: those go the general way
(``shared.kernels.gpu.decoder``).

Shapes as in ``shared.kernels.gpu.stream``; V = vocabulary, W = features of all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.kernels.batch import Heads, PagedKV
from shared.kernels.decoder import LayerWeights
from shared.kernels.gpu.decode_attention import DecodeAttention, Split
from shared.kernels.gpu.matmul import Matmul, Scratch
from shared.kernels.gpu.matvec import Matvec
from shared.kernels.gpu.stream import Ending, Stream, Tile, begin
from shared.kernels.gpu.tokens import likeliest_of


@dataclass(frozen=True)
class Plan:
    """The tiles of a step's products and attention, for at most ``most_rows`` rows."""

    most_rows: int
    qkv: Tile
    o: Tile
    gate_up: Tile
    down: Tile
    head: Tile
    attention: Split


#: Found by searching whole steps of the 8B shape on an H200, one after the other: a product's fastest tile
#: alone is not its fastest beside its neighbours.
PLANS = (
    Plan(
        1,
        qkv=Tile(1, 4, 2048, 1, 0, 4),
        o=Tile(1, 16, 512, 1, 0, 8),
        gate_up=Tile(1, 4, 1024, 1, 0, 4),
        down=Tile(1, 16, 512, 1, 0, 8),
        head=Tile(1, 8, 512, 1, 4, 4),
        attention=Split(64, 8, 2, 8),
    ),
    Plan(
        16,
        qkv=Tile(16, 64, 128, 2, 3, 4),
        o=Tile(16, 64, 256, 1, 5, 4, 128),
        gate_up=Tile(16, 64, 256, 1, 5, 4, 128),
        down=Tile(16, 64, 256, 2, 3, 4, 128),
        head=Tile(16, 128, 128, 1, 3, 4, 128),
        attention=Split(32, 4, 4, 2),
    ),
    Plan(
        32,
        qkv=Tile(32, 64, 256, 1, 4, 4),
        o=Tile(32, 64, 256, 1, 4, 4, 128),
        gate_up=Tile(32, 128, 128, 1, 5, 4, 128),
        down=Tile(32, 64, 128, 2, 8, 4, 128),
        head=Tile(32, 128, 128, 1, 5, 4, 128),
        attention=Split(64, 2, 4, 4),
    ),
    Plan(
        64,
        qkv=Tile(64, 64, 256, 1, 3, 4, 128),
        o=Tile(64, 64, 128, 2, 4, 4, 128),
        gate_up=Tile(64, 128, 128, 1, 4, 4, 128),
        down=Tile(64, 64, 256, 2, 3, 4),
        head=Tile(64, 128, 128, 1, 4, 4, 128),
        attention=Split(32, 1, 4, 2),
    ),
)


#: Of attention in batches that are larger than any plan's.
LARGE_BATCH = Split(32, 1, 3, 2)


def plan_for(
    num_rows: int,
    layers: Sequence[LayerWeights[torch.Tensor]],
    head_VE: torch.Tensor,
    heads: Heads,
    kv: Sequence[PagedKV],
) -> Plan | None:
    """The plan of the next larger number of rows whose tiles can do these shapes; None without one."""
    plan = next((plan for plan in PLANS if num_rows <= plan.most_rows), None)
    layer = layers[0]
    biased = any(x is not None for x in (layer.qkv_bias_W, layer.o_bias_E, layer.gate_up_bias_2I))
    if plan is None or biased or not all(DecodeAttention.fits(heads, group) for group in kv):
        return None
    products = (
        (plan.qkv, layer.qkv_WE),
        (plan.o, layer.o_EW),
        (plan.gate_up, layer.gate_up_2IE),
        (plan.down, layer.down_EI),
        (plan.head, head_VE),
    )
    kind = Matvec if plan.most_rows == 1 else Matmul
    return plan if all(kind.fits(tile, *weight.shape) for tile, weight in products) else None


class DecodeLayers:
    """A whole step at ``num_rows`` rows over borrowed weights, paged memory and angles of every position."""

    def __init__(
        self,
        plan: Plan,
        num_rows: int,
        layers: Sequence[LayerWeights[torch.Tensor]],
        embed_VE: torch.Tensor,
        head_VE: torch.Tensor,
        norm_E: torch.Tensor,
        groups: Sequence[PagedKV],
        heads: Heads,
        angles: tuple[torch.Tensor, torch.Tensor],
        scratch: Scratch,
    ) -> None:
        self._layers, self._groups, self._angles = tuple(layers), tuple(groups), angles
        self._embed_VE, self._head_VE = embed_VE, head_VE
        self._norms = [*(layer.attn_norm_E for layer in layers), norm_E]
        device, dtype, padded = embed_VE.device, embed_VE.dtype, max(16, num_rows)

        def kind(tile: Tile, ending: Ending) -> Matmul | Matvec:
            if tile.rows == 1:
                return Matvec(tile, ending, heads.eps)
            return Matmul(tile, ending, num_rows, scratch, heads.eps)

        def memory(width: int) -> torch.Tensor:
            return torch.zeros(padded, width, dtype=dtype, device=device)

        self._qkv, self._o = kind(plan.qkv, Ending.STORE), kind(plan.o, Ending.ADD)
        self._gate_up, self._down = kind(plan.gate_up, Ending.GATE), kind(plan.down, Ending.ADD)
        self._head = kind(plan.head, Ending.LOGITS)
        self._attention = DecodeAttention(plan.attention, heads, num_rows, device)
        first = self._layers[0]
        self._stream = Stream.empty(num_rows, embed_VE.shape[1], dtype, device)
        self._qkv_BW, self._mixed_BW = memory(first.qkv_WE.shape[0]), memory(first.o_EW.shape[1])
        self._gated_BI = memory(first.down_EI.shape[1])
        self._logits_BV = memory(head_VE.shape[0])[:num_rows]
        pieces = head_VE.shape[0] // plan.head.outputs
        self._peaks_PB = torch.empty(pieces, num_rows, device=device)
        self._ids_PB = torch.empty(pieces, num_rows, dtype=torch.int32, device=device)
        self._tokens_B = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def __call__(
        self, token_ids_B: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor, last_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, V] and likeliest tokens (see ``tokens.likeliest``), valid until the next call. Ids as in
        ``tokens.embed``; a row at position -1 is padding."""
        stream, tiles = self._stream, (self._peaks_PB, self._ids_PB)
        begin(token_ids_B, rows_B, last_R, self._embed_VE, self._norms[0], stream)
        for layer, next_norm_E in zip(self._layers, self._norms[1:], strict=True):
            self._qkv(
                stream.weighted_BE, layer.qkv_WE, self._qkv_BW, stream, next_norm_E, *tiles, scaled=True
            )
            self._attention(
                self._qkv_BW,
                self._mixed_BW,
                self._groups[layer.group],
                layer.index,
                rows_B,
                positions_B,
                *self._angles,
                layer.q_norm_D,
                layer.k_norm_D,
            )
            added = self._o(
                self._mixed_BW, layer.o_EW, self._qkv_BW, stream, layer.mlp_norm_E, *tiles, scaled=False
            )
            stream.added(added)
            self._gate_up(
                stream.weighted_BE,
                layer.gate_up_2IE,
                self._gated_BI,
                stream,
                next_norm_E,
                *tiles,
                scaled=True,
            )
            added = self._down(
                self._gated_BI, layer.down_EI, self._qkv_BW, stream, next_norm_E, *tiles, scaled=False
            )
            stream.added(added)
        self._head(
            stream.weighted_BE, self._head_VE, self._logits_BV, stream, self._norms[-1], *tiles, scaled=True
        )
        likeliest_of(self._peaks_PB.T, self._ids_PB.T, rows_B, last_R, self._tokens_B)
        return self._logits_BV, self._tokens_B
