"""The KV store's service, both ends (``kv_store.proto``).

Owns the wire side. What is stored and for how long is behind KvStorePort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from shared.rpc import checks
from shared.rpc.client import open_channel, typed_errors
from shared.rpc.convert_common import (
    agent_from_wire,
    agent_to_wire,
    block_from_wire,
    block_to_wire,
    ec_params_from_wire,
    ec_params_to_wire,
    identity_from_wire,
    identity_to_wire,
    kv_params_from_wire,
    kv_params_to_wire,
    layout_from_wire,
    layout_to_wire,
)
from shared.rpc.convert_worker import info_from_wire, info_to_wire, status_from_wire, status_to_wire
from shared.types.identity import IdentityKey, LayoutSpec
from shared.types.store import BlockKey, EmbeddingHit, EmbeddingKey, OfferedBlock, StoreHit
from shared.types.transfer import AgentInfo, EcTransferParams
from shared.types.worker import WorkerInfo, WorkerStatus
from triptych.v1 import kv_store_pb2 as pb
from triptych.v1 import kv_store_pb2_grpc

MAX_OFFERED = 4096
MAX_LOOKED_UP = 1 << 15
MAX_BLOCK_TOKENS = 4096
MAX_ROWS_PER_BLOCK = 4096
MAX_EMBEDDING_ROWS = 1 << 20
MAX_ROW_BYTES = 1 << 20
MAX_TENANT_CHARS = 64
#: A look-up that takes longer is a miss; a store that loads from a lower tier answers within this.
LOOKUP_S = 1.0


class KvStorePort(Protocol):
    """What a store offers to the wire; on the event loop. Methods raise TriptychError."""

    async def offer(self, identity: IdentityKey, producer: AgentInfo, blocks: Sequence[OfferedBlock]) -> int:
        """Pull what is wanted of these blocks; returns, once that is over, how many of them are in the
        store. The producer keeps them until then."""
        ...

    async def lookup(
        self, identity: IdentityKey, layout: LayoutSpec, blocks: Sequence[BlockKey], tenant: str = ""
    ) -> StoreHit:
        """The longest stored prefix, pinned under a lease. What has to be brought into memory for it counts
        for the tenant."""
        ...

    async def offer_embedding(
        self, identity: IdentityKey, key: EmbeddingKey, params: EcTransferParams
    ) -> bool:
        """Pull these embeddings if they are wanted; returns, once that is over, whether the store has them.
        The producer keeps them until then."""
        ...

    async def lookup_embedding(
        self, identity: IdentityKey, key: EmbeddingKey, rows_per_block: int
    ) -> EmbeddingHit:
        """Stored embeddings, pinned under a lease."""
        ...

    def release(self, lease_ids: Sequence[str]) -> None:
        """Give leases back, of blocks or embeddings; unknown ones are ignored."""
        ...

    def info(self) -> WorkerInfo: ...

    def status(self) -> WorkerStatus: ...


class KvStoreServicer(kv_store_pb2_grpc.KvStoreServiceServicer):
    """A KvStorePort on the wire."""

    def __init__(self, port: KvStorePort) -> None:
        self._port = port

    def add_to(self, server: grpc.aio.Server) -> None:
        kv_store_pb2_grpc.add_KvStoreServiceServicer_to_server(self, server)

    async def Offer(self, request: pb.OfferRequest, context: object) -> pb.OfferResponse:
        checks.present(request, "identity")
        checks.present(request, "producer")
        checks.count("blocks", request.blocks, MAX_OFFERED)
        accepted = await self._port.offer(
            identity_from_wire(request.identity),
            agent_from_wire(request.producer),
            [_offered_from_wire(block) for block in request.blocks],
        )
        return pb.OfferResponse(num_accepted=accepted)

    async def Lookup(self, request: pb.LookupRequest, context: object) -> pb.LookupResponse:
        checks.present(request, "identity")
        checks.present(request, "layout")
        checks.count("blocks", request.blocks, MAX_LOOKED_UP)
        hit = await self._port.lookup(
            identity_from_wire(request.identity),
            layout_from_wire(request.layout),
            [_key_from_wire(key) for key in request.blocks],
            checks.text("tenant", request.tenant, MAX_TENANT_CHARS),
        )
        return pb.LookupResponse(
            lease_id=hit.lease_id,
            lease_s=hit.lease_s,
            num_blocks=hit.num_blocks,
            runs=[kv_params_to_wire(run) for run in hit.runs],
        )

    async def OfferEmbedding(
        self, request: pb.OfferEmbeddingRequest, context: object
    ) -> pb.OfferEmbeddingResponse:
        for field in ("identity", "key", "embedding"):
            checks.present(request, field)
        accepted = await self._port.offer_embedding(
            identity_from_wire(request.identity),
            _embedding_key_from_wire(request.key),
            ec_params_from_wire(request.embedding),
        )
        return pb.OfferEmbeddingResponse(accepted=accepted)

    async def LookupEmbedding(
        self, request: pb.LookupEmbeddingRequest, context: object
    ) -> pb.LookupEmbeddingResponse:
        checks.present(request, "identity")
        checks.present(request, "key")
        hit = await self._port.lookup_embedding(
            identity_from_wire(request.identity),
            _embedding_key_from_wire(request.key),
            checks.number("rows_per_block", request.rows_per_block, MAX_ROWS_PER_BLOCK, 1),
        )
        embedding = None if hit.params is None else ec_params_to_wire(hit.params)
        return pb.LookupEmbeddingResponse(lease_id=hit.lease_id, lease_s=hit.lease_s, embedding=embedding)

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        self._port.release(checks.ids("lease_ids", request.lease_ids))
        return pb.ReleaseResponse()

    async def GetStatus(
        self, request: pb.KvStoreServiceGetStatusRequest, context: object
    ) -> pb.KvStoreServiceGetStatusResponse:
        return pb.KvStoreServiceGetStatusResponse(
            info=info_to_wire(self._port.info()), status=status_to_wire(self._port.status())
        )


class KvStoreStub:
    """The store, seen from a worker; event loop only. Every method raises TriptychError: a store that
    is slow or gone is the caller's miss."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = kv_store_pb2_grpc.KvStoreServiceStub(self._channel)

    async def offer(
        self,
        identity: IdentityKey,
        producer: AgentInfo,
        blocks: Sequence[OfferedBlock],
        timeout_s: float = 10.0,
    ) -> int:
        """As KvStorePort.offer; at most ``MAX_OFFERED`` blocks."""
        request = pb.OfferRequest(
            identity=identity_to_wire(identity),
            producer=agent_to_wire(producer),
            blocks=[
                pb.OfferedBlock(
                    key=_key_to_wire(block.key), ref=block_to_wire(block.ref), tenant=block.tenant
                )
                for block in blocks
            ],
        )
        with typed_errors():
            reply = await self._stub.Offer(request, timeout=timeout_s)
        return reply.num_accepted

    async def lookup(
        self,
        identity: IdentityKey,
        layout: LayoutSpec,
        blocks: Sequence[BlockKey],
        tenant: str = "",
        timeout_s: float = LOOKUP_S,
    ) -> StoreHit:
        """As KvStorePort.lookup; of each group in order from the first block on."""
        request = pb.LookupRequest(
            identity=identity_to_wire(identity),
            layout=layout_to_wire(layout),
            blocks=[_key_to_wire(key) for key in blocks],
            tenant=tenant,
        )
        with typed_errors():
            reply = await self._stub.Lookup(request, timeout=timeout_s)
        checks.count("runs", reply.runs, checks.MAX_GROUPS)
        return StoreHit(
            lease_id=checks.text("lease_id", reply.lease_id, checks.MAX_ID_CHARS),
            lease_s=checks.real("lease_s", reply.lease_s, 0, checks.MAX_SECONDS),
            num_blocks=checks.number("num_blocks", reply.num_blocks, len(blocks)),
            runs=tuple([kv_params_from_wire(run) for run in reply.runs]),
        )

    async def offer_embedding(
        self, identity: IdentityKey, key: EmbeddingKey, params: EcTransferParams, timeout_s: float = 10.0
    ) -> bool:
        """As KvStorePort.offer_embedding."""
        request = pb.OfferEmbeddingRequest(
            identity=identity_to_wire(identity),
            key=_embedding_key_to_wire(key),
            embedding=ec_params_to_wire(params),
        )
        with typed_errors():
            reply = await self._stub.OfferEmbedding(request, timeout=timeout_s)
        return reply.accepted

    async def lookup_embedding(
        self, identity: IdentityKey, key: EmbeddingKey, rows_per_block: int, timeout_s: float = LOOKUP_S
    ) -> EmbeddingHit:
        """As KvStorePort.lookup_embedding."""
        request = pb.LookupEmbeddingRequest(
            identity=identity_to_wire(identity),
            key=_embedding_key_to_wire(key),
            rows_per_block=rows_per_block,
        )
        with typed_errors():
            reply = await self._stub.LookupEmbedding(request, timeout=timeout_s)
        return EmbeddingHit(
            lease_id=checks.text("lease_id", reply.lease_id, checks.MAX_ID_CHARS),
            lease_s=checks.real("lease_s", reply.lease_s, 0, checks.MAX_SECONDS),
            params=ec_params_from_wire(reply.embedding) if reply.HasField("embedding") else None,
        )

    async def release(self, lease_ids: Sequence[str], timeout_s: float = 2.0) -> None:
        with typed_errors():
            await self._stub.Release(pb.ReleaseRequest(lease_ids=lease_ids), timeout=timeout_s)

    async def status(self, timeout_s: float = 2.0) -> tuple[WorkerInfo, WorkerStatus]:
        with typed_errors():
            reply = await self._stub.GetStatus(pb.KvStoreServiceGetStatusRequest(), timeout=timeout_s)
        return info_from_wire(reply.info), status_from_wire(reply.status)

    async def close(self) -> None:
        await self._channel.close(None)


