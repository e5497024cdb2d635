"""Two engines in the test's own process with one log of what both are asked, and trainers that die when a test says so.

It knows how they are put together. It must not know what a test expects of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

import rankcast
from checkpoints import tiny_config
from fleets_inprocess import Fleet, WatchedClient
from oracle import unique_weights
from rankcast.engines.reference.layout import Layout
from rankcast.process import ProcessIdentity, host_id, pid_namespace, start_time
from rankcast.trainer import connect as connecting
from rankcast.wire.bodies import Owner

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=16, num_experts=4)
OLD, NEW, NEXT = (unique_weights(CONFIG, step) for step in (1, 2, 3))
LAYOUT = Layout(tp=2)

Log = list[tuple[str, str]]


def connect(target: Any, source: Any, **options: Any) -> rankcast.Sync:
    return rankcast.connect(target, source, **{"timeout": 20, "bucket_bytes": 8192, **options})


class Two:
    """Two engines with one log of what both are asked."""

    def __init__(self, installer: Any = None, *, client: type[WatchedClient] = WatchedClient) -> None:
        self.log: Log = []
        self.fleets = [Fleet(CONFIG, LAYOUT, installer=installer) for _ in range(2)]
        self.clients = [
            client(fleet.receivers, name=f"engine {index}", log=self.log) for index, fleet in enumerate(self.fleets)
        ]
        for fleet in self.fleets:
            fleet.load(OLD)

    def close(self) -> None:
        for fleet in self.fleets:
            fleet.close()

    def differences(self, weights: Any) -> list[str]:
        return [line for fleet in self.fleets for line in fleet.differences(weights)]

    def places(self, call: str) -> list[int]:
        return [at for at, (_, what) in enumerate(self.log) if what == call]


class Mortal:
    """A process that a trainer may say it is, and that a test kills when that trainer is to be dead."""

    def __init__(self) -> None:
        self._child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started = start_time(self._child.pid)
        assert started is not None
        self.identity = ProcessIdentity(host_id(), pid_namespace(), self._child.pid, started)

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate()


def connect_as(mortal: Mortal, patch: pytest.MonkeyPatch, target: Any, source: Any) -> rankcast.Sync:
    """A sync of a trainer that dies with ``mortal``."""
    with patch.context() as within:
        within.setattr(connecting, "_owner", lambda: Owner("d" * 32, mortal.identity, "the trainer that died"))
        return connect(target, source, timeout=300)


def silence(clients: Iterable[WatchedClient], *calls: str) -> None:
    """From now on ``calls`` do not reach the engines, nor does anything that a trainer says when it gives up."""
    for client in clients:
        client.fail = dict.fromkeys([*calls, "abort", "resume", "release"], ConnectionError("killed"))
