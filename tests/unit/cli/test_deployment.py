"""A deployment is yielded when it is ready, and leaves nothing behind whatever happens."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.cli import deployment
from services.cli.deployment import NotReady, deployed
from services.cli.signals import Interrupted
from services.cli.state import AlreadyUp, StateDir, StateLost
from services.cli.supervisor import StartFailed, StopTimes
from services.cli.topology import LaunchOptions, ProcessSpec, PublicPorts, Topology
from shared.config.services import HttpConfig, ModelConfig, RouterConfig, ServerConfig
from shared.errors import ConfigError
from tests.unit.cli.helpers import PATIENCE_S, WITNESS, Script, script

TOPOLOGY = Topology(encoders=0, prefills=0, decodes=1, kv_stores=0)
#: A router that counts NUM decode workers and is healthy, as far as the launcher can see.
ROUTER = """
import http.server, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'# TYPE triptych_workers gauge\\ntriptych_workers{{kind="decode"}} {num}\\n'
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
for port in ({http}, {metrics}):
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever).start()
"""
FOREVER = "import signal; signal.pause()"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


@pytest.fixture
def options() -> LaunchOptions:
    probes = [socket.socket() for _ in range(3)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = PublicPorts(*(probe.getsockname()[1] for probe in probes))
    for probe in probes:
        probe.close()
    return LaunchOptions(model=ModelConfig(path=str(WITNESS), name="tiny"), ports=ports)


Planned = Callable[..., None]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, options: LaunchOptions) -> Planned:
    """Make the plan a fake router that counts ``num`` decode workers, and one worker of this source."""

    def use(num: int = 1, worker: str = FOREVER) -> None:
        ports = options.ports
        config = RouterConfig(
            model=options.model,
            http=HttpConfig(port=ports.http),
            server=ServerConfig(port=ports.grpc, metrics_port=ports.metrics),
        )
        source = ROUTER.format(num=num, http=ports.http, metrics=ports.metrics)
        specs: tuple[ProcessSpec, ...] = (
            Script("router", "router", config, source),
            script("decode-0", worker),
        )
        monkeypatch.setattr(deployment, "plan", lambda *_: specs)

    return use


def start(state: StateDir, options: LaunchOptions, **kwargs: Any) -> Any:
    return deployed(state, TOPOLOGY, options, stop_times=StopTimes(5.0, 5.0), **kwargs)


def test_what_is_ready_is_yielded_recorded_and_ended(
    state: StateDir, options: LaunchOptions, planned: Planned
) -> None:
    planned()
    with start(state, options) as running:
        assert set(running.pids()) == {"router", "decode-0"} and running.model == "tiny"
        record = state.deployed()
        assert record is not None and record.ready and record.http == running.http_url
        records = state.processes()
        with pytest.raises(AlreadyUp), start(StateDir(state.root), options):
            pytest.fail("two deployments in one directory")
    assert not any(process.alive for process in records) and state.deployed() is None


def test_a_death_while_starting_ends_the_rest(
    state: StateDir, options: LaunchOptions, planned: Planned
) -> None:
    planned(num=0, worker="raise SystemExit('no weights here')")
    with pytest.raises(StartFailed, match="no weights here"), start(state, options):
        pytest.fail("it was not ready")
    assert state.processes() == [] and not state.is_held()


def test_workers_that_never_come_are_named(state: StateDir, options: LaunchOptions, planned: Planned) -> None:
    planned(num=0)
    with pytest.raises(NotReady, match=r"decode \(0/1\)"), start(state, options, ready_timeout_s=1.0):
        pytest.fail("it was not ready")
    assert not state.is_held()


def test_starting_can_be_interrupted(state: StateDir, options: LaunchOptions, planned: Planned) -> None:
    planned(num=0)
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(Interrupted), start(state, options, stopping=stopping):
        pytest.fail("it was not ready")


def test_a_directory_that_is_taken_away_ends_what_was_started(
    state: StateDir, options: LaunchOptions, planned: Planned
) -> None:
    planned()
    stopping = threading.Event()
    with pytest.raises(StateLost, match="removed or replaced"), start(state, options, stopping=stopping):
        records = state.processes()
        shutil.rmtree(state.root)
        assert stopping.wait(PATIENCE_S), "nobody told those who wait for the end"
    assert len(records) == 2 and not any(process.alive for process in records)
    assert not state.root.exists(), "nothing is written where the directory was"


def test_a_taken_port_is_said_before_anything_starts(state: StateDir, options: LaunchOptions) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", options.ports.http))
        other.listen()
        with pytest.raises(ConfigError, match=f"--http-port {options.ports.http}"), start(state, options):
            pytest.fail("it started")
    assert state.processes() == []


def test_what_cannot_work_is_said_before_anything_starts(state: StateDir, options: LaunchOptions) -> None:
    """Equal ports, an unknown backend, memory for nothing, a model directory without sense."""
    nowhere = replace(options, model=ModelConfig(path=str(state.root)))
    equal = replace(options, ports=replace(options.ports, metrics=options.ports.http))
    for wrong, problem in (
        (equal, f"port {options.ports.http} is given to --http-port and --metrics-port"),
        (replace(options, overrides=("transfer.order=zzz",)), "transfer.order: expected one of"),
        (
            replace(options, overrides=("decode:kv.num_blocks=1",)),
            r"decode-0: kv.num_blocks=1 holds one block",
        ),
        (nowhere, r"config.json of the model directory cannot be read"),
    ):
        with pytest.raises(ConfigError, match=problem), start(state, wrong):
            pytest.fail("it started")
    assert state.processes() == [] and not list(state.configs.iterdir())


def test_a_shorter_context_is_said_at_the_start_and_kept_for_status(
    state: StateDir, options: LaunchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    stopping = threading.Event()
    records = []

    def warn(text: str) -> None:
        said.append(text)
        stopping.set()

    monkeypatch.setattr(state, "write_deployed", records.append)
    tight = replace(options, overrides=("decode:kv.num_blocks=5",))
    with pytest.raises(Interrupted), start(state, tight, warn=warn, stopping=stopping):
        pytest.fail("it was not ready")
    note = "kv.num_blocks=5 holds 64 tokens: served context 64 instead of 2048 (decode-0)"
    assert said == [f"warning: {note}"] and records[0].notes == (note,)
