"""Requests for tests, and a way to kill a worker at one event."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from shared.types.inference import ImagePart, InferenceRequest, Message, TextPart
from shared.types.request import SamplingParams
from shared.types.worker import Event, Start
from tests.unit.router.cluster import Cluster
from tests.unit.router.scripted_worker import ScriptedWorker


def picture(shade: int) -> bytes:
    """64 x 64 pixels: six embedding rows."""
    buffer = io.BytesIO()
    Image.new("L", (64, 64), shade).save(buffer, "PNG")
    return buffer.getvalue()


PNG, OTHER_PNG = picture(10), picture(200)


def ask_for(**options: Any) -> InferenceRequest:
    sampling = {"max_tokens": 10, "ignore_eos": True} | options.pop("sampling", {})
    return InferenceRequest("witness", SamplingParams(**sampling), prompt="hello worlds", **options)


def picture_request(*pictures: bytes, **options: Any) -> InferenceRequest:
    parts = (*(ImagePart(data) for data in pictures), TextPart("what is it?"))
    return InferenceRequest(
        "witness", SamplingParams(8, ignore_eos=True), messages=(Message("user", parts),), **options
    )


def kill_at(worker: ScriptedWorker, kind: type[Event], count: int = 1) -> None:
    """Kill ``worker`` in place of its ``count``-th event of a kind."""
    seen = 0

    def hook(event: Event) -> bool:
        nonlocal seen
        seen += isinstance(event, kind)
        if seen == count and isinstance(event, kind):
            worker.kill()
        return worker.alive

    worker.hook = hook


def hashes_of(cluster: Cluster) -> list[str]:
    """The media of the last prefill or aggregated start anywhere."""
    starts = [s for w in cluster.incarnations.values() for s in w.got(Start) if s.request.media]
    return [m.mm_hash for m in starts[-1].request.media]
