"""Triton kernels, each with its torch twin beside it. Imported only where torch and triton are there."""
