"""The sampling chain on torch tensors: what a model runner calls; equal to ``shared.sampling.chain``."""

from shared.sampling.device.batch import BatchSamples, sample_batch

__all__ = ["BatchSamples", "sample_batch"]
