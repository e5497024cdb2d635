"""Embedded fleets for tests: real server processes, started on a free port and ended with everything they started.

It knows how a server is started, waited for and ended. It must not know what a test asks of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
START_SECONDS = 120.0
END_SECONDS = 20.0
_SCRIPT = """
import json, sys
from rankcast.cli.reference_server import reference_server
reference_server(**json.loads(sys.argv[1]))
"""


@dataclass(frozen=True)
class RunningServer:
    """A server process that answers at ``url``; ``workers`` are its workers' pids, by rank."""

    url: str
    engine_id: str
    pid: int
    workers: tuple[int, ...]
    process: subprocess.Popen[str]


@contextlib.contextmanager
def running_server(checkpoint: str | Path, **layout: Any) -> Iterator[str]:
    """The URL of a server of its own, with ``tp``, ``pp``, ``dp``, ``expert_parallel`` and ``secret`` as given."""
    with started_server(checkpoint, **layout) as server:
        yield server.url


@contextlib.contextmanager
def started_server(
    checkpoint: str | Path,
    *,
    secret: str | None = None,
    host: str = "127.0.0.1",
    within: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    **layout: Any,
) -> Iterator[RunningServer]:
    """Like ``running_server``, with all there is to know; the process is ended, and its workers with it, on leaving.

    ``within`` is a command that runs the server's, ``variables`` are added to its environment.

    Raises RuntimeError, with what the server said, when it does not come up.
    """
    options = {"checkpoint": str(checkpoint), "port": 0, "host": host, "json": True, **layout}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*within, sys.executable, "-c", _SCRIPT, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**environment(secret), **(variables or {})},
        )
        try:
            facts = json.loads(_first_line(process, said))
            yield RunningServer(facts["url"], facts["engine_id"], facts["pid"], tuple(facts["workers"]), process)
        finally:
            _end(process)


def environment(secret: str | None = None) -> dict[str, str]:
    """What a child process of a test gets: this checkout, one thread, and ``secret`` if any."""
    child = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE.parent / "tests")])}
    child["OMP_NUM_THREADS"] = "1"
    for name in ("RANKCAST_SECRET", "RANKCAST_SECRET_FILE"):
        child.pop(name, None)
    if secret is not None:
        child["RANKCAST_SECRET"] = secret
    return child


def wait_gone(pids: list[int] | tuple[int, ...], seconds: float = END_SECONDS) -> list[int]:
    """Those of ``pids`` that still run when ``seconds`` have passed; returns as soon as there are none."""
    deadline = time.monotonic() + seconds
    left = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            left.append(pid)
        os.close(descriptor)
    return left


def _first_line(process: subprocess.Popen[str], said: Any) -> str:
    assert process.stdout is not None
    select.select([process.stdout], [], [], START_SECONDS)
    line = process.stdout.readline() if process.poll() is None or select.select([process.stdout], [], [], 0)[0] else ""
    if not line:
        _end(process)
        said.seek(0)
        raise RuntimeError(f"the server did not come up (exit {process.returncode}):\n{said.read()}")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
