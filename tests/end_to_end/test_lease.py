"""One trainer at a time holds a fleet, a dead one holds it no longer, and two may take turns."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import scaled_weights, write_checkpoint
from end_to_end.conftest import CONFIG, Start
from end_to_end.here import Trainer, push
from end_to_end.seen import answer, differences, info
from end_to_end.trainers import Trainers
from end_to_end.watched import Watched
from fleets import RunningServer, environment
from oracle import Layout
from rankcast import PushError

LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
OLD, NEW, LATER = (scaled_weights(CONFIG, seed) for seed in (10, 11, 12))


def assert_serves(url: str, weights: Any, version: str) -> None:
    assert differences(url, CONFIG, weights, LAYOUT) == []
    found = info(url)
    assert (found["weight_version"], found["is_paused"]) == (version, False)
    assert set(answer(url)["weight_versions"]) == {version}


def held(fleet: RunningServer, start: Start) -> Trainers:
    """A trainer that has stopped in the middle of its push of NEW, between prepare and install."""
    trainer = start(1, forked=False)  # only of a child of its own can a process wait for a stop
    trainer.one(0, "connect", [fleet.url], "module", ["scaled", 10], {})
    trainer.one(0, "arm", 1, 0, "stop")
    trainer.ask(0, "push", "new", ["scaled", 11])
    assert os.waitid(os.P_PID, trainer.processes[0].pid, os.WSTOPPED) is not None
    return trainer


def test_a_second_trainer_is_refused_naming_the_holder_and_the_first_one_ends_its_push(
    fleet: RunningServer, start: Start
) -> None:
    push(fleet.url, OLD, "old")
    with Trainer(fleet.url, OLD) as second:
        first = held(fleet, start)
        holder = rf"the trainer on \S+, pid {first.processes[0].pid} holds this fleet for \d+ s more"
        with pytest.raises(PushError) as refusal:
            second.push(LATER, "later")
        assert refusal.value.codes == ("lease",)
        assert len(re.findall(holder, str(refusal.value))) == 4
        with pytest.raises(PushError, match=holder):
            Trainer(fleet.url, LATER)
        assert {row["state"] for row in info(fleet.url)["workers"]} == {"prepared"}
        first.processes[0].send_signal(signal.SIGCONT)
        assert first.answer(0)["weight_version"] == "new"
        assert_serves(fleet.url, NEW, "new")
        second.push(LATER, "later")
        assert_serves(fleet.url, LATER, "later")


def test_a_holder_that_died_is_taken_over_at_once(fleet: RunningServer, start: Start) -> None:
    push(fleet.url, OLD, "old")
    with Trainer(fleet.url, OLD) as second:
        first = held(fleet, start)
        first.processes[0].kill()
        first.ended(0)
        second.push(LATER, "later")
        assert_serves(fleet.url, LATER, "later")


def test_the_command_line_pushes_between_two_pushes_of_a_connected_trainer_which_then_begins_anew(
    fleet: RunningServer, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", CONFIG, LATER)
    with Watched(fleet.url) as client, Trainer(client, OLD) as trainer:
        trainer.push(NEW, "mine")
        done = subprocess.run(
            [sys.executable, "-m", "rankcast", "push", other, fleet.url],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert_serves(fleet.url, LATER, "other")
        client.sent.clear()
        trainer.push(OLD, "mine again")
        assert_serves(fleet.url, OLD, "mine again")
        assert client.kinds()[:4] == ["claim", "init", "claim", "pause"]
        client.sent.clear()
        trainer.push(NEW, "and again")
        assert_serves(fleet.url, NEW, "and again")
        assert "init" not in client.kinds()
