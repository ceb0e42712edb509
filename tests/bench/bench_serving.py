"""The served model beside transformers, in turns: TTFT and ITL of one stream, tokens a second of eight.

python -m tests.bench.bench_serving [--rounds 3] [--set WHO:KEY=VALUE ...]

256 tokens in, 64 out, greedy. Ours: text over HTTP through gateway, router, prefill and decode processes,
timed at the client. Theirs: ``generate`` on token ids for one stream, a static batch for eight; with one
thread and with all, and with each attention; the best of these stands. No prompt is asked twice. The result
so far is kept after each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from tests.bench.client import Client, median
from tests.bench.figures import Figure, record, save, table
from tests.bench.peer import Peer, Variant, peer, variants
from tests.bench.prompts import Prompt, prompts
from tests.bench.setting import end_on_sigterm, say, served_model, six_processes, text_model, where

NUM_IN, NUM_OUT, NUM_STREAMS = 256, 64, 8
_PEER_LIMIT, _BATCH_GAIN = 1.0, 1.1
#: A variant of the peer this much worse than its best in everything is not measured again.
_HOPELESS = 1.3


class Samples:
    """What was measured so far. Lists by figure, for the peer also by variant."""

    def __init__(self) -> None:
        self.ours: defaultdict[str, list[float]] = defaultdict(list)
        self.theirs: defaultdict[str, dict[Variant, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.same: list[bool] = []

    def best(self, name: str, choose: Callable[..., float]) -> float:
        """The peer's best median over its variants."""
        return choose(median(values) for values in self.theirs[name].values())

    def contenders(self) -> list[Variant]:
        """The variants that came close to the best in something."""
        good: set[Variant] = set()
        for name, by_variant in self.theirs.items():
            medians = {variant: median(values) for variant, values in by_variant.items()}
            if name == "tokens_per_s":
                good |= {v for v, rate in medians.items() if rate * _HOPELESS >= max(medians.values())}
            else:
                good |= {v for v, time in medians.items() if time <= _HOPELESS * min(medians.values())}
        return sorted(good)

    def medians(self) -> dict[str, Any]:
        """Everything in short."""
        theirs = {name: {str(v): values for v, values in by.items()} for name, by in self.theirs.items()}
        return {
            "same_tokens": f"{sum(self.same)} of {len(self.same)} streams",
            "ours": {name: round(median(values), 4) for name, values in self.ours.items()},
            "transformers": {
                name: {variant: round(median(values), 4) for variant, values in by_variant.items()}
                for name, by_variant in theirs.items()
            },
            "samples": _rounded({"ours": self.ours, "transformers": theirs}),
        }


def _rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _rounded(value) for name, value in data.items()}
    return [_rounded(item) for item in data] if isinstance(data, list) else round(data, 4)


def one_stream(client: Client, other: Peer, variant: Variant, prompt: Prompt, into: Samples) -> None:
    """Ours, then theirs, on the same prompt."""
    (ours,), _ = client.all_at_once([prompt])
    theirs = other.one(variant, prompt, NUM_OUT)
    into.same.append(ours.token_ids == theirs.token_ids)
    for name, mine, peers in (
        ("ttft_s", ours.ttft_s, theirs.arrivals[0]),
        ("itl_median_s", median(ours.gaps_s), median(theirs.gaps_s)),
        ("itl_mean_s", statistics.mean(ours.gaps_s), statistics.mean(theirs.gaps_s)),
    ):
        into.ours[name].append(mine)
        into.theirs[name][variant].append(peers)


def many_streams(client: Client, other: Peer, variant: Variant, batch: list[Prompt], into: Samples) -> None:
    """Ours, then theirs, on the same prompts."""
    ours, seconds = client.all_at_once(batch)
    theirs, peer_seconds = other.batch(variant, batch, NUM_OUT)
    into.same += [a.token_ids == b for a, b in zip(ours, theirs, strict=True)]
    into.ours["tokens_per_s"].append(len(batch) * NUM_OUT / seconds)
    into.ours["ttft_of_eight_s"].append(median([stream.ttft_s for stream in ours]))
    into.theirs["tokens_per_s"][variant].append(len(batch) * NUM_OUT / peer_seconds)


def rounds_of(client: Client, other: Peer, supply: Iterator[Prompt], count: int) -> Iterator[Samples]:
    """All samples so far, after each round: ours beside each variant of the peer that is in the race."""
    samples, ways = Samples(), variants(len(os.sched_getaffinity(0)))
    for variant in ways:
        one_stream(client, other, variant, next(supply), Samples())
    for number in range(count):
        say(f"round {number + 1} of {count}, peer with {'; '.join(map(str, ways))}")
        for variant in ways:
            one_stream(client, other, variant, next(supply), samples)
        for variant in ways:
            many_streams(client, other, variant, list(islice(supply, NUM_STREAMS)), samples)
        yield samples
        ways = samples.contenders()


def figures(samples: Samples) -> list[Figure]:
    """The figures with their goals, from medians."""
    ours: Mapping[str, list[float]] = samples.ours
    found = []
    for name, key in (
        (f"TTFT, 1 stream, {NUM_IN} tokens in", "ttft_s"),
        ("ITL, 1 stream, median", "itl_median_s"),
        ("ITL, 1 stream, mean (with the handoff)", "itl_mean_s"),
    ):
        goal = samples.best(key, min) * 1e3 * _PEER_LIMIT
        found.append(
            Figure(name, median(ours[key]) * 1e3, "ms", goal, basis=f"{_PEER_LIMIT} x transformers' generate")
        )
    peers = samples.best("tokens_per_s", max)
    name = f"output, {NUM_STREAMS} streams of {NUM_IN} in, {NUM_OUT} out"
    basis = f"{_BATCH_GAIN} x transformers' static batch"
    found.append(
        Figure(
            name, median(ours["tokens_per_s"]), "tokens/s", peers * _BATCH_GAIN, at_most=False, basis=basis
        )
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The served model beside transformers.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="[WHO:]KEY=VALUE")
    parser.add_argument("--topology", default="")
    parser.add_argument("--no-save", action="store_true", help="leave the last kept result as it is")
    args = parser.parse_args()
    end_on_sigterm()
    supply, busy = prompts(served_model(), NUM_IN), where()
    with six_processes(args.set, args.topology) as deployment, peer(text_model()) as other:
        client = Client(deployment.http_url, deployment.model, NUM_OUT)
        for samples in rounds_of(client, other, supply, args.rounds):
            found, medians = figures(samples), samples.medians()
            if not args.no_save:
                save(record("serving", busy, found, medians))
            say(table(found))
    medians.pop("samples")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
