"""What can be known of a plan before any process is started: its model, its memory, its tiers, its ports.

Owns the checks across processes and the words for them; what a single value may be is in ``shared.config``.
Reads the model's configuration, never its weights. Without torch.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.cli import lowertiers, procfs
from services.cli.modelfiles import check_files, check_prompt_files
from services.cli.topology import ProcessSpec
from shared.config import capacity
from shared.config.load import with_environment
from shared.config.services import ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from shared.errors import ConfigError
from shared.models.config import read_json
from shared.models.registry import load_config
from shared.runner.witness_config import MODEL_TYPE, load_witness_config
from shared.types.kv import KVCacheSpec, KVGroupSpec

#: Backends of transfers that need a package, and those of which one must be there.
_PACKAGES = {"nixl": ("nixl_cu12", "nixl_cu13"), "mooncake": ("mooncake",)}


@dataclass(frozen=True)
class ModelFacts:
    """What a deployment must know of a model: the KV geometry of a token, the longest sequence in tokens,
    bytes of an embedding row, and whether it reads pictures."""

    groups: tuple[KVGroupSpec, ...]
    max_model_len: int
    row_bytes: int
    sees: bool


def read_model(model: ModelConfig) -> ModelFacts:
    """As the workers will read it. Raises ConfigError that names the directory."""
    path = Path(model.path)
    try:
        return _witness(path) if _is_witness(model) else _checkpoint(path)
    except ConfigError as error:
        raise ConfigError(f"model {path}: {error.message}") from None


def check_weights(specs: Sequence[ProcessSpec]) -> None:
    """Raises ConfigError when a model's files are not there, not whole, or do not fit each other."""
    for model in dict.fromkeys(spec.config.model for spec in specs):
        (check_prompt_files if _is_witness(model) else check_files)(Path(model.path))


def _is_witness(model: ModelConfig) -> bool:
    if model.runner != "auto":
        return model.runner == "witness"
    return read_json(Path(model.path) / "config.json").get("model_type") == MODEL_TYPE


def _witness(path: Path) -> ModelFacts:
    config = load_witness_config(path)
    group = KVGroupSpec(config.num_layers, config.num_kv_heads, 1, "uint64")
    return ModelFacts((group,), config.max_position_embeddings, config.row_bytes, True)


def _checkpoint(path: Path) -> ModelFacts:
    config = load_config(path)
    groups = config.kv_cache_spec(1).groups
    return ModelFacts(groups, config.max_position, config.embedding_bytes, config.image_token_id is not None)


def check(specs: Sequence[ProcessSpec], environ: Mapping[str, str] = {}) -> tuple[str, ...]:
    """What a user should know of this plan, though it will run. Raises ConfigError that lists everything
    because of which it would not. ``environ``: what the processes will find in their environment."""
    specs = [replace(spec, config=with_environment(spec.config, environ)) for spec in specs]
    problems: list[str] = []
    notes: defaultdict[str, list[str]] = defaultdict(list)
    models = _models(specs, problems)
    for spec in specs:
        facts = models.get(spec.config.model)
        try:
            note = _memory(spec, facts) if facts is not None else ""
        except ConfigError as error:
            problems.append(f"{spec.name}: {error.message}")
        else:
            if note:
                notes[note].append(spec.name)
        problems += _backends(spec)
    problems += lowertiers.problems(specs)
    problems += _equal_ports(specs)
    if problems:
        lines = [problem for number, problem in enumerate(problems) if problem not in problems[:number]]
        raise ConfigError("cannot start:\n" + "\n".join(f"  {line}" for line in lines))
    return tuple(f"{note} ({', '.join(names)})" for note, names in notes.items())


def _models(specs: Sequence[ProcessSpec], problems: list[str]) -> dict[ModelConfig, ModelFacts]:
    """Facts of each model that can be read; appends to ``problems`` for the others."""
    found = {}
    for model in dict.fromkeys(spec.config.model for spec in specs):
        try:
            found[model] = read_model(model)
        except ConfigError as error:
            problems.append(error.message)
    return found


def _memory(spec: ProcessSpec, facts: ModelFacts) -> str:
    """A shorter context than was wanted, in words. Raises ConfigError for memory that cannot serve."""
    config = spec.config
    if isinstance(config, RouterConfig):
        return ""
    cache = KVCacheSpec(config.kv.block_size, facts.groups)
    if isinstance(config, StoreConfig):
        capacity.kv_blocks(config.kv, cache)
        return ""
    capacity.embedding_blocks(config.encoder, facts.row_bytes)
    if config.kind == "encoder":
        if not facts.sees:
            raise ConfigError("the model reads no pictures; leave encoders out: --topology e=0")
        return ""
    return capacity.context(config, cache, facts.max_model_len).shortfall


def _backends(spec: ProcessSpec) -> Iterator[str]:
    """Transfer backends whose package is not installed."""
    moves = isinstance(spec.config, WorkerConfig | StoreConfig)
    for backend, packages in _PACKAGES.items():
        wanted = moves and backend in spec.config.transfer.order
        if wanted and not any(map(importlib.util.find_spec, packages)):
            yield f"{spec.name}: transfer.order: {backend} is not installed"


def _listeners(spec: ProcessSpec) -> list[tuple[str, str, int]]:
    """Label, host and port of everything that the process will listen on; not where any port will do."""
    server = spec.config.server
    if isinstance(spec.config, RouterConfig):
        http = spec.config.http
        found = [
            ("--http-port", http.host, http.port),
            ("--grpc-port", server.host, server.port),
            ("--metrics-port", server.metrics_host, server.metrics_port),
        ]
    else:
        found = [
            (f"{spec.name}'s gRPC port", server.host, server.port),
            (f"{spec.name}'s metrics port", server.metrics_host, server.metrics_port),
        ]
    return [listener for listener in found if listener[2]]


def _equal_ports(specs: Sequence[ProcessSpec]) -> list[str]:
    users: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for label, host, port in (listener for spec in specs for listener in _listeners(spec)):
        users[host, port].append(label)
    return [
        f"port {port} is given to {' and '.join(labels)}; each needs its own"
        for (_, port), labels in users.items()
        if len(labels) > 1
    ]


def refuse_taken_ports(specs: Sequence[ProcessSpec]) -> None:
    """Raises ConfigError that lists the ports on which something listens already."""
    listeners = [listener for spec in specs for listener in _listeners(spec)]
    taken = [f"{label} {port}" for label, host, port in listeners if not procfs.is_port_free(host, port)]
    if taken:
        raise ConfigError(f"in use by another program: {', '.join(taken)}; choose other ports")
