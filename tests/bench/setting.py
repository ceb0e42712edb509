"""What the parts of the bench share: the models, and the deployment of six processes that they measure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.cli import procfs
from services.cli.deployment import Deployment, deployed
from services.cli.modeldir import DEMO_MODEL, resolve_model
from services.cli.state import StateDir
from services.cli.topology import HOST, LaunchOptions, PublicPorts, Topology
from shared.clock import SystemEntropy
from shared.config.services import ModelConfig
from tests.bench.figures import ROOT
from tests.provenance import where_and_when

#: Where built models are; the bench's own state lies beside them.
STATE = StateDir(ROOT / ".triptych")
BENCH_STATE = ROOT / ".triptych" / "bench"


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def end_on_sigterm() -> None:
    """SIGTERM becomes KeyboardInterrupt, so that whatever was started is stopped. Main thread only."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def served_model() -> Path:
    """The demo model's directory; built when missing."""
    STATE.prepare()
    return resolve_model(DEMO_MODEL, STATE, say)


def text_model() -> Path:
    """The language model alone, for the peer; built when missing."""
    target = STATE.models / "smollm2-135m"
    command = [sys.executable, "-m", "models.build", str(target), "--text-only"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return target


def free_ports() -> PublicPorts:
    """Public ports that nobody uses."""
    ports = procfs.internal_ports(HOST, SystemEntropy())
    return PublicPorts(next(ports), next(ports), next(ports))


@contextmanager
def six_processes(overrides: Sequence[str] = (), topology: str = "") -> Iterator[Deployment]:
    """The demo's deployment with the demo model, on free ports; stopped at exit."""
    options = LaunchOptions(
        model=ModelConfig(str(served_model()), cache_dir=str(STATE.cache)),
        ports=free_ports(),
        overrides=("router:routing.placement=apart", *overrides),
        num_cores=len(os.sched_getaffinity(0)),
    )
    with deployed(StateDir(BENCH_STATE), Topology.parse(topology), options, progress=say) as deployment:
        yield deployment


def where() -> dict[str, Any]:
    """Date, commit, machine, and how busy the machine is: over 1, 5 and 15 minutes."""
    return {**where_and_when(), "load_average": [round(load, 2) for load in os.getloadavg()]}
