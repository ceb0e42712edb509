"""Times of work on a GPU: replays of a captured graph between events, the median of many."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``work`` captured, after one run outside for what is compiled at first use."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def median_ms(graph: torch.cuda.CUDAGraph, repeats: int = 30, warm: int = 3) -> float:
    """Median milliseconds of one replay, back to back."""
    for _ in range(warm):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
