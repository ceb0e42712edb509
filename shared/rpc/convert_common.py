"""Wire <-> types for identity, layout, agents and handoffs (``common.proto``)."""

from __future__ import annotations

from shared.rpc import checks
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.kv import ITEM_BYTES, KVGroupSpec
from shared.types.transfer import (
    AgentInfo,
    BlockRef,
    EcTransferParams,
    Endpoint,
    KvTransferParams,
    RegionInfo,
)
from triptych.v1 import common_pb2 as pb

_MAX_DIMENSION = 1 << 20


def identity_to_wire(key: IdentityKey) -> pb.IdentityKey:
    return pb.IdentityKey(
        model=key.model,
        revision=key.revision,
        tokenizer=key.tokenizer,
        kv_dtype=key.kv_dtype,
        numerics=key.numerics,
        adapter_scheme=key.adapter_scheme,
        hash_scheme=key.hash_scheme,
    )


def identity_from_wire(wire: pb.IdentityKey) -> IdentityKey:
    text = checks.text
    return IdentityKey(
        model=text("identity.model", wire.model),
        revision=text("identity.revision", wire.revision),
        tokenizer=text("identity.tokenizer", wire.tokenizer),
        kv_dtype=text("identity.kv_dtype", wire.kv_dtype),
        numerics=text("identity.numerics", wire.numerics),
        adapter_scheme=text("identity.adapter_scheme", wire.adapter_scheme),
        hash_scheme=text("identity.hash_scheme", wire.hash_scheme),
    )


def group_to_wire(group: KVGroupSpec) -> pb.KvGroupSpec:
    return pb.KvGroupSpec(
        num_layers=group.num_layers,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        window=group.window,
    )


def group_from_wire(wire: pb.KvGroupSpec) -> KVGroupSpec:
    if wire.dtype not in ITEM_BYTES:
        raise checks.refuse("layout.groups.dtype", "is unknown")
    return KVGroupSpec(
        num_layers=checks.number("layout.groups.num_layers", wire.num_layers, _MAX_DIMENSION, 1),
        num_kv_heads=checks.number("layout.groups.num_kv_heads", wire.num_kv_heads, checks.MAX_HEADS, 1),
        head_dim=checks.number("layout.groups.head_dim", wire.head_dim, _MAX_DIMENSION, 1),
        dtype=wire.dtype,
        window=wire.window if wire.HasField("window") else None,
    )


def layout_to_wire(layout: LayoutSpec) -> pb.LayoutSpec:
    return pb.LayoutSpec(
        groups=[group_to_wire(group) for group in layout.groups],
        block_size=layout.block_size,
        tp_size=layout.tp_size,
        head_start=layout.head_start,
        extent_order=layout.extent_order,
        checksum=layout.checksum,
        min_wire_version=layout.wire_versions[0],
        max_wire_version=layout.wire_versions[1],
    )


def layout_from_wire(wire: pb.LayoutSpec) -> LayoutSpec:
    checks.count("layout.groups", wire.groups, checks.MAX_GROUPS, least=1)
    if wire.min_wire_version > wire.max_wire_version:
        raise checks.refuse("layout.min_wire_version", "is above max_wire_version")
    return LayoutSpec(
        groups=tuple([group_from_wire(group) for group in wire.groups]),
        block_size=checks.number("layout.block_size", wire.block_size, _MAX_DIMENSION, 1),
        tp_size=checks.number("layout.tp_size", wire.tp_size, checks.MAX_HEADS, 1),
        head_start=checks.number("layout.head_start", wire.head_start, checks.MAX_HEADS),
        extent_order=checks.text("layout.extent_order", wire.extent_order),
        checksum=checks.text("layout.checksum", wire.checksum),
        wire_versions=(wire.min_wire_version, wire.max_wire_version),
    )


def region_to_wire(region: RegionInfo) -> pb.RegionInfo:
    return pb.RegionInfo(
        name=region.name,
        nbytes=region.nbytes,
        num_blocks=region.num_blocks,
        extent_bytes=region.extent_bytes,
        generation_offsets=region.generation_offsets,
        data_offsets=region.data_offsets,
    )


def region_from_wire(wire: pb.RegionInfo) -> RegionInfo:
    """Refuses a geometry whose tables or blocks reach outside the region."""
    groups = checks.count("regions.num_blocks", wire.num_blocks, checks.MAX_GROUPS)
    columns = (wire.extent_bytes, wire.generation_offsets, wire.data_offsets)
    if any(len(column) != groups for column in columns):
        raise checks.refuse("regions", "has columns of unequal lengths")
    for number, extent, table, data in zip(wire.num_blocks, *columns, strict=True):
        if table + 8 * number > wire.nbytes or data + number * extent > wire.nbytes:
            raise checks.refuse("regions", "reaches outside itself")
    return RegionInfo(
        name=checks.text("regions.name", wire.name, checks.MAX_ID_CHARS, required=True),
        nbytes=wire.nbytes,
        num_blocks=tuple(wire.num_blocks),
        extent_bytes=tuple(wire.extent_bytes),
        generation_offsets=tuple(wire.generation_offsets),
        data_offsets=tuple(wire.data_offsets),
    )


