"""One group's paged witness KV: block tables, entries written into blocks, planes hashed out of them.

Owns the arithmetic on paged memory. Owns no tokens and no sampling. Nothing of the KV content is
kept between calls: parents and planes are read from memory every time.

Shapes: R = rows, J = lanes (kv_head, layer) of this rank in extent order, P = 2 J planes of a block
(K and V of each lane in turn), N = blocks of a row, B = block_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from shared.kernels.checksum import head_checksums
from shared.runner.witness_config import WitnessConfig
from shared.types.kv import KVGroupSpec

UInts = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
#: Integers in the record that an entry is the digest of: layer, head, position, kind, word, parent.
_FIELDS = 6
_RECORD_BYTES = _FIELDS * 8


def mix(values: UInts) -> UInts:
    """The finaliser of splitmix64, element by element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Placement:
    """Which part of the model a group holds: its first layer, and this rank's first kv_head."""

    first_layer: int
    head_start: int


class PagedWitness:
    """Entries of one group over the arena's block data. Thread: the runner's."""

    def __init__(
        self,
        config: WitnessConfig,
        group: KVGroupSpec,
        block_size: int,
        data: memoryview,
        placement: Placement,
    ) -> None:
        self._key = config.key
        self._block_size = block_size
        self._num_heads = group.num_kv_heads
        self._extent_bytes = group.extent_bytes(block_size)
        self._bytes = data.cast("B")
        self._words: UInts = np.frombuffer(data, dtype=np.uint64)
        self._num_planes = 2 * group.num_kv_heads * group.num_layers
        self._planes = self._words.reshape(-1, block_size)
        lanes = [
            (placement.first_layer + layer, placement.head_start + head)
            for head in range(group.num_kv_heads)
            for layer in range(group.num_layers)
        ]
        self._lanes_J2: UInts = np.array(lanes, dtype=np.uint64)
        self._seeds = [
            (config.key + 1 + 2 * (layer * config.num_kv_heads + head) + kv) & _MASK
            for layer, head in lanes
            for kv in (0, 1)
        ]
        self._k_offsets_J: Ints = np.arange(len(lanes), dtype=np.int64) * (2 * block_size)
        self._plane_ids_P: Ints = np.arange(self._num_planes, dtype=np.int64)
        # Block tables hold each block's first plane, so that no look-up has to multiply.
        self._tables: Ints = np.zeros((1, 1), dtype=np.int64)
        self._set_scratch(1)

    def close(self) -> None:
        """Let go of the arena, so that it can be unmapped."""
        del self._words, self._planes
        self._bytes.release()

    def set_blocks(self, row: int, start: int, block_ids: Sequence[int]) -> None:
        """Replace the row's block table from index ``start`` on."""
        rows, width = self._tables.shape
        stop = start + len(block_ids)
        if row >= rows or stop > width:
            shape = (max(rows, 2 * row + 2), width if stop <= width else 2 * stop)
            grown = np.zeros(shape, dtype=np.int64)
            grown[:rows, :width] = self._tables
            self._tables = grown
        self._tables[row, start:stop] = np.array(block_ids, dtype=np.int64) * self._num_planes

    def copy_block(self, src: int, dst: int) -> None:
        """Copy one whole extent."""
        self.extent(dst)[:] = self.extent(src)

    def checksums(self, block_id: int) -> tuple[int, ...]:
        """One checksum a kv_head of the block as it lies in memory."""
        return head_checksums(self.extent(block_id), self._num_heads)

    def extent(self, block_id: int) -> memoryview:
        """The bytes of one block."""
        start = block_id * self._extent_bytes
        return self._bytes[start : start + self._extent_bytes]

    def append(self, rows_R: Ints, positions_R: Ints, tokens_R: UInts) -> None:
        """Write one ordinary token's entries a row; the rows are distinct."""
        slots_RJ = self._slots(rows_R, positions_R)[:, None] + self._k_offsets_J
        record = np.empty((*slots_RJ.shape, _FIELDS), dtype=np.uint64)
        record[..., :2] = self._lanes_J2
        record[..., 2] = positions_R[:, None]
        record[..., 3] = 0
        record[..., 4] = tokens_R[:, None]
        record[..., 5] = self._parents(rows_R, positions_R)
        raw = record.data.cast("B")
        key, digest = self._key, xxh3_64_intdigest
        entries = [digest(raw[at : at + _RECORD_BYTES], key) for at in range(0, raw.nbytes, _RECORD_BYTES)]
        entries_RJ = np.array(entries, dtype=np.uint64).reshape(slots_RJ.shape)
        self._words[slots_RJ] = entries_RJ
        self._words[slots_RJ + self._block_size] = mix(entries_RJ)

    def extend(self, row: int, first: int, kinds: Sequence[int], words: Sequence[int]) -> None:
        """Write the entries of a run of positions of one row, each the next one's parent."""
        positions_T = np.arange(first, first + len(words), dtype=np.int64)
        rows_T = np.full(len(words), row, dtype=np.int64)
        slots_TJ = self._slots(rows_T, positions_T)[:, None] + self._k_offsets_J
        parents = self._parents(rows_T[:1], positions_T[:1])[0].tolist()
        record = np.empty((len(words), _FIELDS), dtype=np.uint64)
        record[:, 2] = positions_T
        record[:, 3] = kinds
        record[:, 4] = words
        raw = record.data.cast("B")
        parent_field = raw.cast("Q")
        key, digest = self._key, xxh3_64_intdigest
        entries_TJ = np.empty(slots_TJ.shape, dtype=np.uint64)
        for lane, parent in enumerate(parents):
            record[:, :2] = self._lanes_J2[lane]
            entries = []
            for at in range(len(words)):
                parent_field[at * _FIELDS + 5] = parent
                parent = digest(raw[at * _RECORD_BYTES : (at + 1) * _RECORD_BYTES], key)
                entries.append(parent)
            entries_TJ[:, lane] = entries
        self._words[slots_TJ] = entries_TJ
        self._words[slots_TJ + self._block_size] = mix(entries_TJ)

    def states(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """This group's and rank's share of each row's state after its first ``lengths`` tokens."""
        states = [0] * len(rows)
        # Rows of about the same number of blocks are gathered together: little padding, few calls.
        buckets: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            buckets.setdefault((-(-length // self._block_size)).bit_length(), []).append(index)
        for indices in buckets.values():
            longest = max(lengths[i] for i in indices)
            num_blocks = -(-longest // self._block_size)
            gathered = self._gather([rows[i] for i in indices], num_blocks)
            self._hash_planes(gathered, num_blocks, indices, lengths, states)
        return states

    def _gather(self, rows: Sequence[int], num_blocks: int) -> memoryview:
        """Planes of the rows' first blocks, packed as [R, P, N, B]; valid until the next gather."""
        first_RN = self._tables[np.array(rows, dtype=np.int64), :num_blocks]
        planes_RPN = first_RN[:, None, :] + self._plane_ids_P[None, :, None]
        size = planes_RPN.size * self._block_size
        if size > self._scratch.size:
            self._set_scratch(2 * size)
        out = self._scratch[:size].reshape(*planes_RPN.shape, self._block_size)
        np.take(self._planes, planes_RPN, axis=0, out=out, mode="clip")  # "raise" would buffer
        return self._scratch_bytes

    def _hash_planes(
        self,
        gathered: memoryview,
        num_blocks: int,
        indices: Sequence[int],
        lengths: Sequence[int],
        states: list[int],
    ) -> None:
        stride = num_blocks * self._block_size * 8
        digest, seeds = xxh3_64_intdigest, self._seeds
        at = 0
        for index in indices:
            valid_bytes = lengths[index] * 8
            total = 0
            for seed in seeds:
                total += digest(gathered[at : at + valid_bytes], seed)
                at += stride
            states[index] = total & _MASK

    def _slots(self, rows_R: Ints, positions_R: Ints) -> Ints:
        """Index, in words, of each position's entry in the first plane of its block."""
        blocks_R, offsets_R = np.divmod(positions_R, self._block_size)
        slots_R: Ints = self._tables[rows_R, blocks_R] * self._block_size + offsets_R
        return slots_R

    def _parents(self, rows_R: Ints, positions_R: Ints) -> UInts:
        """Shape [R, J]: the entries at the positions before, 0 before the first."""
        before_R = np.maximum(positions_R - 1, 0)
        parents_RJ: UInts = self._words[self._slots(rows_R, before_R)[:, None] + self._k_offsets_J]
        parents_RJ[positions_R == 0] = 0
        return parents_RJ

    def _set_scratch(self, size: int) -> None:
        self._scratch: UInts = np.empty(size, dtype=np.uint64)
        self._scratch_bytes = self._scratch.data.cast("B")
