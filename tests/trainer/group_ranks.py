"""Trainer ranks as real processes that do what a test tells them, one call at a time.

It knows what such a rank can be asked for; it must not know what a group ought to do. Run as a program it is one rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fleets import environment
from line_ranks import LineRanks, claim_stdout, serve


class Ranks(LineRanks):
    """``size`` processes in one torch process group; close with ``stop``."""

    def __init__(self, size: int, folder: Path, *, backend: str = "gloo") -> None:
        own = {"RANKCAST_TEST_STORE": str(folder / "store"), "RANKCAST_TEST_BACKEND": backend}
        super().__init__([sys.executable, __file__], size, {**environment(), **own})

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)


def running(size: int, folder: Path, *, backend: str = "gloo") -> Ranks:
    return Ranks(size, folder, backend=backend)


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

    replies = claim_stdout()
    store = f"file://{os.environ['RANKCAST_TEST_STORE']}"
    dist.init_process_group(os.environ["RANKCAST_TEST_BACKEND"], init_method=store, rank=rank, world_size=size)
    serve(_Rank(rank), replies, (RankcastError,))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
