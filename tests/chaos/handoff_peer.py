"""A transfer peer of the contract tests at a port that is told: PORT INCARNATION EPOCH, then commands."""

from __future__ import annotations

import json
import sys

from tests.contract.transfer.peer import MARK, PeerState


class FixedPeer(PeerState):
    """See the module."""

    def __init__(self, port: int, incarnation: str, epoch: int) -> None:
        self._backend = "tcp"
        self.heard = []
        self._begin(incarnation, epoch, port)


def main() -> None:
    """Answer commands until stdin ends."""
    state = FixedPeer(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    print(MARK + json.dumps(state.info()), flush=True)
    for line in sys.stdin:
        name, *args = line.split()
        print(MARK + json.dumps(getattr(state, name)(*map(int, args))), flush=True)
    state.end()


if __name__ == "__main__":
    main()
