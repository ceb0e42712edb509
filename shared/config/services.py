"""The configuration of each component, as frozen dataclasses; a service composes those it needs.

Owns names, defaults and bounds. A component is given its own section, never a service's whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.config.convert import ranged


@dataclass(frozen=True)
class ModelConfig:
    """Which model is served. ``path`` is a directory; ``name`` empty = the directory's name.

    ``runner`` auto = witness for a model directory of that type, else torch. ``quantization`` int8: weights
    of products have 8 bits and a scale an output, and inputs a scale a token: workers must agree in it.
    """

    path: str
    name: str = ""
    runner: Literal["auto", "torch", "witness"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantization: Literal["none", "int8"] = "none"
    cache_dir: str = ""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of what may run at a time. ``max_model_len`` 0 = the model's own."""

    max_num_batched_tokens: int = ranged(128, 1, 1 << 20)
    max_num_seqs: int = ranged(64, 1, 4096)
    max_model_len: int = ranged(2048, 0, 1 << 20)


@dataclass(frozen=True)
class KVConfig:
    """The KV cache. ``num_blocks`` 0 = as many as ``memory_mb`` holds. ``keeper``: the address of who
    holds the memory for the worker's next life ("": it ends with the process); the launcher fills it in.

    For tests alone: ``verify`` off trusts bytes as they come; ``hash_bits`` cuts block hashes short, so that
    blocks share theirs.
    """

    block_size: int = ranged(16, 1, 1024)
    num_blocks: int = ranged(0, 0, 1 << 31)
    memory_mb: int = ranged(256, 1, 1 << 20)
    prefix_caching: bool = True
    verify: bool = True
    hash_bits: int = ranged(256, 1, 256)
    keeper: str = ""


@dataclass(frozen=True)
class StoreKVConfig(KVConfig):
    """The store's blocks in memory. ``policy``: what goes first when room is needed."""

    policy: Literal["lru", "arc", "s3fifo"] = "arc"


@dataclass(frozen=True)
class DiskConfig:
    """A tier on the local disk, in a directory of its own; ``path`` empty = none. ``capacity_mb`` is a hard
    bound on what its files occupy."""

    path: str = ""
    capacity_mb: int = ranged(4096, 1, 1 << 30)
    policy: Literal["lru", "arc", "s3fifo"] = "arc"


@dataclass(frozen=True)
class LowerTiersConfig:
    """How records move between memory and lower tiers: at most so many a time, and a look-up waits at most
    ``deadline_s`` for them."""

    deadline_s: float = ranged(0.7, 0.001, 60)
    max_loads: int = ranged(1024, 1, 1 << 20)
    max_stores: int = ranged(256, 1, 1 << 20)


@dataclass(frozen=True)
class EncoderConfig:
    """Media and embeddings. The ``ec`` arena holds ``memory_mb`` of embedding rows."""

    memory_mb: int = ranged(64, 1, 1 << 20)
    rows_per_block: int = ranged(16, 1, 4096)
    max_batch_items: int = ranged(8, 1, 1024)
    max_media_bytes: int = ranged(16 << 20, 1, 256 << 20)
    max_held_media_bytes: int = ranged(128 << 20, 1, 1 << 40)
    max_pixels: int = ranged(16_000_000, 1, 1 << 30)
    decode_timeout_s: float = ranged(10.0, 0.1, 600)
    num_decoders: int = ranged(1, 1, 64)


@dataclass(frozen=True)
class TransferConfig:
    """How bytes move between workers: backends in order of preference, leases and deadlines.

    A request whose router has not asked after it for ``lease_s`` is given up, one whose router's stream has
    ended after ``orphan_grace_s``.

    ``tcp_port``: where backend tcp listens, 0 = any free one. ``tcp_advertise`` ("host:port") is what peers
    are told instead of that, for those who reach it through somebody else; empty = the same.
    """

    order: tuple[Literal["shm", "tcp", "nixl", "mooncake"], ...] = ("shm", "tcp")
    lease_s: float = ranged(30.0, 0.1, 3600)
    orphan_grace_s: float = ranged(5.0, 0.01, 3600)
    deadline_s: float = ranged(5.0, 0.01, 600)
    tcp_host: str = "127.0.0.1"
    tcp_port: int = ranged(0, 0, 65535)
    tcp_advertise: str = ""

    def __post_init__(self) -> None:
        if not self.order:
            raise ValueError("order must name at least one backend")
        _, _, port = self.tcp_advertise.rpartition(":")
        if self.tcp_advertise and not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("tcp_advertise must be host:port")


@dataclass(frozen=True)
class ServerConfig:
    """Where a service listens for gRPC, and for metrics. Port 0 = any free one."""

    host: str = "127.0.0.1"
    port: int = ranged(0, 0, 65535)
    metrics_host: str = "127.0.0.1"
    metrics_port: int = ranged(0, 0, 65535)
    max_message_bytes: int = ranged(4 << 20, 64 << 10, 256 << 20)


@dataclass(frozen=True)
class HttpConfig:
    """Where the gateway listens, and what it bears: bytes of a body (and of a message over gRPC), open
    connections, and how long the head of a request may take."""

    host: str = "127.0.0.1"
    port: int = ranged(8000, 0, 65535)
    max_body_bytes: int = ranged(32 << 20, 1024, 256 << 20)
    max_connections: int = ranged(4096, 1, 1 << 20)
    header_timeout_s: float = ranged(10.0, 0.1, 600)


