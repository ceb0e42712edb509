"""Metrics are named by one scheme, and are served where they should be."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from shared.errors import ConfigError
from shared.telemetry import metrics
from shared.telemetry.http import MetricsServer


def test_own_metrics_share_a_prefix_and_say_what_they_are() -> None:
    families = [f for f in metrics.REGISTRY.collect() if not f.name.startswith(("process_", "python_"))]
    assert len(families) > 30
    for family in families:
        assert family.name.startswith("triptych_"), family.name
        assert family.documentation, family.name
        if family.type == "histogram" and family.name != "triptych_step_tokens":
            assert family.name.endswith("_seconds"), family.name


class Health:
    ok = True

    def __call__(self) -> bool:
        return self.ok


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def port(health: Health, registry: CollectorRegistry) -> Iterator[int]:
    server = MetricsServer(healthy=health, registry=registry)
    yield server.start()
    server.close()
    server.close()


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body


def test_metrics_are_served_as_prometheus_text(port: int, registry: CollectorRegistry) -> None:
    Counter("triptych_example", "An example", ["kind"], registry=registry).labels('a"b').inc(3)
    status, body = get(port, "/metrics?x=1")
    assert status == 200
    samples = [s for family in text_string_to_metric_families(body) for s in family.samples]
    assert ("triptych_example_total", {"kind": 'a"b'}, 3.0) in [(s.name, s.labels, s.value) for s in samples]


def test_health_follows_its_owner(port: int, health: Health) -> None:
    assert get(port, "/healthz") == (200, "ok\n")
    health.ok = False
    assert get(port, "/healthz") == (503, "unavailable\n")


@pytest.mark.parametrize(("path", "method", "status"), [("/", "GET", 404), ("/metrics", "DELETE", 501)])
def test_nothing_else_is_there(port: int, path: str, method: str, status: int) -> None:
    assert get(port, path, method)[0] == status


def test_a_silent_client_does_not_keep_others_waiting(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        assert get(port, "/healthz")[0] == 200


def test_a_taken_port_is_a_config_error(port: int) -> None:
    with pytest.raises(ConfigError):
        MetricsServer(port=port).start()


def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    server = MetricsServer(registry=CollectorRegistry())
    server.start()
    assert threading.active_count() == before + 1
    server.close()
    assert threading.active_count() == before
