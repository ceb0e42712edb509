"""Blocks copied on one device, and their checksums (xxh3_64) taken on the way, in one launch.

The algorithm is the one that names a block's bytes everywhere (``shared.kernels.checksum``): eight
independent lanes a hash, and inside every 1,024 bytes sixteen independent stripes, so a device computes one
hash a warp at the speed of its memory. Constants and order of operations are those of the xxHash
specification for seed 0.

Shapes: N = blocks of a call, H = hashes a block, W = 8-byte words of a hash's bytes, U = kilobytes at once.
"""

from __future__ import annotations

import functools
import struct

import torch
import triton
import triton.language as tl

#: The specification's default secret, as its 24 little-endian words.
_SECRET = (
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
    0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
    0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,
    0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
    0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
)  # fmt: skip
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
_STRIPE, _KILO = 64, 1024
#: Where the last stripe and the merge of the lanes read the secret; scrambling reads its last 8 words.
_LAST_AT, _MERGE_AT = 192 - _STRIPE - 7, 11
#: Kilobytes that a program reads at once.
_AT_ONCE = 8
#: Shorter inputs have another algorithm.
_SHORT = 240


def can_sum(unit: int) -> bool:
    """Whether hashes over ``unit`` bytes can be taken here: whole stripes, and more than a few."""
    return unit > _SHORT and unit % _STRIPE == 0


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """Secret (24 words), the last stripe's (8), the merge's (8), starting lanes (8), on the device."""
    raw = struct.pack("<24Q", *_SECRET)
    parts = (raw, raw[_LAST_AT : _LAST_AT + 64], raw[_MERGE_AT : _MERGE_AT + 64], struct.pack("<8Q", *_START))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int64).to(device)


def gather_and_sum(
    source_BX: torch.Tensor,
    target_BX: torch.Tensor,
    source_N: torch.Tensor,
    target_N: torch.Tensor,
    unit: int,
) -> torch.Tensor:
    """Copy blocks ``source_N`` of one memory to blocks ``target_N`` of another, and return the checksums of
    every ``unit`` bytes of each as they were read, int64 [N, H] on the device. Nothing is waited for.

    Rows of both memories are contiguous blocks of equal size. Raises ValueError for sizes that do not fit.
    """
    _check(source_BX, unit)
    _check(target_BX, unit)
    if source_BX[0].nbytes != target_BX[0].nbytes or len(source_N) != len(target_N):
        raise ValueError("blocks and their places must be equal in size and number")
    return _launch(source_BX, target_BX, source_N, target_N, unit, copy=True)


def block_sums(data_BX: torch.Tensor, blocks_N: torch.Tensor, unit: int) -> torch.Tensor:
    """The checksums of every ``unit`` bytes of these blocks, int64 [N, H] on the device."""
    _check(data_BX, unit)
    return _launch(data_BX, data_BX, blocks_N, blocks_N, unit, copy=False)


def _check(data_BX: torch.Tensor, unit: int) -> None:
    if not data_BX[0].is_contiguous() or not can_sum(unit) or data_BX[0].nbytes % unit:
        raise ValueError(f"blocks of {data_BX[0].nbytes} bytes have no checksums of {unit} bytes each")


def _launch(
    source_BX: torch.Tensor,
    target_BX: torch.Tensor,
    source_N: torch.Tensor,
    target_N: torch.Tensor,
    unit: int,
    *,
    copy: bool,
) -> torch.Tensor:
    heads = source_BX[0].nbytes // unit
    sums_NH = torch.empty(len(source_N), heads, dtype=torch.int64, device=source_BX.device)
    if not sums_NH.numel():
        return sums_NH
    _gather_sums[(sums_NH.numel(),)](
        _words(source_BX),
        _words(target_BX),
        source_N,
        target_N,
        sums_NH,
        _table(source_BX.device),
        source_BX.stride(0) * source_BX.element_size() // 8,
        target_BX.stride(0) * target_BX.element_size() // 8,
        HEADS=heads,
        WORDS=unit // 8,
        FULL=(unit - 1) // _KILO,
        AT_ONCE=_AT_ONCE,
        COPY=copy,
        num_warps=1,
    )
    return sums_NH


