"""Other processes for the tests of shared memory: each runs a piece of Python and answers line by line.

It knows how to start, ask and end a process; it must not know what a test asks it.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rankcast.wire.handles import Handle

SRC = Path(__file__).resolve().parents[2] / "src"

# A line with a handle opens it, and is answered by its number; a line with a number and an expression over `segment`
# is answered by the expression's value.
READER = """
import sys, msgspec, torch
from rankcast.transports.shm import open_handle
from rankcast.wire.handles import Handle
opened = []
bytes_of = lambda: segment.tensor("uint8", (segment.size,), 0)
for line in sys.stdin:
    if line.startswith("{"):
        opened.append(open_handle(msgspec.json.decode(line, type=Handle)))
        answer = len(opened) - 1
    else:
        number, expression = line.split(" ", 1)
        segment = opened[int(number)]
        answer = eval(expression)
    print(msgspec.json.encode(answer).decode(), flush=True)
"""


class Child:
    """One process; `ask` sends a line and returns the next one, within a bounded time."""

    def __init__(self, code: str, **options: object) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            **options,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> None:
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = 60.0) -> str:
        text, deadline = b"", time.monotonic() + seconds
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer in {seconds} s, so far {text!r}")
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EOFError(f"the process ended: {text!r} {self.process.stderr.read().decode()}")
            text += piece
        return text.decode().strip()

    def ask(self, line: str) -> object:
        self.tell(line)
        return msgspec.json.decode(self.hear())

    def end(self) -> int:
        """Close its input, wait for it to finish by itself, and return its exit status."""
        self.process.stdin.close()
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts processes that end with the test."""
    started: list[Child] = []

    def start(code: str, **options: object) -> Child:
        started.append(Child(code, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


class Reader:
    """A segment that another process has open."""

    def __init__(self, process: Child, handle: Handle) -> None:
        self._process = process
        self._number = process.ask(msgspec.json.encode(handle).decode())

    def ask(self, expression: str) -> object:
        return self._process.ask(f"{self._number} {expression}")


@pytest.fixture(scope="module")
def reading_process() -> Iterator[Child]:
    process = Child(READER)
    yield process
    process.kill()


@pytest.fixture
def reader(reading_process: Child) -> Callable[[Handle], Reader]:
    """Opens a handle in another process."""
    return lambda handle: Reader(reading_process, handle)
