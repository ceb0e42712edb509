"""Where a deployment listens as far as users see it: host and default ports. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError

HOST = "127.0.0.1"


@dataclass(frozen=True)
class PublicPorts:
    """The ports a user sees: OpenAI over HTTP, gRPC, and the router's metrics."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def check(self) -> None:
        """Raises ConfigError unless each has a port of its own."""
        flags = {"--http-port": self.http, "--grpc-port": self.grpc, "--metrics-port": self.metrics}
        for port in flags.values():
            equal = [flag for flag in flags if flags[flag] == port]
            if len(equal) > 1:
                raise ConfigError(f"port {port} is given to {' and '.join(equal)}; each needs its own")
