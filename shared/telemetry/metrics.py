"""Every metric of the project, defined once. Services update them; ``http`` serves them.

Owns names, labels and buckets. All live in ``REGISTRY``; a service that never touches a labelled
metric does not export it. Label values are closed sets: never ids, never anything from a client.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

REGISTRY = CollectorRegistry(auto_describe=True)
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_LONG_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"triptych_{name}", text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"triptych_{name}", text, labels, registry=REGISTRY)


def _seconds(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
    return Histogram(f"triptych_{name}_seconds", text, labels, buckets=buckets, registry=REGISTRY)


# Requests, at the router.

#: outcome: ok, aborted, invalid, rejected, expired, failed (see ``outcome``).
REQUESTS = _counter("requests", "Finished requests by outcome", "outcome")
REQUESTS_RUNNING = _gauge("requests_running", "Requests admitted and not finished")
REQUESTS_QUEUED = _gauge("requests_queued", "Requests waiting for admission")
TTFT = _seconds("time_to_first_token", "Request received to first token sent")
ITL = _seconds("inter_token_latency", "Time between tokens of a choice", buckets=_SHORT_SECONDS)
E2E = _seconds("request", "Request received to last token sent")
QUEUE_TIME = _seconds("queue_time", "Waiting before the first step")
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of admitted requests")
COMPLETION_TOKENS = _counter("completion_tokens", "Tokens sent to clients")
MIGRATIONS = _counter("migrations", "Requests that went on elsewhere, by the phase that was lost", "phase")
WORKERS = _gauge("workers", "Live workers", "kind")
#: reason: stream_end, silent, replaced.
WORKERS_LOST = _counter("workers_lost", "Workers declared lost", "kind", "reason")
LATE_EVENTS = _counter("late_events", "Events dropped since their attempt or worker was given up")

# Steps, at a worker.

STEPS = _counter("steps", "Engine steps")
STEP_SECONDS = _seconds(
    "step", "Engine time for one step: its launch, and the wait for its result", buckets=_SHORT_SECONDS
)
STEP_TOKENS = Histogram(
    "triptych_step_tokens",
    "Tokens computed in a step",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    registry=REGISTRY,
)
RUNNING = _gauge("running", "Requests in the running set of the scheduler")
WAITING = _gauge("waiting", "Requests waiting in the scheduler")
PREEMPTIONS = _counter("preemptions", "Running requests that gave their blocks back")
NUMERICAL_FAILURES = _counter("numerical_failures", "Rows with non-finite logits")

# KV cache and encoder cache.

#: state: free, used, quarantined.
KV_BLOCKS = _gauge("kv_blocks", "Blocks by state", "state")
KV_UTILISATION = _gauge("kv_utilisation_ratio", "Used blocks / all blocks")
PREFIX_QUERIES = _counter("prefix_cache_queries", "Tokens looked up in the prefix cache")
PREFIX_HITS = _counter("prefix_cache_hits", "Tokens found in the prefix cache")
HASH_COLLISIONS = _counter(
    "kv_hash_collisions", "Look-ups that met a block of the same hash and other content"
)
ENCODER_QUERIES = _counter("encoder_cache_queries", "Media items looked up by hash")
ENCODER_HITS = _counter("encoder_cache_hits", "Media items found by hash")
ENCODED_ITEMS = _counter("encoded_items", "Media items encoded")

# Transfer. kind: kv, ec.

TRANSFER_BYTES = _counter("transfer_bytes", "Bytes pulled and verified", "backend", "kind")
TRANSFER_SECONDS = _seconds("transfer", "One pull", "backend", "kind", buckets=_SHORT_SECONDS)
#: reason: stale, corrupt, timeout, peer_lost, failed.
TRANSFER_FAILURES = _counter("transfer_failures", "Pulls that did not deliver every block", "reason")
CHECKSUM_FAILURES = _counter("checksum_failures", "Blocks whose bytes did not match", "kind")
RECALLED = _counter("kv_blocks_recalled", "Blocks of a worker's earlier life that were found again")
LEASES_GRANTED = _counter("leases_granted", "Leases granted on blocks", "kind")
LEASES_EXPIRED = _counter("leases_expired", "Leases that ran out before their release", "kind")

# Choices by measured cost.

#: choice: apart, alone (which workers serve a prompt); load, compute (what a tier holds of it).
DECISIONS = _counter("decisions", "Choices between ways to get a prompt's KV", "choice")
#: kind: predicted, actual.
DECISION_COST = _seconds("decision_cost", "What the way that was chosen costs", "choice", "kind")

# KV store, as seen by its clients and by itself.

STORE_QUERIES = _counter("kv_store_queries", "Blocks looked up in the KV store")
STORE_HITS = _counter("kv_store_hits", "Blocks found in the KV store")
STORE_OFFERED = _counter("kv_store_offered", "Blocks offered to the KV store")
STORE_ACCEPTED = _counter("kv_store_accepted", "Offered blocks that the KV store published")
#: node: the address of one of several stores. call: lookup, offer, release.
STORE_NODE_FAILURES = _counter(
    "kv_store_node_failures", "Calls that a node of the KV store did not answer", "node", "call"
)
STORE_NODE_PAUSES = _counter(
    "kv_store_node_pauses", "Times that a node of the KV store was left alone after a failure", "node"
)
EMBEDDING_STORE_QUERIES = _counter("embedding_store_queries", "Media items looked up in the KV store")
EMBEDDING_STORE_HITS = _counter(
    "embedding_store_hits", "Media items whose embeddings came from the KV store: none of them was encoded"
)

# Tiers of the KV store. tier: cpu, embeddings (both in memory), disk, or the name of an external one.
# direction: load, store.

TIER_QUERIES = _counter("kv_offload_tiering_chunk_queries", "Records looked up in a tier", "tier")
TIER_HITS = _counter("kv_offload_tiering_chunk_hits", "Records found in a tier", "tier")
TIER_BYTES = _counter("kv_offload_bytes", "Bytes moved from and to a tier", "tier", "direction")
TIER_SECONDS = _seconds(
    "kv_offload", "One record, from or to a tier", "tier", "direction", buckets=_SHORT_SECONDS
)
#: reason: capacity, replaced, removed, missing, quarantined.
TIER_EVICTIONS = _counter("kv_offload_evictions", "Records that a tier holds no more", "tier", "reason")
#: error: the errno's name, or other.
TIER_WRITE_FAILURES = _counter("kv_offload_write_failures", "Records not written", "tier", "error")
TIER_DISABLED = _counter("kv_offload_disabled", "Times that a tier switched its writes off", "tier")
#: reason: those of a corrupt record, and io.
TIER_QUARANTINED = _counter("kv_offload_quarantined", "Records that were put aside", "tier", "reason")
TIER_DRIFT = _counter("kv_offload_drift_bytes", "Bytes by which a tier's counter was found to be off", "tier")
#: reason: missing (not read), corrupt (the tier found it so itself), or that of a record that did not verify.
PROMOTION_FAILURES = _counter(
    "kv_offload_promotion_failures", "Records that could not be loaded into memory", "tier", "reason"
)
BLOCK_LIFETIME = _seconds("kv_block_lifetime", "Stored to evicted", "tier", buckets=_LONG_SECONDS)
BLOCK_IDLE = _seconds("kv_block_idle_before_evict", "Last used to evicted", "tier", buckets=_LONG_SECONDS)
BLOCK_REUSE_GAP = _seconds(
    "kv_block_reuse_gap",
    "Between two uses of a prefix, as its first block sees them",
    "tier",
    buckets=_LONG_SECONDS,
)
