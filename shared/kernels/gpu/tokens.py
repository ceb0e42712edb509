"""The two ends of a step on a GPU: embedding rows of its tokens, and the likeliest next tokens.

Owns what is read and written on the device so that no step waits for the host: a token that the host does
not know yet is read from where the step before left it.

Shapes: T = tokens, E = hidden features, S = sampled positions, V = vocabulary, R = rows, P = pieces of V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PIECE = 4096
#: In place of a token: the row's logits were not finite.
FAILED = -1


def embed(
    token_ids_T: torch.Tensor, rows_T: torch.Tensor, last_R: torch.Tensor, table_VE: torch.Tensor
) -> torch.Tensor:
    """Rows [T, E] of the embedding table. A negative id stands for the row's entry in ``last_R``, and a
    negative one there for token 0: it belongs to a row that failed. All ids are int32."""
    out_TE = torch.empty(len(token_ids_T), table_VE.shape[1], dtype=table_VE.dtype, device=table_VE.device)
    if len(token_ids_T):
        width = triton.next_power_of_2(table_VE.shape[1])
        _embed[(len(token_ids_T),)](
            token_ids_T, rows_T, last_R, table_VE, out_TE, HIDDEN=table_VE.shape[1], WIDTH=width, num_warps=4
        )
    return out_TE


def embed_twin(
    token_ids_T: torch.Tensor, rows_T: torch.Tensor, last_R: torch.Tensor, table_VE: torch.Tensor
) -> torch.Tensor:
    """Torch reference of ``embed``."""
    known_T = torch.where(token_ids_T < 0, last_R[rows_T.long().clamp(min=0)], token_ids_T)
    return table_VE[known_T.long().clamp(min=0)]


@triton.jit
def _embed(token_ids, rows, last, table, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    token_id = tl.load(token_ids + token)
    if token_id < 0:
        token_id = tl.load(last + tl.maximum(tl.load(rows + token), 0))
    token_id = tl.maximum(token_id, 0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < HIDDEN
    row = tl.load(table + token_id * HIDDEN + at, mask=inside)
    tl.store(out + token.to(tl.int64) * HIDDEN + at, row, mask=inside)


def likeliest(logits_SV: torch.Tensor, rows_S: torch.Tensor, last_R: torch.Tensor) -> torch.Tensor:
    """The lowest id of each row's largest logit, int32 [S], FAILED where a logit is NaN or none is finite;
    written to ``last_R`` at ``rows_S`` too (a negative row: nowhere)."""
    sampled, vocabulary = logits_SV.shape
    tokens_S = torch.empty(sampled, dtype=torch.int32, device=logits_SV.device)
    if sampled:
        pieces = triton.cdiv(vocabulary, _PIECE)
        peaks_SP = torch.empty(sampled, pieces, dtype=torch.float32, device=logits_SV.device)
        ids_SP = torch.empty(sampled, pieces, dtype=torch.int32, device=logits_SV.device)
        _peaks[(pieces, sampled)](
            logits_SV, peaks_SP, ids_SP, vocabulary, pieces, logits_SV.stride(0), PIECE=_PIECE, num_warps=8
        )
        likeliest_of(peaks_SP, ids_SP, rows_S, last_R, tokens_S)
    return tokens_S


def likeliest_of(
    peaks_SP: torch.Tensor,
    ids_SP: torch.Tensor,
    rows_S: torch.Tensor,
    last_R: torch.Tensor,
    tokens_S: torch.Tensor,
) -> None:
    """``likeliest`` from the largest logit of each piece, in float32 (inf where one is NaN), and its id."""
    pieces = peaks_SP.shape[1]
    width = triton.next_power_of_2(pieces)
    _likeliest[(len(tokens_S),)](
        peaks_SP,
        ids_SP,
        rows_S,
        last_R,
        tokens_S,
        pieces,
        *peaks_SP.stride(),
        WIDTH=width,
        num_warps=8 if width > 1024 else 1,
    )


def likeliest_twin(logits_SV: torch.Tensor, rows_S: torch.Tensor, last_R: torch.Tensor) -> torch.Tensor:
    """Torch reference of ``likeliest``."""
    peaks_S1 = logits_SV.max(1, keepdim=True).values
    tokens_S = (logits_SV == peaks_S1).int().argmax(1).int()
    good_S = torch.isfinite(peaks_S1[:, 0]) & ~logits_SV.isnan().any(1)
    tokens_S = torch.where(good_S, tokens_S, FAILED)
    there_S = rows_S >= 0
    last_R[rows_S[there_S].long()] = tokens_S[there_S]
    return tokens_S


@triton.jit
def _peaks(logits, peaks, ids, vocabulary, pieces, stride, PIECE: tl.constexpr):
    """One piece of one row a program. NaN is passed on as the largest."""
    piece, row = tl.program_id(0), tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocabulary, other=float("-inf")).to(
        tl.float32
    )
    bad = tl.max((x != x).to(tl.int32), 0)
    peak, place = tl.max(tl.where(x == x, x, float("-inf")), 0, return_indices=True)
    tl.store(peaks + row * pieces + piece, tl.where(bad > 0, float("inf"), peak))
    tl.store(ids + row * pieces + piece, piece * PIECE + place)


@triton.jit
def _likeliest(peaks, ids, rows, last, tokens, pieces, row_stride, piece_stride, WIDTH: tl.constexpr):
    at_row = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    place = at_row * row_stride + at * piece_stride
    found = tl.load(peaks + place, mask=at < pieces, other=float("-inf"))
    peak, piece = tl.max(found, 0, return_indices=True)
    token = tl.load(ids + at_row * row_stride + piece * piece_stride)
    finite = (peak < float("inf")) & (peak > float("-inf"))
    token = tl.where(finite, token, -1)
    tl.store(tokens + at_row, token)
    row = tl.load(rows + at_row)
    if row >= 0:
        tl.store(last + row, token)
