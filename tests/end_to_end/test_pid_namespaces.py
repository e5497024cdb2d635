"""A fleet in a pid namespace of its own: segments go by name, and no name stays."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from checkpoints import scaled_weights
from end_to_end.conftest import CONFIG, Start
from end_to_end.here import Trainer, push
from end_to_end.seen import answer, differences, info
from end_to_end.watched import Watched
from fleets import RunningServer, started_server
from oracle import Layout
from rankcast import PushError
from shared_memory import names

LAYOUT = Layout(tp=2)
OLD, NEW, LATER = (scaled_weights(CONFIG, seed) for seed in (0, 11, 12))
#: The server is the first process of its namespace; when this command ends, the kernel ends all of it.
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGTERM")


@pytest.fixture(scope="module")
def apart(checkpoint: Path) -> Iterator[RunningServer]:
    try:
        tried = subprocess.run([*APART, "true"], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed: no pid namespace can be made")
    if tried.returncode:
        pytest.skip(f"this machine lets nobody make a pid namespace here: {tried.stderr.strip()}")
    with started_server(checkpoint, tp=2, within=APART) as server:
        assert server.pid == 1
        yield server
        ended(server)


def test_segments_go_by_name_and_the_names_are_gone_before_the_first_install(apart: RunningServer) -> None:
    before = names()
    seen: dict[str, set[str]] = {}
    with Watched(apart.url) as client, Trainer(client, OLD) as trainer:
        assert trainer.sync._exports.kind == "shm_name"
        for number, weights in enumerate((NEW, LATER)):
            for moment in ("prepare", "install"):
                client.at("before", moment, lambda key=f"{moment} {number}": seen.update({key: names() - before}))
            trainer.push(weights, str(number))
            assert differences(apart.url, CONFIG, weights, LAYOUT) == []
        assert len(seen.pop("prepare 0")) == 2, "one name for each of the two buffers"
        assert seen == {"install 0": set(), "prepare 1": set(), "install 1": set()}
        assert names() == before
    assert answer(apart.url)["weight_version"] == "1"


def test_a_server_that_restarted_gets_names_of_its_own_from_the_same_sync(
    checkpoint: Path, apart: RunningServer
) -> None:
    before = names()
    with started_server(checkpoint, within=APART) as first:
        port = httpx.URL(first.url).port
        with Watched(first.url) as client, Trainer([client, apart.url], OLD) as trainer:
            trainer.push(NEW, "new")
            ended(first)
            with started_server(checkpoint, within=APART, port=port) as second:
                trainer.push(LATER, "later")
                assert differences(second.url, CONFIG, LATER, Layout()) == []
                assert differences(apart.url, CONFIG, LATER, LAYOUT) == []
                assert names() == before
                ended(second)


def ended(server: RunningServer) -> None:
    """``unshare`` keeps to itself what it is sent, but when it is gone the kernel tells the server."""
    server.process.kill()
    server.process.wait(30)


@pytest.mark.parametrize("call", ["prepare", "install"])
def test_names_that_a_killed_trainer_left_are_swept_by_the_next_and_its_push_is_exact(
    apart: RunningServer, start: Start, call: str
) -> None:
    before = names()
    push(apart.url, OLD, "old")
    trainer = start(1)
    assert trainer.one(0, "connect", [apart.url], "module", ["scaled", 0], {"timeout": 2}) == "shm_name"
    trainer.one(0, "arm_call", "before", call, "kill")
    trainer.ask(0, "push", "new", ["scaled", 11])
    assert trainer.ended(0) == -9
    left = names() - before
    assert len(left) == (2 if call == "prepare" else 0)
    # From within its namespace a worker cannot see that the trainer is dead: its lease runs out by time.
    assert info(apart.url)["is_paused"]
    push_when_free(apart.url)
    assert names() == before
    assert differences(apart.url, CONFIG, LATER, LAYOUT) == []
    assert answer(apart.url)["weight_version"] == "later"


def push_when_free(url: str) -> None:
    """Push LATER as soon as the dead trainer's lease has run out."""
    for _ in range(200):
        try:
            push(url, LATER, "later")
        except PushError as refused:
            if refused.codes != ("lease",):
                raise
        else:
            return
    raise AssertionError("the lease did not run out")
