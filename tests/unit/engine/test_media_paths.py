"""Media on its way into an engine: whatever is wrong with it, its requests hear of it and nobody else."""

from __future__ import annotations

import asyncio

import pytest

from shared.config.services import EncoderConfig
from shared.engine.desk import PullDesk
from shared.engine.embeddings import Embeddings
from shared.engine.encoder_core import Prepared
from shared.engine.inbox import Inbox
from shared.engine.media import PixelMedia
from shared.errors import TriptychError
from shared.kv_cache.block_pool import BlockPool
from shared.kv_cache.encoder_cache import EncoderCache
from shared.telemetry.tracing import NullTracer
from shared.types.request import GenerationRequest, MediaItem, SamplingParams
from shared.types.transfer import AgentInfo, EcTransferParams
from tests.fakes.worker import WITNESS
from tests.unit.engine.test_landing import RecordingPuller
from tests.unit.router.requests import PNG


@pytest.mark.parametrize(
    ("num_rows", "block_ids", "generations"), [(6, (0,), (1,)), (6, (0, 1), (1,)), (0, (), ())]
)
def test_embeddings_packed_otherwise_are_refused(
    num_rows: int, block_ids: tuple[int, ...], generations: tuple[int, ...]
) -> None:
    cache = EncoderCache(BlockPool(8), 4)
    desk = PullDesk(Inbox())
    desk.bind(RecordingPuller())
    embeddings = Embeddings(cache, desk, NullTracer(), 1.0, row_bytes=8)
    item = MediaItem("ab", 0, 6)
    request = GenerationRequest("a", "m", (1,) * 9, 9, SamplingParams(4), media=(item,))
    producer = AgentInfo("encoder-0", "i", 1, (), ())
    params = EcTransferParams("h", producer, "ab", num_rows, 8, "uint64", block_ids, generations, 7)
    failed: list[str] = []
    embeddings.fetch(request, (params,), lambda rows: None, failed.append)
    assert failed == ["embeddings in blocks of another size"]
    assert len(cache) == 0
    cache.check_integrity()


async def test_an_error_nobody_thought_of_fails_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    media = PixelMedia(WITNESS, EncoderConfig(), asyncio.get_running_loop())

    async def explode(data: bytes, options: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(media._decoder, "decode", explode)
    answer: asyncio.Future[Prepared | TriptychError] = asyncio.get_running_loop().create_future()
    await asyncio.to_thread(media.prepare, PNG, answer.set_result)
    async with asyncio.timeout(20):  # only a broken one waits
        error = await answer
    assert isinstance(error, TriptychError) and error.code == "internal_error"
    await media.close()
