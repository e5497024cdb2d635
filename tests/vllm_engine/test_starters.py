"""Whoever starts a server may be killed at any moment, also before the server is up: nothing of the server is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fleets import wait_gone
from vllm_engine.conftest import Checkpoints
from vllm_engine.servers import _session, environment_of

pytestmark = pytest.mark.vllm

STARTER = """
import sys
from pathlib import Path
from vllm_engine.servers import started_server
with started_server(Path(sys.argv[1])):
    print("up before it was killed", flush=True)
"""
START_SECONDS = 300.0


def test_a_server_whose_starter_is_killed_while_it_comes_up_leaves_no_process(checkpoints: Checkpoints) -> None:
    with tempfile.TemporaryDirectory(prefix="vt-") as room:
        starter = subprocess.Popen(
            [sys.executable, "-c", STARTER, str(checkpoints("llama", "a"))],
            stdout=subprocess.PIPE,
            env={**os.environ, **environment_of(), "TMPDIR": room},
        )
        assert starter.stdout is not None
        with starter.stdout:
            try:
                # Its engine core is a process of its own, and has just begun.
                deadline = time.monotonic() + START_SECONDS
                while len(processes := server_of(starter.pid)) < 3:
                    assert starter.poll() is None
                    assert time.monotonic() < deadline, "the server has started no engine core"
                    time.sleep(0.05)
            finally:
                starter.kill()
                starter.wait()
            assert starter.stdout.read() == b""
        assert wait_gone(processes) == []
        assert [pid for pid in pids() if _session(pid) == processes[0]] == []


def pids() -> list[int]:
    return sorted(map(int, filter(str.isdigit, os.listdir("/proc"))))


def server_of(starter: int) -> list[int]:
    """All processes of the server that ``starter`` has started, its first one first; none while there is no server."""
    for pid in pids():
        if _session(pid) == pid and parent_of(pid) == starter:
            return [pid, *(other for other in pids() if other != pid and _session(other) == pid)]
    return []


def parent_of(pid: int) -> int:
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
