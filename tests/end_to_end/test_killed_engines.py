"""A worker or the server is killed, at every point of a push: the push fails by name, and the same sync goes on after.

One server on one port for the module: a test that kills it starts the next, which the sync must then find.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoints import scaled_weights
from end_to_end.conftest import CONFIG
from end_to_end.here import Trainer
from end_to_end.seen import answer, ask, differences, info, wait_until
from end_to_end.watched import Watched
from fleets import RunningServer, started_server, wait_gone
from oracle import Layout
from rankcast import PushError
from shared_memory import names

LAYOUT = Layout(tp=2)
OLD, NEW, LATER = (scaled_weights(CONFIG, seed) for seed in (0, 11, 12))


class Place:
    """A port on which a server of two workers runs, and can be started again after it died."""

    def __init__(self, checkpoint: Path, lasting: set[int]) -> None:
        self._checkpoint = checkpoint
        self._lasting = lasting
        self._running = contextlib.ExitStack()
        self._port = 0
        self.start()

    def start(self) -> None:
        self._running.close()
        self.server: RunningServer = self._running.enter_context(
            started_server(self._checkpoint, tp=2, port=self._port)
        )
        self._port = httpx.URL(self.server.url).port or 0
        self._lasting.add(self.server.pid)

    def close(self) -> None:
        self._running.close()


@pytest.fixture(scope="module")
def place(checkpoint: Path, lasting_processes: set[int]) -> Iterator[Place]:
    made = Place(checkpoint, lasting_processes)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(place: Place) -> Watched:
    return Watched(place.server.url, timeout=30)


@pytest.fixture(scope="module")
def trainer(client: Watched) -> Iterator[Trainer]:
    """One sync for all tests: it outlives every server."""
    with Trainer(client, OLD, timeout=30) as made:
        yield made


#: Just before which call the process dies, and whether some worker has written by then.
POINTS = {"before prepare": ("prepare", 0), "between prepare and install": ("install", 0), "within": ("install", 2)}
point = pytest.mark.parametrize("where", POINTS, ids=lambda name: str(name).replace(" ", "_"))


@pytest.fixture(autouse=True)
def nothing_left(place: Place, client: Watched) -> Iterator[None]:
    if place.server.process.poll() is not None:  # a test that failed half-way is not the next one's trouble
        place.start()
    before = names(orphans=False)
    yield
    client.moments.clear()
    assert names(orphans=False) <= before


def assert_the_same_sync_fills_the_next_server(place: Place, trainer: Trainer) -> None:
    place.start()
    assert differences(place.server.url, CONFIG, OLD, LAYOUT) == []
    trainer.push(LATER, "later")
    assert differences(place.server.url, CONFIG, LATER, LAYOUT) == []
    assert info(place.server.url)["weight_version"] == "later"
    assert set(answer(place.server.url)["weight_versions"]) == {"later"}


@point
def test_a_push_in_which_a_worker_is_killed_names_it_and_the_engine_refuses_to_generate(
    place: Place, client: Watched, trainer: Trainer, where: str
) -> None:
    server = place.server
    kind, nth = POINTS[where]
    client.at("before", kind, killed(server.workers[1:]), nth)
    with pytest.raises(PushError) as failure:
        trainer.push(NEW, "new")
    assert f"(pid {server.workers[1]}) is lost, it was killed by signal 9" in str(failure.value)
    assert "worker 1 of 2" in str(failure.value)
    refused = ask(server.url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_servable")
    # What is left of a model whose other half is gone is of no use to anybody.
    assert wait_gone(server.workers) == []
    with pytest.raises(PushError, match="worker 1 of 2"):
        trainer.push(NEW, "new")
    assert_the_same_sync_fills_the_next_server(place, trainer)


@point
def test_a_push_in_which_the_server_is_killed_names_it_and_leaves_no_process(
    place: Place, client: Watched, trainer: Trainer, where: str
) -> None:
    server = place.server
    kind, nth = POINTS[where]
    client.at("before", kind, killed([server.pid]), nth)
    with pytest.raises(PushError) as failure:
        trainer.push(NEW, "new")
    assert server.url in str(failure.value)
    assert "not reached: worker 0 of 2" in str(failure.value)
    assert wait_gone(server.workers) == []
    with pytest.raises(PushError, match="cannot be reached"):
        trainer.push(NEW, "new")
    assert_the_same_sync_fills_the_next_server(place, trainer)


def test_a_server_that_is_killed_in_the_middle_of_an_install_fails_the_push_by_name(
    place: Place, client: Watched, trainer: Trainer
) -> None:
    server = place.server
    reports = trainer.sync._leading._fleet._channel

    def when_one_worker_has_installed() -> None:
        # Its stopped peer holds the server's answer up meanwhile.
        wait_until(lambda: (last := reports.latest(server.engine_id, 0)) is not None and last.call == "install")
        killed([server.pid, server.workers[1]])()

    killer = threading.Thread(target=when_one_worker_has_installed)

    def begin() -> None:
        os.kill(server.workers[1], signal.SIGSTOP)
        killer.start()

    client.at("before", "install", begin)
    with pytest.raises(PushError, match="the connection broke"):
        trainer.push(NEW, "new")
    killer.join()
    assert wait_gone(server.workers) == []
    assert_the_same_sync_fills_the_next_server(place, trainer)


def killed(pids: Any) -> Callable[[], object]:
    """Kills processes and returns when they are gone."""

    def act() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert wait_gone(pids) == []

    return act
