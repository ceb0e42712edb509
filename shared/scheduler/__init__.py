"""Decides which tokens are computed in the next step. Bookkeeping only: no tensors, no I/O, no threads."""