def agent_to_wire(agent: AgentInfo) -> pb.AgentInfo:
    return pb.AgentInfo(
        worker_id=agent.worker_id,
        incarnation=agent.incarnation,
        epoch=agent.epoch,
        endpoints=[pb.Endpoint(backend=e.backend, metadata=e.metadata) for e in agent.endpoints],
        regions=[region_to_wire(region) for region in agent.regions],
        layout=None if agent.layout is None else layout_to_wire(agent.layout),
    )


def agent_from_wire(wire: pb.AgentInfo) -> AgentInfo:
    checks.count("agent.endpoints", wire.endpoints, checks.MAX_ENDPOINTS)
    checks.count("agent.regions", wire.regions, checks.MAX_GROUPS)
    for endpoint in wire.endpoints:
        checks.count("agent.endpoints.metadata", endpoint.metadata, checks.MAX_ENDPOINT_BYTES)
    return AgentInfo(
        worker_id=checks.text("agent.worker_id", wire.worker_id, checks.MAX_ID_CHARS, required=True),
        incarnation=checks.text("agent.incarnation", wire.incarnation, checks.MAX_ID_CHARS, required=True),
        epoch=wire.epoch,
        endpoints=tuple(
            [Endpoint(checks.text("agent.endpoints.backend", e.backend), e.metadata) for e in wire.endpoints]
        ),
        regions=tuple([region_from_wire(region) for region in wire.regions]),
        layout=layout_from_wire(wire.layout) if wire.HasField("layout") else None,
    )


def block_to_wire(block: BlockRef) -> pb.BlockRef:
    return pb.BlockRef(block_id=block.block_id, generation=block.generation, checksums=block.checksums)


def block_from_wire(wire: pb.BlockRef) -> BlockRef:
    checks.count("blocks.checksums", wire.checksums, checks.MAX_HEADS)
    return BlockRef(wire.block_id, wire.generation, tuple(wire.checksums))


def kv_params_to_wire(params: KvTransferParams) -> pb.KvTransferParams:
    return pb.KvTransferParams(
        handoff_id=params.handoff_id,
        producer=agent_to_wire(params.producer),
        group=params.group,
        first=params.first,
        blocks=[block_to_wire(block) for block in params.blocks],
    )


def kv_params_from_wire(wire: pb.KvTransferParams) -> KvTransferParams:
    checks.present(wire, "producer")
    checks.count("params.blocks", wire.blocks, checks.MAX_BLOCKS)
    return KvTransferParams(
        handoff_id=checks.text("params.handoff_id", wire.handoff_id, checks.MAX_ID_CHARS, required=True),
        producer=agent_from_wire(wire.producer),
        group=checks.number("params.group", wire.group, checks.MAX_GROUPS),
        first=checks.number("params.first", wire.first, checks.MAX_TOKENS),
        blocks=tuple([block_from_wire(block) for block in wire.blocks]),
    )


def ec_params_to_wire(params: EcTransferParams) -> pb.EcTransferParams:
    return pb.EcTransferParams(
        handoff_id=params.handoff_id,
        producer=agent_to_wire(params.producer),
        mm_hash=params.mm_hash,
        num_rows=params.num_rows,
        row_bytes=params.row_bytes,
        dtype=params.dtype,
        block_ids=params.block_ids,
        generations=params.generations,
        checksum=params.checksum,
    )


def ec_params_from_wire(wire: pb.EcTransferParams) -> EcTransferParams:
    checks.present(wire, "producer")
    blocks = checks.count("embeddings.block_ids", wire.block_ids, checks.MAX_BLOCKS)
    if len(wire.generations) != blocks:
        raise checks.refuse("embeddings.generations", "must be as many as block_ids")
    return EcTransferParams(
        handoff_id=checks.text("embeddings.handoff_id", wire.handoff_id, checks.MAX_ID_CHARS, required=True),
        producer=agent_from_wire(wire.producer),
        mm_hash=checks.text("embeddings.mm_hash", wire.mm_hash, checks.MAX_ID_CHARS, required=True),
        num_rows=checks.number("embeddings.num_rows", wire.num_rows, checks.MAX_TOKENS),
        row_bytes=checks.number("embeddings.row_bytes", wire.row_bytes, 1 << 26),
        dtype=checks.text("embeddings.dtype", wire.dtype),
        block_ids=tuple(wire.block_ids),
        generations=tuple(wire.generations),
        checksum=wire.checksum,
    )
