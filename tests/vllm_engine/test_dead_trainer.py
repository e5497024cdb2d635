"""A trainer is killed in the middle of an update: the next one finds the fleet as it was left and makes it whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleets import environment
from vllm_engine.conftest import Bench
from vllm_engine.servers import TP1, TP2
from vllm_engine.test_faults import IDLE, flags, refused
from vllm_engine.test_pausing import LONG, long_request
from vllm_engine.test_servers import command, push

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("bench", [TP1, TP2], indirect=True, ids=lambda layout: layout.name, scope="session"),
]

TRAINER = Path(__file__).with_name("dying_trainer.py")


def killed_trainer(bench: Bench, number: int) -> None:
    done = subprocess.run(
        [sys.executable, str(TRAINER), bench.server.url, str(bench.b), str(number)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_the_next_trainer_ends_what_a_killed_one_left_open(bench: Bench) -> None:
    with long_request(bench.server) as answer:
        killed_trainer(bench, 2)
        assert bench.server.get("/is_paused") == {"is_paused": True}
        states = bench.server.flags()
        assert all(one["active"] and not one["servable"] for one in states), states
        assert "a weight update is open" in refused(bench.server, "/resume")
        found = json.loads(command("status", bench.server.url, "--json").stdout)
        assert not found["servable"]
        done = command("push", str(bench.b), bench.server.url, "--weight-version", "after", "--json")
        assert done.returncode == 0, done.stderr
        assert bench.server.get("/is_paused") == {"is_paused": False}
        assert len(answer.result(timeout=120)[0]) == LONG
    assert flags(bench.server) == [IDLE] * bench.layout.tp
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said


def test_a_trainer_killed_before_its_first_round_is_known_to_be_written_leaves_no_doubt(bench: Bench) -> None:
    killed_trainer(bench, 0)
    push(bench, bench.b)
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert bench.server.probe() == bench.at_b.said


def test_a_client_without_a_session_can_end_what_a_killed_trainer_left_open(bench: Bench) -> None:
    killed_trainer(bench, 2)
    assert bench.server.post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    states = flags(bench.server)
    assert all(one == {**IDLE, "state": "unusable", "servable": False} for one in states), states
    push(bench, bench.a)
    assert bench.server.digests() == bench.at_a.digests
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert bench.server.probe() == bench.at_a.said
