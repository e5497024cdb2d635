"""Several trainer ranks in the test's own process, a thread each, joined by real links over loopback.

It knows how ranks are joined without a process group. It must not know what they push.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import rankcast
from rankcast.trainer.group import SingleGroup, StarGroup, TrainerGroup
from rankcast.trainer.group_link import Link, this_peer

SECONDS = 60.0


def joined(size: int) -> list[TrainerGroup]:
    """A trainer group of ``size`` ranks, as each of them sees it."""
    if size == 1:
        return [SingleGroup()]
    peers = [this_peer(rank) for rank in range(size)]
    lead: dict[int, Link] = {}
    follow: dict[int, Link] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rank in range(1, size):
            follow[rank] = Link(socket.create_connection(server.getsockname()), SECONDS)
            lead[rank] = Link(server.accept()[0], SECONDS)
    first = StarGroup(0, lead, peers, timeout=SECONDS)
    return [first, *(StarGroup(rank, {0: follow[rank]}, peers, timeout=SECONDS) for rank in range(1, size))]


class Ranks:
    """The syncs of all ranks of one trainer."""

    def __init__(self, target: Any, sources: Sequence[Any], **options: Any) -> None:
        self._pool = ThreadPoolExecutor(len(sources))
        groups = joined(len(sources))
        given: dict[str, Any] = {"timeout": SECONDS, **options}
        # What a process group would be turned into is there already.
        with mock.patch("rankcast.trainer.connect.form_group", lambda group, *, timeout: group):
            self.syncs = self.all(
                lambda rank: rankcast.connect(target, sources[rank], group=groups[rank], **given), len(sources)
            )

    def all(self, call: Callable[[int], Any], count: int = 0) -> list[Any]:
        """Every rank makes ``call`` at the same time; what came of it in rank order, or the first rank's error."""
        futures = [self._pool.submit(call, rank) for rank in range(count or len(self.syncs))]
        outcomes = [future.exception(4 * SECONDS) for future in futures]
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        return [future.result() for future in futures]

    def push(self, version: str) -> list[rankcast.PushReport]:
        return self.all(lambda rank: self.syncs[rank].push(version))

    def close(self) -> None:
        self.all(lambda rank: self.syncs[rank].close())
        self._pool.shutdown()


@contextmanager
def ranks(target: Any, sources: Sequence[Any], **options: Any) -> Iterator[Ranks]:
    made = Ranks(target, sources, **options)
    try:
        yield made
    finally:
        made.close()
