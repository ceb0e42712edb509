"""Kernels: compiled ones for the CPU, each beside its torch twin; and the checksums of KV memory."""