def _key_to_wire(key: BlockKey) -> pb.BlockKey:
    return pb.BlockKey(
        group=key.group,
        block_hash=key.block_hash,
        parent=key.parent,
        token_ids=key.token_ids,
        media=[pb.BlockMedia(mm_hash=mm_hash, offset=offset) for mm_hash, offset in key.media],
    )


def _key_from_wire(wire: pb.BlockKey) -> BlockKey:
    block_hash, parent = checks.hashes("blocks.block_hash", (wire.block_hash, wire.parent))
    checks.count("blocks.media", wire.media, checks.MAX_ITEMS)
    return BlockKey(
        group=checks.number("blocks.group", wire.group, checks.MAX_GROUPS),
        block_hash=block_hash,
        parent=parent,
        token_ids=checks.token_ids("blocks.token_ids", wire.token_ids, MAX_BLOCK_TOKENS),
        media=tuple(
            [(checks.text("blocks.media", m.mm_hash, checks.MAX_ID_CHARS), m.offset) for m in wire.media]
        ),
    )


def _offered_from_wire(wire: pb.OfferedBlock) -> OfferedBlock:
    checks.present(wire, "key")
    checks.present(wire, "ref")
    tenant = checks.text("blocks.tenant", wire.tenant, MAX_TENANT_CHARS)
    return OfferedBlock(_key_from_wire(wire.key), block_from_wire(wire.ref), tenant)


def _embedding_key_to_wire(key: EmbeddingKey) -> pb.EmbeddingKey:
    return pb.EmbeddingKey(
        media_hash=key.media_hash,
        decode_options=key.decode_options,
        processor_version=key.processor_version,
        salt_digest=key.salt_digest,
        num_rows=key.num_rows,
        row_bytes=key.row_bytes,
        dtype=key.dtype,
    )


def _embedding_key_from_wire(wire: pb.EmbeddingKey) -> EmbeddingKey:
    media_hash, salt_digest = checks.hashes("key", (wire.media_hash, wire.salt_digest))
    return EmbeddingKey(
        media_hash=media_hash,
        decode_options=checks.text("key.decode_options", wire.decode_options),
        processor_version=checks.text("key.processor_version", wire.processor_version),
        salt_digest=salt_digest,
        num_rows=checks.number("key.num_rows", wire.num_rows, MAX_EMBEDDING_ROWS, 1),
        row_bytes=checks.number("key.row_bytes", wire.row_bytes, MAX_ROW_BYTES, 1),
        dtype=checks.text("key.dtype", wire.dtype, checks.MAX_ID_CHARS, required=True),
    )
