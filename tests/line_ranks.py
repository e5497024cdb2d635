"""Processes that do as they are told, one line of JSON a call: both ends of their pipes.

It knows how such processes are started, asked, waited for and ended. It must not know what they are asked for, and it
imports nothing of rankcast: the tests' trainer ranks and the bench's are made of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, TextIO

#: How long a rank may take for one call that nothing is wrong with.
ANSWER_SECONDS = 60.0


class LineRanks:
    """``size`` processes, each made by ``command`` with its rank and ``size`` behind; a context that ends them."""

    def __init__(self, command: Sequence[str], size: int, environment: Mapping[str, str]) -> None:
        self.size = size
        environment = {**environment, "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = [self._start([*command, str(rank), str(size)], environment) for rank in range(size)]
        self._unread = [b""] * size

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def ask(self, rank: int, call: str, *arguments: Any) -> None:
        """Let ``rank`` make ``call``; ``answer`` has what came of it."""
        pipe = self.processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps([call, *arguments]).encode() + b"\n")
        pipe.flush()

    def answer(self, rank: int, seconds: float = ANSWER_SECONDS) -> Any:
        """The next answer of ``rank``, ``{"error": ...}`` when it raised; AssertionError when none comes in time."""
        pipe = self.processes[rank].stdout
        assert pipe is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread[rank]:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise AssertionError(f"trainer rank {rank} has not answered within {seconds} s")
            more = os.read(pipe.fileno(), 1 << 20)
            assert more, f"trainer rank {rank} ended with {self.processes[rank].wait()}"
            self._unread[rank] += more
        line, self._unread[rank] = self._unread[rank].split(b"\n", 1)
        return json.loads(line)

    def all(self, call: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """Every rank makes ``call`` at the same time; their answers in rank order."""
        for rank in range(self.size):
            self.ask(rank, call, *arguments)
        return [self.answer(rank, seconds) for rank in range(self.size)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()  # also one that is stopped
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ObedientRanks(LineRanks):
    """Ranks none of which may raise, and that may take ``seconds`` for one call."""

    seconds = ANSWER_SECONDS

    def all(self, call: str, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """Every rank makes ``call`` at the same time; their answers in rank order. AssertionError when one raised."""
        answers = super().all(call, *arguments, seconds=seconds or self.seconds)
        failed = [f"{said['error']}: {said['text']}" for said in answers if isinstance(said, dict) and "error" in said]
        assert not failed, f"{call}: {'; '.join(failed)}"
        return answers


def claim_stdout() -> TextIO:
    """In such a process, before anything else: where answers go. What others print must not look like one."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def serve(own: object, replies: TextIO, caught: tuple[type[Exception], ...] = (Exception,)) -> None:
    """Let ``own`` make every call on standard input until that ends; only errors that are ``caught`` are answers."""
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        try:
            answer = getattr(own, call)(*arguments)
        except caught as error:
            answer = {"error": type(error).__name__, "text": str(error), "faults": getattr(error, "faults", ())}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
