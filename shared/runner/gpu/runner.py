"""The runner of a GPU: a dense decoder over paged KV memory there. A step is launched, not waited for.

Owns the order of effects inside a step. Owns no policy: it does what a plan says. Rows that want the
likeliest token are sampled on the device, and the next step reads the token there; a step with any other row
is sampled before ``execute`` returns.

Shapes: T = tokens of a step, S = sampled rows, E = hidden features, V = valid tokens, N = sealed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shared.errors import ConfigError
from shared.kernels.batch import Heads, PagedKV
from shared.kernels.gpu.attention import fresh_spans, query_tiles
from shared.kernels.gpu.checksum import block_sums
from shared.kernels.gpu.tokens import FAILED, likeliest
from shared.models.config import ModelConfig
from shared.models.gpu_decoder import GpuDecoder
from shared.models.weights import DecoderWeights
from shared.runner.base import PendingStep, Runner
from shared.runner.gpu.device import Device, Download
from shared.runner.gpu.graphs import decode_steps
from shared.runner.gpu.rows import DeviceRows
from shared.runner.kv_tensors import EmbeddingMemory
from shared.sampling.device import sample_batch
from shared.step import BlockSeal, RowStep, StepPlan, StepResult
from shared.types.kv import KVCacheSpec
from shared.types.request import TokenLogprobs


class GpuRunner(Runner):
    """``kv`` has one tensor [blocks, kv_head, layer, K|V, token, dim] a group, on the device; ``weights`` are
    there too (``gpu_decoder.place``). The thread that builds it is the one that calls ``execute``."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[torch.Tensor],
        spec: KVCacheSpec,
        kv: Sequence[torch.Tensor],
        device: Device,
        embeddings: EmbeddingMemory | None = None,
        *,
        max_rows: int,
        max_model_len: int,
        batch_invariant: bool = False,
    ) -> None:
        """``batch_invariant``: see ``GpuDecoder``. Raises ConfigError: memory or limits that do not fit."""
        if max_model_len > config.max_position:
            raise ConfigError(f"max_model_len {max_model_len} exceeds the model's {config.max_position}")
        if [tensor.shape[1:] for tensor in kv] != [_block_shape(spec, g) for g in range(len(spec.groups))]:
            raise ConfigError("the KV memory is not that of the model")
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, 1.0, config.rms_norm_eps)
        self._spec, self._kv, self._device = spec, list(kv), device
        self._embeddings = None if embeddings is None else embeddings.tensor()
        self._rows = DeviceRows(
            device,
            len(spec.groups),
            max_rows,
            spec.num_blocks_for(max_model_len),
            config.eos_token_ids,
            embeddings.rows_per_block if embeddings else 1,
            self._tiles,
        )
        self._groups = [
            PagedKV(tensor, tables, group.window)
            for tensor, tables, group in zip(kv, self._rows.tables_GRM, spec.groups, strict=True)
        ]
        self._decoder = GpuDecoder(config, weights, self._groups, batch_invariant=batch_invariant)
        self._decode = decode_steps(self._decoder, self._rows, device, max_rows)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep:
        for row in plan.free_rows:
            self._rows.free(row)
        for new in plan.new_rows:
            self._rows.add(new)
        for copy in plan.copies:
            self._kv[copy.group][copy.dst].copy_(self._kv[copy.group][copy.src])
        sampled = self._compute(plan.rows) if plan.rows else _Sampled()
        sums = [self._checksums(group, plan.seals) for group in range(len(self._kv))] if plan.seals else []
        wanted = [*([] if sampled.tokens_S is None else [sampled.tokens_S]), *sums]
        return _Launched(plan, sampled, self._device.download(wanted))

    def close(self) -> None:
        self._kv.clear()

    def _tiles(
        self, starts: Sequence[int], firsts: Sequence[int]
    ) -> tuple[NDArray[np.int32], tuple[tuple[int, int], ...]]:
        # Torch's attention rounds otherwise than ours.
        exact = self._decoder.batch_invariant or self._device.device.type != "cuda"
        fresh = () if exact else fresh_spans(starts, firsts, self._groups)
        return query_tiles(starts, self._heads, fresh), fresh

    def _compute(self, steps: Sequence[RowStep]) -> _Sampled:
        self._rows.update_tables(steps)
        if self._rows.is_decode(steps):
            decoded = self._decode(steps)
            if decoded is not None:
                rows = tuple(step.row for step in steps)
                return self._finished(rows, decoded.rows_S, decoded.logits_SV, decoded.tokens_S)
        inputs = self._rows.prepare(steps)
        x_TE = self._decoder.embed(inputs.token_ids_T, inputs.rows_T, self._rows.last_R)
        if self._embeddings is not None and inputs.media_tokens_A is not None:
            media_AE = self._embeddings[inputs.media_rows_A].to(x_TE)
            x_TE[inputs.media_tokens_A.to(x_TE.device)] = media_AE
        normed_TE = self._decoder.forward(
            x_TE, inputs.rows_T, inputs.positions_T, inputs.starts, inputs.tiles_N2, inputs.fresh
        )
        if not inputs.rows:
            return _Sampled()
        logits_SV = self._decoder.logits(normed_TE[inputs.sampled_from_S])
        tokens_S = likeliest(logits_SV, inputs.sample_rows_S, self._rows.last_R)
        return self._finished(inputs.rows, inputs.sample_rows_S, logits_SV, tokens_S)

    def _finished(
        self, rows: tuple[int, ...], rows_S: torch.Tensor, logits_SV: torch.Tensor, tokens_S: torch.Tensor
    ) -> _Sampled:
        """``tokens_S`` are the likeliest ones, and ``last_R`` has them: right unless a row wants more."""
        if self._rows.are_plain(rows):
            return _Sampled(rows, tokens_S)
        samples = sample_batch(logits_SV.float(), self._rows.sampler_rows(rows))
        for row, token_id in zip(rows, samples.token_ids, strict=True):
            if token_id >= 0:
                self._rows.append(row, token_id)
        tokens_S = torch.tensor(samples.token_ids, dtype=torch.int32, device=logits_SV.device)
        self._rows.last_R.index_copy_(0, rows_S.long(), tokens_S)
        return _Sampled(rows, tokens_S, tuple(samples.logprobs))

    def _checksums(self, group: int, seals: Sequence[BlockSeal]) -> torch.Tensor:
        """int64 [N, kv_head] of the group's sealed blocks."""
        geometry = self._spec.groups[group]
        blocks = torch.tensor(
            [seal.block_id for seal in seals if seal.group == group],
            dtype=torch.int32,
            device=self._device.device,
        )
        return block_sums(self._kv[group].flatten(1), blocks, geometry.head_bytes(self._spec.block_size))