def _words(data_BX: torch.Tensor) -> torch.Tensor:
    return data_BX.view(torch.int64) if data_BX.dtype != torch.int64 else data_BX


@triton.jit
def _mixed(word, neighbour, key):
    mixed = word ^ key
    return (mixed & 0xFFFFFFFF) * (mixed >> 32) + neighbour


@triton.jit
def _scrambled(lanes_8, secret_8):
    prime = tl.full([], 0x9E3779B1, tl.uint64)
    return ((lanes_8 ^ (lanes_8 >> 47)) ^ secret_8) * prime


@triton.jit
def _last_kilobyte(source, target, key_S8, table, REST: tl.constexpr, COPY: tl.constexpr):
    """REST stripes, and one more, which has a secret of its own."""
    lane_8 = tl.arange(0, 8)
    stripe_S = tl.arange(0, 16)
    word_S8 = stripe_S[:, None] * 8 + lane_8[None, :]
    used = (stripe_S < REST)[:, None] & (lane_8 >= 0)[None, :]
    words = tl.load(source + word_S8, mask=used, other=0)
    near = tl.load(source + stripe_S[:, None] * 8 + (lane_8 ^ 1)[None, :], mask=used, other=0)
    mixed_S8 = _mixed(words.to(tl.uint64, bitcast=True), near.to(tl.uint64, bitcast=True), key_S8)
    last_8 = tl.load(source + REST * 8 + lane_8)
    near_8 = tl.load(source + REST * 8 + (lane_8 ^ 1))
    key_8 = tl.load(table + 24 + lane_8).to(tl.uint64, bitcast=True)
    if COPY:
        tl.store(target + word_S8, words, mask=used)
        tl.store(target + REST * 8 + lane_8, last_8)
    mixed_8 = _mixed(last_8.to(tl.uint64, bitcast=True), near_8.to(tl.uint64, bitcast=True), key_8)
    return tl.sum(tl.where(used, mixed_S8, 0), 0) + mixed_8


@triton.jit
def _kilobytes(source, target, lanes_8, key_S8, scramble_8, U: tl.constexpr, COPY: tl.constexpr):
    """The lanes after U more kilobytes."""
    lane_8 = tl.arange(0, 8)
    kilo_U = tl.arange(0, U)
    stripe_US1 = kilo_U[:, None, None] * 128 + tl.arange(0, 16)[None, :, None] * 8
    words = tl.load(source + stripe_US1 + lane_8[None, None, :])
    near = tl.load(source + stripe_US1 + (lane_8 ^ 1)[None, None, :])
    if COPY:
        tl.store(target + stripe_US1 + lane_8[None, None, :], words)
    mixed_US8 = _mixed(
        words.to(tl.uint64, bitcast=True), near.to(tl.uint64, bitcast=True), key_S8[None, :, :]
    )
    sums_U8 = tl.sum(mixed_US8, 1)
    for u in tl.static_range(U):
        lanes_8 += tl.sum(tl.where((kilo_U == u)[:, None], sums_U8, 0), 0)
        lanes_8 = _scrambled(lanes_8, scramble_8)
    return lanes_8


