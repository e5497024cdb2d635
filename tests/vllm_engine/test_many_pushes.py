"""Twenty pushes in a row under load: no request fails, and nothing grows in the server's processes or the trainer."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest

import rankcast
from end_to_end.seen import wait_until
from shared_memory import names
from vllm_engine.conftest import Bench
from vllm_engine.servers import PROMPTS, VllmServer
from vllm_engine.test_direct import Policy
from vllm_engine.test_servers import push

pytestmark = pytest.mark.vllm

PUSHES = 20
#: What the requests that are running begin with, and how much each decodes.
BEGINNINGS, TOKENS = PROMPTS[:2], 40
#: What a process may grow in all, and in that quarter of the pushes in which it grows least. A checkpoint of these has
#: 1221 KiB: were a twentieth of it to stay mapped at each push, every quarter would add 305, or 152 in each of two
#: workers. Measured on two busy cores, at one worker three times, else once: what allocators take is at most 808; what
#: comes with every push and the requests beside it is at most 60 in the least quarter. A worker's heap has some 40 MiB
#: that are free and resident, so that small pieces of it which leak are not seen here.
SLACK_KIB, STEADY_KIB = 2 * 1024, 128

#: A push of B at even turns, of A at odd ones.
Push = Callable[[int], rankcast.PushReport]


@contextmanager
def a_connection_for_each(bench: Bench) -> Iterator[Push]:
    """Everything is staged, and everything is let go of after each push."""
    yield lambda turn: push(bench, (bench.b, bench.a)[turn % 2], bucket_bytes=200_000)


@contextmanager
def one_connection_for_all(bench: Bench) -> Iterator[Push]:
    """As a trainer does it: the workers copy out of its module's own memory, which changes between the pushes."""
    policy = Policy("moe")
    with rankcast.connect(bench.server.url, policy, mode="auto", timeout=60) as sync:

        def pushed(turn: int) -> rankcast.PushReport:
            policy.become("ba"[turn % 2])
            return sync.push(weight_version=str(turn))

        yield pushed


def memory(pids: list[int]) -> dict[int, int]:
    """KiB of memory of its own that each process holds."""
    found = {}
    for pid in pids:
        rows = (Path("/proc") / str(pid) / "status").read_text().splitlines()
        found[pid] = sum(int(row.split()[1]) for row in rows if row.startswith(("RssAnon:", "RssShmem:")))
    return found


def opened(pids: list[int]) -> dict[int, Counter[str]]:
    """How many descriptors of each kind each process has, and how many mappings of shared memory."""
    found = {}
    for pid in pids:
        kinds: Counter[str] = Counter()
        folder = Path("/proc") / str(pid) / "fd"
        for descriptor in os.listdir(folder):
            try:
                target = os.readlink(folder / descriptor)
            except OSError:
                continue
            kinds[target.split(":")[0] if ":" in target else target.split("/")[1]] += 1
        maps = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
        kinds["mapped segments"] = sum("memfd:" in row or "rankcast" in row for row in maps)
        found[pid] = kinds
    return found


class Asking:
    """A thread that asks one thing after the other until it is told to stop."""

    def __init__(self, server: VllmServer) -> None:
        self.answered = 0
        self.failures: list[BaseException] = []
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._server.generate(BEGINNINGS[self.answered % len(BEGINNINGS)], TOKENS)
            except BaseException as failure:
                self.failures.append(failure)
                return
            self.answered += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)


@pytest.fixture(scope="session")
def warm(bench: Bench) -> Bench:
    """A server that has taken every number of tokens at once that may come to it here.

    On some machines vLLM keeps a compiled matrix product for each of them, and what is in flight at a push is taken
    again as a whole: all that two requests can come to, before anything counts.
    """
    for tokens in range(1, 2 * (max(map(len, BEGINNINGS)) + TOKENS) + 1):
        bench.server.generate([1 + token % 50 for token in range(tokens)], 1)
    return bench


@pytest.mark.parametrize("pushing", [a_connection_for_each, one_connection_for_all], ids=lambda made: made.__name__)
def test_twenty_pushes_under_load_leave_nothing_behind(
    warm: Bench, pushing: Callable[[Bench], AbstractContextManager[Push]]
) -> None:
    server = warm.server
    before = names(orphans=False)
    with pushing(warm) as pushed:
        with Asking(server) as first, Asking(server) as second:
            for turn in range(4):  # until allocators and connections have what they keep
                pushed(turn)
        assert first.failures == second.failures == []
        server.probe()
        everyone = [*server.pids(), os.getpid()]
        had, named = opened(everyone), names(orphans=False)
        with Asking(server) as first, Asking(server) as second:
            reports, held = [], [memory(everyone)]
            for turn in range(PUSHES):
                reports.append(pushed(turn))
                if turn % (PUSHES // 4) == PUSHES // 4 - 1:
                    held.append(memory(everyone))
        assert first.failures == second.failures == []
        assert min(first.answered, second.answered) > 2
        assert server.digests() == warm.at_a.digests
        assert server.probe() == warm.at_a.said
        grown = {pid: [now[pid] - then[pid] for then, now in pairwise(held)] for pid in everyone}
        assert all(sum(quarters) < SLACK_KIB for quarters in grown.values()), grown
        assert all(min(quarters) < STEADY_KIB for quarters in grown.values()), grown
        # A connection that nobody uses is closed by the server some seconds later.
        wait_until(lambda: all(now <= had[pid] for pid, now in opened(everyone).items()))
        assert names(orphans=False) <= named
        for report in reports:
            if pushing is one_connection_for_all:
                assert report.direct_tensors == report.tensors
            else:
                assert report.rounds > 3
    assert names(orphans=False) <= before
