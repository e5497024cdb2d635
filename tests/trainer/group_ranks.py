"""Trainer ranks as real processes that do what a test tells them, one call at a time.

It knows how to start, ask, stop and kill ranks; it must not know what a group ought to do. Run as a program it is one
rank: it reads a JSON request a line and answers each with a JSON line.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"


class Ranks:
    """``size`` processes in one torch process group; close with ``stop``."""

    def __init__(self, size: int, folder: Path, *, backend: str = "gloo") -> None:
        self.size = size
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANKCAST_TEST_STORE": str(folder / "store"),
            "RANKCAST_TEST_BACKEND": backend,
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(size)
        ]
        self._unread = [b""] * size

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def ask(self, rank: int, call: str, *arguments: Any) -> None:
        """Let ``rank`` make ``call``; ``answer`` has what came of it."""
        pipe = self.processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps([call, *arguments]).encode() + b"\n")
        pipe.flush()

    def answer(self, rank: int, seconds: float = 60.0) -> Any:
        """The next answer of ``rank``; fails the test when none comes in time. ``{"error": ...}`` when it raised."""
        pipe = self.processes[rank].stdout
        assert pipe is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread[rank]:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise AssertionError(f"rank {rank} has not answered within {seconds} s")
            more = os.read(pipe.fileno(), 1 << 20)
            assert more, f"rank {rank} ended with {self.processes[rank].wait()}"
            self._unread[rank] += more
        line, self._unread[rank] = self._unread[rank].split(b"\n", 1)
        return json.loads(line)

    def all(self, call: str, *arguments: Any, seconds: float = 60.0) -> list[Any]:
        """Every rank makes ``call`` at the same time; their answers in rank order."""
        for rank in range(self.size):
            self.ask(rank, call, *arguments)
        return [self.answer(rank, seconds) for rank in range(self.size)]

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()  # also one that is stopped
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


@contextlib.contextmanager
def running(size: int, folder: Path, *, backend: str = "gloo") -> Iterator[Ranks]:
    ranks = Ranks(size, folder, backend=backend)
    try:
        yield ranks
    finally:
        ranks.stop()


class _Rank:
    """What a rank can be asked for: the group's own calls, and a few about itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.group: Any = None

    def form(self, timeout: float, members: list[int] | None = None) -> list[int]:
        import torch.distributed as dist

        from rankcast.trainer.group import form_group

        within = None if members is None else dist.new_group(members)
        if members is not None and self.rank not in members:
            return []
        self.group = form_group(within, timeout=timeout)
        return [self.group.rank, self.group.size]

    def form_local(self, timeout: float, members: list[int]) -> list[int]:
        """As ``form``, over a group that only its members make."""
        import torch.distributed as dist

        from rankcast.trainer.group import form_group

        if self.rank not in members:
            return []
        self.group = form_group(dist.new_group(members, use_local_synchronization=True), timeout=timeout)
        return [self.group.rank, self.group.size]

    def begin(self) -> None:
        self.group.begin()

    def gather(self, data: str, what: str) -> list[str]:
        return [one.decode() for one in self.group.gather(data.encode(), what)]

    def broadcast(self, data: str, what: str) -> str:
        return str(self.group.broadcast(data.encode(), what).decode())

    def exchange(self, data: str, what: str) -> list[str]:
        return [one.decode() for one in self.group.exchange(data.encode(), what)]

    def exchange_large(self, count: int) -> bool:
        """Whether every rank has every rank's ``count`` bytes, which differ."""
        mine = bytes([self.group.rank + 1]) * count
        shared = self.group.exchange(mine, "a lot")
        return bool(shared == [bytes([rank + 1]) * count for rank in range(self.group.size)])

    def check(self) -> None:
        self.group.check()

    def fail(self, text: str) -> None:
        self.group.fail(ValueError(text))

    def pulse_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.group.pulse()
            time.sleep(0.02)

    def fork(self) -> int:
        """A child that holds copies of all descriptors and lives until its parent's standard input ends."""
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                signal.pause()
            os._exit(0)
        return child

    def cycles(self, count: int) -> list[list[int]]:
        """Descriptors and threads after each of ``count`` groups that were formed, used and closed."""
        import threading

        from rankcast.trainer.group import form_group

        counts = []
        for _ in range(count):
            group = form_group(timeout=60.0)
            group.begin()
            group.exchange(b"x", "x")
            group.close()
            counts.append([len(os.listdir("/proc/self/fd")), threading.active_count()])
        return counts

    def close(self) -> None:
        self.group.close()


def _main(rank: int, size: int) -> None:
    import torch.distributed as dist

    from rankcast.errors import RankcastError

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not look like an answer
    store = f"file://{os.environ['RANKCAST_TEST_STORE']}"
    dist.init_process_group(os.environ["RANKCAST_TEST_BACKEND"], init_method=store, rank=rank, world_size=size)
    own = _Rank(rank)
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        try:
            answer = getattr(own, call)(*arguments)
        except RankcastError as error:
            answer = {"error": type(error).__name__, "text": error.message}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
