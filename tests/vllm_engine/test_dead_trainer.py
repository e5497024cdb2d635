"""A trainer is killed in the middle of an update: the next one finds the fleet as it was left and makes it whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleets import environment
from vllm_engine.conftest import Bench
from vllm_engine.dying_trainer import ABOUT_TO_PAUSE, FINISH
from vllm_engine.servers import TP1, TP2
from vllm_engine.test_faults import IDLE, flags, refused
from vllm_engine.test_pausing import LONG, MANY, all_done, long_requests
from vllm_engine.test_servers import command, push

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("bench", [TP1, TP2], indirect=True, ids=lambda layout: layout.name, scope="session"),
]

TRAINER = Path(__file__).with_name("dying_trainer.py")


@contextmanager
def trainer_about_to_pause(bench: Bench, mode: str, moment: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer that has claimed its engine and not paused it yet; ``killed`` has it go on."""
    arguments = [bench.server.url, str(bench.b), mode, moment]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(TRAINER), *arguments], env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as trainer:
        try:
            assert trainer.stdout is not None
            if trainer.stdout.readline().strip() != ABOUT_TO_PAUSE:
                pytest.fail(f"the trainer came to no pause: {trainer.communicate(timeout=60)[1]}")
            yield trainer
        finally:
            trainer.kill()


def killed(trainer: subprocess.Popen[str]) -> None:
    """Have it go on; returns when it is dead."""
    _, said = trainer.communicate("go on\n", timeout=120)
    assert trainer.returncode == -signal.SIGKILL, said


#: A moment at which an update is open and new weights are written: the first rounds, or the only one of mode direct.
HALF_WAY = pytest.mark.parametrize(("mode", "moment"), [("ranklocal", "2"), ("direct", FINISH)])


@HALF_WAY
def test_the_next_trainer_ends_what_a_killed_one_left_open(bench: Bench, mode: str, moment: str) -> None:
    with trainer_about_to_pause(bench, mode, moment) as trainer, long_requests(bench.server) as answers:
        killed(trainer)
        assert bench.server.get("/is_paused") == {"is_paused": True}
        assert not all_done(answers), "the requests ended before the pause"
        states = bench.server.flags()
        assert all(one["active"] and not one["servable"] for one in states), states
        assert "a weight update is open" in refused(bench.server, "/resume")
        found = json.loads(command("status", bench.server.url, "--json").stdout)
        assert not found["servable"]
        assert not all_done(answers), "the requests went on over weights that nobody attested"
        done = command("push", str(bench.b), bench.server.url, "--weight-version", "after", "--json")
        assert done.returncode == 0, done.stderr
        assert bench.server.get("/is_paused") == {"is_paused": False}
        assert [len(answer.result(timeout=120)[0]) for answer in answers] == [LONG] * MANY
    assert flags(bench.server) == [IDLE] * bench.layout.tp
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said


@pytest.mark.parametrize("mode", ["ranklocal", "direct"])
def test_a_trainer_killed_before_its_first_round_is_known_to_be_written_leaves_no_doubt(
    bench: Bench, mode: str
) -> None:
    with trainer_about_to_pause(bench, mode, "0") as trainer:
        killed(trainer)
    push(bench, bench.b, mode=mode)
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert bench.server.probe() == bench.at_b.said


@HALF_WAY
def test_a_client_without_a_session_can_end_what_a_killed_trainer_left_open(
    bench: Bench, mode: str, moment: str
) -> None:
    with trainer_about_to_pause(bench, mode, moment) as trainer:
        killed(trainer)
    assert bench.server.post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    states = flags(bench.server)
    assert all(one == {**IDLE, "state": "unusable", "servable": False} for one in states), states
    push(bench, bench.a, mode=mode)
    assert bench.server.digests() == bench.at_a.digests
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert bench.server.probe() == bench.at_a.said
