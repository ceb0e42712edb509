"""Owns the bookkeeping of KV and embedding blocks: ids, ref-counts, hashes and leases; never tensors."""
