"""Where a decoder meets its vocabulary: token embedding at the start, logits at the end.

Shapes: T = tokens, R = sampled positions, E = hidden features, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kernels.linear import Weight, linear
from shared.kernels.norm import rms_norm


@dataclass(frozen=True)
class Vocabulary:
    """Embedding rows and output rows (often the same memory), and the final norm.

    ``head_VE`` holds only ids that exist, so padding rows can neither be sampled nor take part in
    a distribution.
    """

    embed_VE: torch.Tensor
    head_VE: Weight
    norm_E: torch.Tensor
    eps: float

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Float32 rows [T, E], freshly allocated."""
        return self.embed_VE[token_ids_T].to(torch.float32, copy=True)

    def logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of hidden rows that passed all layers."""
        return linear(rms_norm(x_RE, self.norm_E, self.eps), self.head_VE)