@triton.jit
def _gather_sums(
    source,
    target,
    source_ids,
    target_ids,
    sums,
    table,
    source_stride,
    target_stride,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    FULL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COPY: tl.constexpr,
):
    """One hash a program, of WORDS words. FULL kilobytes before the last, which may be shorter."""
    pid = tl.program_id(0)
    block, head = pid // HEADS, pid % HEADS
    source += tl.load(source_ids + block).to(tl.int64) * source_stride + head * WORDS
    target += tl.load(target_ids + block).to(tl.int64) * target_stride + head * WORDS
    lane_8 = tl.arange(0, 8)
    stripe_S = tl.arange(0, 16)
    key_S8 = tl.load(table + stripe_S[:, None] + lane_8[None, :]).to(tl.uint64, bitcast=True)
    scramble_8 = tl.load(table + 16 + lane_8).to(tl.uint64, bitcast=True)
    lanes_8 = tl.load(table + 40 + lane_8).to(tl.uint64, bitcast=True)
    # Several kilobytes are read at once, for the memory's sake; their hash is sequential all the same.
    whole: tl.constexpr = FULL // AT_ONCE * AT_ONCE
    for kilo in range(0, whole, AT_ONCE):
        lanes_8 = _kilobytes(
            source + kilo * 128, target + kilo * 128, lanes_8, key_S8, scramble_8, AT_ONCE, COPY
        )
    for kilo in tl.static_range(whole, FULL):
        lanes_8 = _kilobytes(source + kilo * 128, target + kilo * 128, lanes_8, key_S8, scramble_8, 1, COPY)
    rest: tl.constexpr = (WORDS - FULL * 128) // 8 - 1
    lanes_8 += _last_kilobyte(source + FULL * 128, target + FULL * 128, key_S8, table, rest, COPY)
    merge_8 = lanes_8 ^ tl.load(table + 32 + lane_8).to(tl.uint64, bitcast=True)
    even_4, odd_4 = tl.split(tl.reshape(merge_8, [4, 2]))
    total = tl.sum((even_4 * odd_4) ^ tl.umulhi(even_4, odd_4), 0)
    total += tl.full([], WORDS * 8, tl.uint64) * tl.full([], 0x9E3779B185EBCA87, tl.uint64)
    total = (total ^ (total >> 37)) * tl.full([], 0x165667919E3779F9, tl.uint64)
    tl.store(sums + pid, (total ^ (total >> 32)).to(tl.int64, bitcast=True))


def block_sums_twin(data_BX: torch.Tensor, blocks_N: torch.Tensor, unit: int) -> torch.Tensor:
    """Torch reference of ``block_sums``; signed words wrap as unsigned ones do."""
    words_NHW = _words(data_BX)[blocks_N.long()].reshape(len(blocks_N), -1, unit // 8)
    table = _table(data_BX.device)
    lanes = table[40:48].expand(*words_NHW.shape[:2], 8).clone()
    swapped = torch.arange(8, device=data_BX.device) ^ 1
    num_stripes = unit // _STRIPE

    def mixed(stripe: int, key_8: torch.Tensor) -> torch.Tensor:
        word = words_NHW[..., stripe * 8 : stripe * 8 + 8]
        key = word ^ key_8
        return (key & 0xFFFFFFFF) * _shifted(key, 32) + word[..., swapped]

    for stripe in range(num_stripes - 1):
        at = stripe % 16
        lanes += mixed(stripe, table[at : at + 8])
        if at == 15:
            lanes = ((lanes ^ _shifted(lanes, 47)) ^ table[16:24]) * 0x9E3779B1
    lanes += mixed(num_stripes - 1, table[24:32])
    merged = lanes ^ table[32:40]
    total = _folded(merged[..., 0::2], merged[..., 1::2]).sum(-1) + _signed(unit * 0x9E3779B185EBCA87)
    total = (total ^ _shifted(total, 37)) * _signed(0x165667919E3779F9)
    return total ^ _shifted(total, 32)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits, without its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _folded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Low half xor high half of the 128-bit product, by its four 32-bit parts."""
    a_low, a_high, b_low, b_high = a & 0xFFFFFFFF, _shifted(a, 32), b & 0xFFFFFFFF, _shifted(b, 32)
    cross = a_high * b_low + _shifted(a_low * b_low, 32)
    middle = a_low * b_high + (cross & 0xFFFFFFFF)
    return (a * b) ^ (a_high * b_high + _shifted(cross, 32) + _shifted(middle, 32))
