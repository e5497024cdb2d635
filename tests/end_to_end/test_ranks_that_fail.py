"""A trainer rank that raises or dies, at every point of a push: the others hear of it, and the fleet is never a mix."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoints import scaled_weights
from end_to_end.conftest import CONFIG, Start
from end_to_end.here import push
from end_to_end.seen import answer, ask, differences, info, wait_until
from end_to_end.trainers import Trainers, trainers
from fleets import RunningServer
from oracle import Layout
from shared_memory import names

LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
OLD, NEW, LATER = (scaled_weights(CONFIG, seed) for seed in (10, 11, 12))
#: How long a rank may take to hear that another one has failed.
HEARD_SECONDS = 10.0

#: Where a source fails: the pass (0 looks for tensors to export as they lie, 1 stages) and the tensor of it (of 36
#: or more, in three rounds or more).
POINTS = {"before prepare": (0, 0), "between prepare and install": (1, 0), "within the installs": (1, 35)}
point = pytest.mark.parametrize("where", POINTS, ids=lambda name: str(name).replace(" ", "_"))


@pytest.fixture(autouse=True)
def settled(fleet: RunningServer) -> Iterator[None]:
    """The fleet serves OLD when a test begins, and nothing of ours is left in shared memory when it ends."""
    push(fleet.url, OLD, "old")
    before = names(orphans=False)
    yield
    assert names(orphans=False) <= before


@pytest.fixture(scope="module")
def crew(fleet: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    """Two ranks whose sync outlives what goes wrong in it."""
    with trainers(2, tmp_path_factory.mktemp("crew"), CONFIG) as ranks:
        assert ranks.all("connect", [fleet.url], "module", ["scaled", 10], {}) == ["shm", "shm"]
        yield ranks


def assert_serves(url: str, weights: Any, version: str) -> None:
    assert differences(url, CONFIG, weights, LAYOUT) == []
    found = info(url)
    assert (found["weight_version"], found["is_paused"]) == (version, False)
    assert set(answer(url)["weight_versions"]) == {version}


def assert_old_or_unusable(url: str, *, written: bool) -> None:
    """What a living lead leaves: all as it was, or an engine that refuses to generate."""
    if not written:
        assert_serves(url, OLD, "old")
        return
    found = info(url)
    assert {worker["state"] for worker in found["workers"]} == {"unusable"}
    assert found["weight_version"] != "new"
    refused = ask(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_servable")


@point
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_named_everywhere_and_the_next_push_of_the_same_sync_is_exact(
    fleet: RunningServer, crew: Trainers, rank: int, where: str
) -> None:
    crew.one(rank, "arm", *POINTS[where], "raise")
    for other in range(2):
        crew.ask(other, "push", "new", ["scaled", 11])
    own = crew.answer(rank)
    other = crew.answer(1 - rank, HEARD_SECONDS)
    assert "the source broke as it was told to" in own["text"]
    assert (other["error"], f"trainer rank {rank} " in other["text"]) == ("TrainerError", True)
    assert "the source broke as it was told to" in other["text"]
    assert_old_or_unusable(fleet.url, written=where == "within the installs")
    assert [report.get("error") for report in crew.all("push", "later", ["scaled", 12])] == [None, None]
    assert_serves(fleet.url, LATER, "later")


@point
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_other_and_the_next_trainer_makes_the_fleet_exact(
    fleet: RunningServer, start: Start, rank: int, where: str
) -> None:
    ranks = start(2)
    ranks.all("connect", [fleet.url], "module", ["scaled", 10], {})
    ranks.one(rank, "arm", *POINTS[where], "kill")
    for other in range(2):
        ranks.ask(other, "push", "new", ["scaled", 11])
    assert ranks.ended(rank) == -9
    other = ranks.answer(1 - rank, HEARD_SECONDS)
    assert other["error"] == "TrainerError"
    assert f"trainer rank {rank} (pid {ranks.processes[rank].pid}" in other["text"]
    assert "died" in other["text"]
    written = where == "within the installs"
    if rank == 1:
        assert_old_or_unusable(fleet.url, written=written)
    else:
        assert_left_open(fleet.url, where)
    push(fleet.url, LATER, "later")
    assert_serves(fleet.url, LATER, "later")
    again = ranks.one(1 - rank, "push", "again", ["scaled", 11], seconds=HEARD_SECONDS)
    assert again["error"] == "TrainerError"
    assert_serves(fleet.url, LATER, "later")


def assert_left_open(url: str, where: str) -> None:
    """What a dead lead leaves: nobody ends its session, so that nothing is generated once it is open."""
    if where == "before prepare":
        assert_serves(url, OLD, "old")
        return
    found = info(url)
    assert found["is_paused"] is True
    if where == "between prepare and install":
        assert {worker["state"] for worker in found["workers"]} == {"prepared"}
        assert differences(url, CONFIG, OLD, LAYOUT) == []
    else:
        assert {worker["servable"] for worker in found["workers"]} == {False}


@pytest.mark.parametrize("call", ["pause", "start", "prepare", "finish", "version", "resume", "release"])
def test_an_engine_left_behind_by_a_killed_trainer_is_resumed_by_the_next_push_and_answers_what_was_held(
    fleet: RunningServer, start: Start, call: str
) -> None:
    trainer = start(1)
    trainer.all("connect", [fleet.url], "module", ["scaled", 10], {})
    trainer.one(0, "arm_call", "before", call, "kill")
    trainer.ask(0, "push", "new", ["scaled", 11])
    assert trainer.ended(0) == -9
    found = info(fleet.url)
    assert found["is_paused"] is (call not in ("pause", "release"))
    written = call in ("finish", "version", "resume", "release")
    assert differences(fleet.url, CONFIG, NEW if written else OLD, LAYOUT) == []
    # Between finish and publication the weights have no name.
    assert found["weight_version"] == {"version": "", "resume": "new", "release": "new"}.get(call, "old")
    held: list[Any] = []
    asker = threading.Thread(target=lambda: held.append(ask(fleet.url)))
    asker.start()
    if found["is_paused"]:
        wait_until(lambda: info(fleet.url)["requests"] == 1)
    push(fleet.url, LATER, "later")
    asker.join(60)
    assert held[0].status_code == 200
    if found["is_paused"]:
        assert held[0].json()["weight_versions"] == ["later", "later"]
    assert_serves(fleet.url, LATER, "later")
