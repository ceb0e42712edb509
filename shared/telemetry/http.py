"""Serves ``/metrics`` and ``/healthz`` on a port of their own, from one background thread.

Owns the HTTP side only: what is healthy is the caller's word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shared.errors import ConfigError
from shared.telemetry.metrics import REGISTRY

_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """``start`` binds and returns the port; ``close`` stops the thread. Both may be called once."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        healthy: Callable[[], bool] = lambda: True,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """``healthy`` is called from the server's threads and must not block."""
        self._address = (host, port)
        self._healthy = healthy
        self._registry = registry
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Raises ConfigError when the port is taken."""
        try:
            self._server = _Server(self._address, self._handler())
        except OSError as error:
            raise ConfigError(
                f"cannot listen for metrics on port {self._address[1]}: {error.strerror}"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True
        )
        self._thread.start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving. Calling it twice is safe."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        healthy, registry = self._healthy, self._registry

        class Handler(BaseHTTPRequestHandler):
            timeout = 5  # a client that says nothing does not keep a thread
            server_version = "triptych"
            sys_version = ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif path == "/healthz":
                    ok = healthy()
                    self._answer(200 if ok else 503, _TEXT, b"ok\n" if ok else b"unavailable\n")
                else:
                    self._answer(404, _TEXT, b"not found\n")

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not worth a log line."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32
