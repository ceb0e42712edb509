"""SIGKILL at each named failpoint of each service, in real processes: every answer is still the oracle's.

A worker dies by its own hand at the n-th pass of the point, and stays dead; the others take its requests
over.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from services.cli.topology import Topology
from shared.failpoints import NAMES
from tests.chaos.cluster import running
from tests.chaos.ledger import check_rest
from tests.chaos.scenario import send_and_judge
from tests.chaos.workload import Workload

WHOLE = Topology(encoders=2, prefills=2, decodes=2, kv_stores=1)
PAIRS = Topology(encoders=1, prefills=2, decodes=2, kv_stores=0)
#: Who dies where, at which pass; one set is one deployment.
SETS = [
    (
        WHOLE,
        {
            "encoder-0": "encode.commit=kill:3",
            "prefill-0": "prefill.commit=kill:8",
            "decode-0": "xfer.after_k=kill:40",
            "kv-store-0": "store.before_publish=kill:20",
        },
    ),
    (PAIRS, {"prefill-0": "commit.after_checksum=kill:8", "decode-0": "xfer.before_verified=kill:8"}),
    (PAIRS, {"prefill-0": "free.before_release=kill:8", "decode-0": "decode.after_emit=kill:150"}),
]


def test_every_failpoint_has_its_kill() -> None:
    # Those of the disk tier are killed where it is tested alone.
    wanted = {name for name in NAMES if not name.startswith("tier.")}
    assert {arm.partition("=")[0] for _, arms in SETS for arm in arms.values()} == wanted


@pytest.mark.e2e
@pytest.mark.parametrize(("topology", "arms"), SETS, ids=["commits", "transfers", "ends"])
async def test_a_kill_at_a_failpoint_changes_no_answer(
    topology: Topology, arms: dict[str, str], tmp_path: Path
) -> None:
    workload = Workload(21, scale=0.7)
    overrides = [f"{name}:runtime.failpoints={arm}" for name, arm in arms.items()]
    async with running(tmp_path, topology, overrides, restart=False) as cluster:
        cases = [workload.case(number) for number in range(60)]
        violations = await send_and_judge(cluster, cases, per_second=40)
        rows = {row.name: row for row in cluster.supervisor.rows()}
        rests = await cluster.at_rest(8.0, without=arms)
        errors = cluster.logged_errors()
    assert violations == []
    dead = {name for name, row in rows.items() if row.exit_code == -signal.SIGKILL}
    assert dead == set(arms), "each dies at its own point, and nobody else"
    assert check_rest(rests) == []
    assert errors == []
