"""Entry point that the encoder, prefill and decode services share."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared.config.load import config_from_args
from shared.config.services import WorkerConfig
from shared.engine.host import run_worker
from shared.errors import ConfigError


def main(kind: str, argv: Sequence[str]) -> int:
    """Run a worker of this kind until told to stop. Returns the exit status: 2 for a configuration
    that cannot work (what is wrong goes to stderr)."""
    try:
        config = config_from_args(WorkerConfig, argv)
        if config.kind != kind:
            raise ConfigError(f"kind is {config.kind!r}, but this is the {kind} service")
        return run_worker(config)
    except ConfigError as error:
        print(f"triptych {kind}: {error.message}", file=sys.stderr)
        return 2
