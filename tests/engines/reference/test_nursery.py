"""The process that forks workers: its children speak, end and are missed as processes of the server's own would be."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleets import wait_gone
from rankcast.engines.reference.nursery import Child, Nursery
from rankcast.engines.reference.processes import _environment
from rankcast.errors import NotServableError

SECONDS = 30.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery(_environment())
    yield nursery
    nursery.close()


def born(nursery: Nursery) -> tuple[Child, socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        return nursery.spawn(theirs), ours


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_child_is_a_process_of_its_own_with_no_descriptor_of_its_siblings(nursery: Nursery) -> None:
    children = [born(nursery) for _ in range(3)]
    assert len({child.pid for child, _ in children}) == 3
    assert {parent(child.pid) for child, _ in children} == {nursery.pid}
    # Were the first's socket open in a sibling, the first would not hear that it was closed here.
    for child, connection in children:
        with pytest.raises(TimeoutError, match=f"process {child.pid} has not ended within 0 s"):
            child.wait(0)
        connection.close()
        assert child.wait(SECONDS) == 0
        child.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_signal_that_ended_a_child_is_told_also_when_another_one_ended_before(
    nursery: Nursery, number: signal.Signals
) -> None:
    (first, other), (second, connection) = born(nursery), born(nursery)
    other.close()
    first.wait(SECONDS)
    os.kill(second.pid, number)
    assert second.wait(SECONDS) == -number
    assert second.wait(SECONDS) == -number
    second.kill()  # harmless now
    assert first.wait(0) == 0
    connection.close()
    first.close()
    second.close()
    second.close()


def test_without_their_nursery_children_live_on_and_end_with_their_connection() -> None:
    nursery = Nursery(_environment())
    child, connection = born(nursery)
    os.kill(nursery.pid, signal.SIGKILL)
    nursery._process.wait()
    with pytest.raises(TimeoutError):
        child.wait(0)
    with pytest.raises(NotServableError, match="no worker could be started"):
        born(nursery)
    connection.close()
    assert child.wait(SECONDS) is None
    child.close()
    nursery.close()
    assert wait_gone([child.pid]) == []


def test_a_nursery_leaves_no_process_and_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    nursery = Nursery(_environment())
    child, connection = born(nursery)
    connection.close()
    child.wait(SECONDS)
    child.close()
    nursery.close()
    nursery.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert wait_gone([child.pid, nursery.pid]) == []
