"""A trainer rank that raises or dies while rank 0 waits for an engine that takes 14 s: every rank hears of it in 10 s.

And ranks that do not push the same.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from checkpoints import scaled_weights
from end_to_end.conftest import CONFIG, Start
from end_to_end.here import push
from end_to_end.seen import differences, info, wait_until
from end_to_end.sharded import SLOW_SECONDS
from end_to_end.trainers import ANSWER_SECONDS, Trainers
from fleets import RunningServer
from oracle import Layout

LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
OLD, NEW, LATER = (scaled_weights(CONFIG, seed) for seed in (10, 11, 12))
HEARD_SECONDS = 10.0
#: For who waits until a slow call is over.
PATIENCE = ANSWER_SECONDS + SLOW_SECONDS


@pytest.fixture(autouse=True)
def settled(fleet: RunningServer) -> None:
    """The fleet serves OLD when a test begins."""
    push(fleet.url, OLD, "old")


@pytest.fixture
def ranks(fleet: RunningServer, start: Start) -> Trainers:
    made = start(2)
    assert made.all("connect", [fleet.url], "module", ["scaled", 10], {}) == ["shm", "shm"]
    return made


def serves(url: str, weights: Any, version: str) -> bool:
    found = info(url)
    return (
        differences(url, CONFIG, weights, LAYOUT) == []
        and (found["weight_version"], found["is_paused"]) == (version, False)
        and all(worker["servable"] for worker in found["workers"])
    )


def states(url: str) -> set[str]:
    return {worker["state"] for worker in info(url)["workers"]}


@pytest.mark.slow
def test_a_rank_that_raises_during_an_install_of_14_seconds_is_heard_of_and_the_next_push_is_exact(
    fleet: RunningServer, ranks: Trainers, tmp_path: Path
) -> None:
    turn, tensor = ranks.one(1, "overlapped")
    begun = tmp_path / "begun"
    ranks.one(0, "arm_call", "before", "install", f"slow {begun}", turn - 1)
    ranks.one(1, "arm", 1, tensor, f"raise {begun}")
    for rank in range(2):
        ranks.ask(rank, "push", "new", ["scaled", 11])
    assert "the source broke as it was told to" in ranks.answer(1)["text"]
    heard = ranks.answer(0, HEARD_SECONDS)
    assert heard["error"] == "TrainerError"
    assert "trainer rank 1 " in heard["text"]
    assert "not reached: worker 0 of 4" in heard["text"]
    for rank in range(2):
        ranks.ask(rank, "push", "later", ["scaled", 12])
    assert [ranks.answer(rank, PATIENCE).get("error") for rank in range(2)] == [None, None]
    assert serves(fleet.url, LATER, "later")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["prepare", "install"])
@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_rank_that_ends_while_an_engine_takes_14_seconds_is_heard_of_and_the_session_is_ended_at_close(
    fleet: RunningServer, ranks: Trainers, call: str, ends: signal.Signals
) -> None:
    ranks.one(0, "arm_call", "after", call, "slow")
    for rank in range(2):
        ranks.ask(rank, "push", "new", ["scaled", 11])
    wait_until(lambda: states(fleet.url) == {"prepared" if call == "prepare" else "installing"})
    os.kill(ranks.processes[1].pid, ends)
    heard = ranks.answer(0, HEARD_SECONDS)
    assert heard["error"] == "TrainerError"
    assert "trainer rank 1 " in heard["text"]
    assert ("died" if ends == signal.SIGKILL else "KeyboardInterrupt") in heard["text"]
    # The engine is still at it, as far as rank 0 can tell; it hears that the session is over when it has answered.
    assert info(fleet.url)["is_paused"] is True
    ranks.one(0, "close", seconds=PATIENCE)
    if call == "prepare":
        assert serves(fleet.url, OLD, "old")
    else:
        assert states(fleet.url) == {"unusable"}
    push(fleet.url, LATER, "later")
    assert serves(fleet.url, LATER, "later")


def test_ranks_that_push_different_versions_are_all_refused_and_the_next_push_is_exact(
    fleet: RunningServer, ranks: Trainers
) -> None:
    for rank, version in enumerate(("17", "18")):
        ranks.ask(rank, "push", version, ["scaled", 11])
    for rank in range(2):
        refused = ranks.answer(rank)
        assert refused["error"] == "TrainerError"
        assert "trainer rank 1 pushes '18'" in refused["text"]
        assert "rank 0 pushes '17'" in refused["text"]
    assert serves(fleet.url, OLD, "old")
    assert [report.get("error") for report in ranks.all("push", "later", ["scaled", 12])] == [None, None]
    assert serves(fleet.url, LATER, "later")


def test_ranks_that_are_not_at_the_same_push_are_all_refused_once_also_when_they_call_it_the_same(
    fleet: RunningServer, ranks: Trainers
) -> None:
    ranks.one(1, "miscount")
    for refused in ranks.all("push", "same", ["scaled", 11]):
        assert refused["error"] == "TrainerError"
        assert "trainer rank 1 pushes 'same', its push number 2" in refused["text"]
        assert "rank 0 pushes 'same', its push number 1" in refused["text"]
    assert serves(fleet.url, OLD, "old")
    assert [report.get("error") for report in ranks.all("push", "later", ["scaled", 12])] == [None, None]
    assert serves(fleet.url, LATER, "later")


def test_a_version_of_one_rank_that_is_no_string_is_refused_on_every_rank(
    fleet: RunningServer, ranks: Trainers
) -> None:
    for rank, version in enumerate(("17", 17)):
        ranks.ask(rank, "push", version, ["scaled", 11])
    assert ranks.answer(1)["error"] == "StateError"
    heard = ranks.answer(0, HEARD_SECONDS)
    assert heard["error"] == "TrainerError"
    assert "of type int" in heard["text"]
    assert serves(fleet.url, OLD, "old")