@dataclass(frozen=True)
class RegistryConfig:
    """Where routers find workers besides their own announcements."""

    kind: Literal["memory", "redis"] = "memory"
    redis_url: str = ""
    prefix: str = "triptych"
    heartbeat_s: float = ranged(1.0, 0.05, 60)
    ttl_s: float = ranged(5.0, 0.1, 600)

    def __post_init__(self) -> None:
        if self.kind == "redis" and not self.redis_url:
            raise ValueError("kind redis needs redis_url")
        if self.ttl_s <= self.heartbeat_s:
            raise ValueError("ttl_s must be longer than heartbeat_s")


@dataclass(frozen=True)
class LimitsConfig:
    """What one request and all requests together may take."""

    max_running: int = ranged(256, 1, 1 << 20)
    max_queued: int = ranged(1024, 0, 1 << 20)
    max_media_items: int = ranged(8, 0, 1024)
    max_media_bytes: int = ranged(16 << 20, 1, 256 << 20)
    max_pixels: int = ranged(16_000_000, 1, 1 << 30)
    default_deadline_s: float = ranged(600.0, 0.1, 86400)
    no_worker_wait_s: float = ranged(30.0, 0, 3600)


@dataclass(frozen=True)
class RoutingConfig:
    """How workers are watched and requests recovered. ``recovery`` off = a lost worker ends them.

    A worker that says nothing, or whose engine does not move, gets no new work after ``suspect_s``; it is
    lost after ``lost_s`` of silence or ``stall_s`` without a turn of its engine (a step may be long).

    ``placement``: "cost" lets a decode worker compute a prompt itself where that is measured to be cheaper
    than a prefill worker and the handoff; "apart" never does while there is a prefill worker.

    ``phases``: the kinds of workers without which the router does not call itself ready (an encoder only
    for models that see). One kind fewer is a deployment that serves without it.
    """

    phases: tuple[Literal["encoder", "prefill", "decode"], ...] = ("encoder", "prefill", "decode")
    placement: Literal["cost", "apart"] = "cost"
    recovery: bool = True
    recovery_limit: int = ranged(8, 0, 1000)
    crash_limit: int = ranged(3, 1, 1000)
    suspect_s: float = ranged(2.0, 0.05, 600)
    lost_s: float = ranged(3.0, 0.05, 600)
    stall_s: float = ranged(30.0, 0.05, 3600)

    def __post_init__(self) -> None:
        if min(self.lost_s, self.stall_s) < self.suspect_s:
            raise ValueError("lost_s and stall_s must not be shorter than suspect_s")


@dataclass(frozen=True)
class TelemetryConfig:
    """Logs and traces. ``otlp_endpoint`` empty = no tracing."""

    otlp_endpoint: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True)
class RuntimeConfig:
    """The process itself. ``failpoints`` arms faults for tests (see ``shared.failpoints``).

    ``tp_size``: ranks that share the kv_heads of a prefill or decode worker; others take no notice of it.
    """

    num_threads: int = ranged(1, 1, 1024)
    tp_size: int = ranged(1, 1, 32)
    drain_s: float = ranged(10.0, 0, 3600)
    batch_invariant: bool = False
    failpoints: str = ""


@dataclass(frozen=True)
class RouterConfig:
    """The router with its gateway."""

    model: ModelConfig
    router_id: str = "router-0"
    http: HttpConfig = field(default_factory=HttpConfig)
    server: ServerConfig = field(default_factory=lambda: ServerConfig(port=8001, metrics_port=8002))
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        server = self.server
        places: dict[tuple[str, int], str] = {}
        for name, host, port in (
            ("http.port", self.http.host, self.http.port),
            ("server.port", server.host, server.port),
            ("server.metrics_port", server.metrics_host, server.metrics_port),
        ):
            other = places.setdefault((host, port), name)
            if port and other != name:
                raise ValueError(f"{other} and {name} must differ")


@dataclass(frozen=True)
class WorkerConfig:
    """An encoder, prefill or decode worker.

    ``routers`` are the gRPC addresses to announce itself to. ``kv_stores`` are those of the stores, besides
    which the worker uses the stores that its routers list; a segment of blocks, or an item's embeddings, is
    kept by ``store_replicas`` of them.
    """

    model: ModelConfig
    worker_id: str
    kind: Literal["encoder", "prefill", "decode"]
    routers: tuple[str, ...] = ()
    kv_stores: tuple[str, ...] = ()
    store_replicas: int = ranged(1, 1, 2)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


@dataclass(frozen=True)
class StoreConfig:
    """The KV store. ``model`` says whose KV it keeps.

    ``embeddings_mb`` of memory are for embeddings, 0 = none are kept. One tenant may take ``tenant_share`` of
    the blocks from others.

    ``tiers`` are lower tiers from outside of this package, below the disk, nearest first:
    "package.module:Class" or "package.module:Class?option=value&option=value", where values are JSON, or
    text if they are not.
    """

    model: ModelConfig
    worker_id: str = "kv-store-0"
    routers: tuple[str, ...] = ()
    kv: StoreKVConfig = field(default_factory=StoreKVConfig)
    embeddings_mb: int = ranged(64, 0, 1 << 20)
    tenant_share: float = ranged(1.0, 0.0, 1.0)
    disk: DiskConfig = field(default_factory=DiskConfig)
    tiers: tuple[str, ...] = ()
    lower: LowerTiersConfig = field(default_factory=LowerTiersConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        if self.transfer.tcp_port and self.embeddings_mb:
            raise ValueError("a fixed transfer.tcp_port serves blocks alone: set embeddings_mb to 0")


#: The configurations of all services of a deployment.
SERVICES = (RouterConfig, WorkerConfig, StoreConfig)
