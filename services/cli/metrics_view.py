"""Reads one process's Prometheus page into numbers that can be asked for by name and labels."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Samples:
    """The samples of one page at one moment."""

    def __init__(self, text: str) -> None:
        self._values = {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 when there is none."""
        return self._values.get((name, frozenset(labels.items())), 0.0)

    def total(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for (found, _), value in self._values.items() if found == name)


def scrape(client: httpx.Client, address: str) -> Samples | None:
    """The page of the process at ``address``; None when it does not answer."""
    try:
        answer = client.get(f"http://{address}/metrics")
        return Samples(answer.text) if answer.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError):
        return None
