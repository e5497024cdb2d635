"""``rankcast demo`` as its user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleets import environment
from oracle import touched
from rankcast.cli.demo.checkpoint import CONFIG
from rankcast.cli.demo.command import LAYOUT, demo
from rankcast.errors import UnsupportedError

SECONDS = 280.0
STEPS = 2
MODES = ["broadcast", "ranklocal", "direct", "auto"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """The one object of ``demo --json``, and the lines of standard error."""
    folder = tmp_path_factory.mktemp("elsewhere")
    asked = [word for mode in MODES for word in ("--mode", mode)]
    done = subprocess.run(
        [sys.executable, "-m", "rankcast", "demo", "--json", "--steps", str(STEPS), *asked],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env={**environment(), "TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert list(Path(folder).iterdir()) == [], "the demo leaves files behind"
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout), done.stderr.splitlines()


def test_every_push_of_every_mode_is_verified(ran: tuple[dict[str, Any], list[str]]) -> None:
    outcome, lines = ran
    assert outcome["verified"] is True
    assert outcome["differences"] == []
    assert outcome["compared_parameters"] == 4 * (3 + CONFIG["num_hidden_layers"] * 9)
    assert outcome["steps"] == STEPS
    assert list(outcome["modes"]) == MODES
    assert [line.split()[0] for line in lines if line.endswith("verified")] == [
        f"{mode}-{step}" for mode in MODES for step in (1, 2)
    ]
    assert any("http://127.0.0.1:" in line for line in lines)


def test_the_trainer_learns(ran: tuple[dict[str, Any], list[str]]) -> None:
    losses = ran[0]["losses"]
    assert len(losses) == STEPS * len(MODES)
    assert losses[-1] < losses[0]
    assert max(mode["log_prob_gap"] for mode in ran[0]["modes"].values()) < 1e-3


def test_the_fleet_and_the_trainer_are_described(ran: tuple[dict[str, Any], list[str]]) -> None:
    assert ran[0]["fleet"] == {
        "engines": 1,
        "workers": 4,
        "layout": {"tp": 2, "pp": 1, "dp": 2, "expert_parallel": True},
    }
    assert ran[0]["trainer"]["ranks"] == 2
    assert ran[0]["trainer"]["experts_per_rank"] == CONFIG["num_experts"] // 2


def test_the_numbers_of_each_mode_agree_with_each_other(ran: tuple[dict[str, Any], list[str]]) -> None:
    total, tensors = ran[0]["trainer"]["nbytes"], ran[0]["trainer"]["tensors"]
    for mode in ran[0]["modes"].values():
        rows = mode["workers"]
        assert [row["rank"] for row in rows] == [0, 1, 2, 3]
        assert [(row["dp"], row["tp"], row["ep"]) for row in rows] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
        assert mode["pushes"] == STEPS
        assert mode["worker_calls"] == sum(row["calls"] for row in rows)
        assert mode["payload_bytes"] == sum(row["nbytes"] for row in rows)
        assert mode["rounds"] > 2 or mode in (ran[0]["modes"]["direct"], ran[0]["modes"]["auto"])
        assert all(0 < row["calls"] <= mode["rounds"] for row in rows)
        assert mode["control_calls"] > 0
        assert 0 < mode["request_bytes"] < mode["first_push_request_bytes"]
        # Of each request that is a call of an update, every worker of the one engine gets one call.
        assert mode["control_calls"] % LAYOUT.workers == 0
        assert mode["requests"] > mode["rounds"] + mode["control_calls"] // LAYOUT.workers
        assert min(mode["seconds"], mode["first_push_seconds"]) > 0
        assert set(mode["stage_seconds"]) == {"plan", "prepare", "wire", "install", "check", "publish"}
    assert all(row["nbytes"] == total for row in ran[0]["modes"]["broadcast"]["workers"])
    assert all(row["tensors"] == tensors for row in ran[0]["modes"]["broadcast"]["workers"])


def test_ranklocal_names_only_what_a_worker_touches(ran: tuple[dict[str, Any], list[str]]) -> None:
    broadcast, ranklocal, *_ = (ran[0]["modes"][mode] for mode in MODES)
    assert [row["tensors"] for row in ranklocal["workers"]] == [
        len(touched(CONFIG, LAYOUT, rank)) for rank in range(LAYOUT.workers)
    ]
    assert ranklocal["payload_bytes"] < broadcast["payload_bytes"] / 2


def test_only_what_is_staged_is_the_same_in_both_modes(ran: tuple[dict[str, Any], list[str]]) -> None:
    broadcast, ranklocal, *_ = (ran[0]["modes"][mode] for mode in MODES)
    for same in ("rounds", "requests", "control_calls", "staged_bytes"):
        assert broadcast[same] == ranklocal[same]


def test_direct_calls_each_worker_once_and_stages_little_and_auto_takes_that_way(
    ran: tuple[dict[str, Any], list[str]],
) -> None:
    total = ran[0]["trainer"]["nbytes"]
    broadcast, ranklocal, direct, auto = (ran[0]["modes"][mode] for mode in MODES)
    assert (direct["rounds"], direct["worker_calls"]) == (1, LAYOUT.workers)
    for same in ("rounds", "worker_calls", "payload_bytes", "staged_bytes"):
        assert auto[same] == direct[same]
    assert direct["payload_bytes"] < ranklocal["payload_bytes"]
    assert direct["staged_bytes"] < total / 2
    assert min(broadcast["staged_bytes"], ranklocal["staged_bytes"]) >= total


def test_modes_and_steps_that_there_are_not_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="direkt"):
        demo(modes=["broadcast", "direkt"])
    with pytest.raises(UnsupportedError, match="once"):
        demo(modes=["broadcast", "broadcast"])
    with pytest.raises(UnsupportedError, match="at least one"):
        demo(steps=0)