class _Sampled(NamedTuple):
    """Rows of a step whose next token was sampled; ``tokens_S`` is on the device."""

    rows: tuple[int, ...] = ()
    tokens_S: torch.Tensor | None = None
    logprobs: tuple[TokenLogprobs | None, ...] = ()


class _Launched(PendingStep):
    def __init__(self, plan: StepPlan, sampled: _Sampled, download: Download) -> None:
        self._plan = plan
        self._sampled = sampled
        self._download = download

    def result(self) -> StepResult:
        arrived = self._download.wait()
        rows = self._sampled.rows
        tokens = arrived.pop(0).tolist() if rows else []
        logprobs = self._sampled.logprobs or (None,) * len(rows)
        good = [i for i, token in enumerate(tokens) if token != FAILED]
        return StepResult(
            self._plan.step_id,
            tuple(rows[i] for i in good),
            tuple(tokens[i] for i in good),
            tuple(logprobs[i] for i in good),
            _in_order(self._plan.seals, arrived),
            tuple(row for row, token in zip(rows, tokens, strict=True) if token == FAILED),
        )


def _in_order(seals: Sequence[BlockSeal], sums: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Checksums of each group's blocks in the order of the plan, unsigned."""
    of_group = [iter(group.tolist()) for group in sums]
    return tuple(tuple(x % (1 << 64) for x in next(of_group[seal.group])) for seal in seals)


def _block_shape(spec: KVCacheSpec, group: int) -> torch.Size:
    geometry = spec.groups[group]
    return torch.Size((geometry.num_kv_heads, geometry.num_layers, 2, spec.block_size, geometry.head_dim))
