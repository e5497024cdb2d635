"""``rankcast push`` and ``rankcast status`` against real embedded fleets."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleets import environment, running_server, started_server, wait_gone
from oracle import Layout, read_checkpoint, worker_digests
from rankcast.control.http import HttpClient

LAYOUT = {"dp": 2, "tp": 2, "expert_parallel": True}


def versions(status: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(e["weight_version"], [row["weight_version"] for row in e["workers"]]) for e in status["engines"]]


def assert_holds(url: str, checkpoint: Path) -> None:
    """Every worker at ``url`` has exactly the parameters that the oracle gives it for ``checkpoint``."""
    config, weights = read_checkpoint(checkpoint)
    with HttpClient(url) as client:
        workers = client.weight_checker()["workers"]
    assert len(workers) == 4
    for worker in workers:
        expected = worker_digests(weights, config, Layout(**LAYOUT), worker["rank"])
        found = {name: parameter["sha256"] for name, parameter in worker["parameters"].items()}
        assert found == expected


def test_two_checkpoints_one_after_the_other_are_served_and_seen(
    run, fleet_url: str, checkpoint_dirs: dict[str, Path]
) -> None:
    before = run("status", fleet_url, "--json")
    assert before.code == 0
    assert versions(before.json) == [("default", ["", "", "", ""])]

    first = run("push", checkpoint_dirs["step-1"], fleet_url, "--json")
    assert (first.code, first.json["weight_version"]) == (0, "step-1")
    assert_holds(fleet_url, checkpoint_dirs["step-1"])
    seen = run("status", fleet_url, "--json")
    assert (seen.code, seen.err) == (0, "")
    assert versions(seen.json) == [("step-1", ["step-1"] * 4)]

    second = run("push", checkpoint_dirs["step-2"], fleet_url, "--bucket", "64k", "--weight-version", "two")
    assert (second.code, second.out) == (0, "")
    assert "'two' is published" in second.words
    assert second.err.count(fleet_url) == 4
    assert_holds(fleet_url, checkpoint_dirs["step-2"])
    after = run("status", fleet_url, "--json").json
    assert after["weight_version"] == "two"
    assert (after["mixed"], after["servable"], after["reachable"], after["problems"]) == (False, True, True, [])
    rows = after["engines"][0]["workers"]
    assert [row["generation"] for row in rows] == [old["generation"] + 2 for old in _rows(before.json)]
    assert [row["worker"] for row in rows] == [old["worker"] for old in _rows(before.json)]
    assert [(r["worker"]["dp"], r["worker"]["tp"], r["worker"]["ep"]) for r in rows] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
    ]
    assert {row["state"] for row in rows} == {"idle"}


def _rows(status: dict[str, Any]) -> list[dict[str, Any]]:
    return status["engines"][0]["workers"]


def test_the_report_of_a_push_is_one_object_with_a_row_for_each_worker(
    run, fleet_url: str, checkpoint_dirs: dict[str, Path]
) -> None:
    narrow = run("push", checkpoint_dirs["step-1"], fleet_url, "--json", "--mode", "ranklocal", "--bucket", "64k").json
    wide = run("push", checkpoint_dirs["step-1"], fleet_url, "--json", "--mode", "broadcast", "--bucket", "64k").json
    assert (narrow["mode"], wide["mode"]) == ("ranklocal", "broadcast")
    assert narrow["rounds"] > 1
    for report in (narrow, wide):
        assert [row["rank"] for row in report["workers"]] == [0, 1, 2, 3]
        assert sum(row["nbytes"] for row in report["workers"]) == report["nbytes"]
    assert narrow["nbytes"] < wide["nbytes"]
    assert wide["nbytes"] == 4 * sum(one.nbytes for one in read_checkpoint(checkpoint_dirs["step-1"])[1].values())


@pytest.mark.parametrize("pause", ["keep", "wait", "abort", "none"])
def test_an_engine_that_was_paused_stays_so_and_one_that_was_not_goes_on(
    run, fleet_url: str, checkpoint_dirs: dict[str, Path], pause: str
) -> None:
    with HttpClient(fleet_url) as client:
        for paused in (True, False):
            (client.pause if paused else client.resume)()
            assert run("push", checkpoint_dirs["step-1"], fleet_url, "--pause", pause).code == 0
            ran = run("status", fleet_url, "--json")
            assert ran.json["engines"][0]["paused"] is paused
            assert ran.code == 0


def test_status_for_people_shows_every_worker_and_the_verdict(
    run, fleet_url: str, checkpoint_dirs: dict[str, Path]
) -> None:
    run("push", checkpoint_dirs["step-1"], fleet_url)
    ran = run("status", fleet_url)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.count("idle") == 4
    assert "all 4 workers serve 'step-1'" in ran.words


def test_tensors_that_do_not_fit_are_named_and_the_old_weights_stay(
    run, fleet_url: str, checkpoint_dirs: dict[str, Path], tmp_path: Path
) -> None:
    run("push", checkpoint_dirs["step-1"], fleet_url)
    part = tmp_path / "part"
    part.mkdir()
    index = json.loads((checkpoint_dirs["step-2"] / "model.safetensors.index.json").read_text())
    name = sorted(set(index["weight_map"].values()))[0]
    (part / "model.safetensors").write_bytes((checkpoint_dirs["step-2"] / name).read_bytes())
    ran = run("push", part, fleet_url, "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "push"
    assert "missing" in ran.json["error"]["message"]
    assert_holds(fleet_url, checkpoint_dirs["step-1"])
    assert run("status", fleet_url).code == 0


def test_engines_at_different_versions_are_a_mixed_fleet_until_one_push_takes_both(
    run, fleet_url: str, checkpoint_dirs: dict[str, Path]
) -> None:
    with running_server(checkpoint_dirs["step-0"]) as other:
        assert run("push", checkpoint_dirs["step-1"], fleet_url).code == 0
        assert run("push", checkpoint_dirs["step-2"], other).code == 0
        ran = run("status", fleet_url, other, "--json")
        assert ran.code == 1
        assert (ran.json["mixed"], ran.json["servable"], ran.json["weight_version"]) == (True, True, None)
        assert [version for version, _ in versions(ran.json)] == ["step-1", "step-2"]
        text = run("status", fleet_url, other)
        assert text.code == 1
        assert "mixed: 'step-1' on" in text.words
        assert run("push", checkpoint_dirs["step-2"], fleet_url, other).code == 0
        assert run("status", fleet_url, other).code == 0


def test_a_fleet_with_one_dead_engine_is_exit_2_and_the_living_one_is_shown(
    run, fleet_url: str, checkpoint_dirs: dict[str, Path]
) -> None:
    with started_server(checkpoint_dirs["step-0"]) as doomed:
        os.kill(doomed.pid, signal.SIGKILL)
        assert wait_gone((doomed.pid, *doomed.workers)) == []
        ran = run("status", fleet_url, doomed.url, "--json")
        assert ran.code == 2
        assert [engine["reachable"] for engine in ran.json["engines"]] == [True, False]
        assert len(ran.json["engines"][0]["workers"]) == 4


def test_an_engine_that_lost_a_worker_is_unusable_and_names_it(run, checkpoint_dirs: dict[str, Path]) -> None:
    with started_server(checkpoint_dirs["step-0"], tp=2) as server:
        os.kill(server.workers[1], signal.SIGKILL)
        assert wait_gone(server.workers[1:]) == []
        ran = run("status", server.url, "--json")
        assert ran.code == 1
        assert (ran.json["reachable"], ran.json["servable"]) == (True, False)
        assert "worker 1 of 2" in " ".join(ran.json["problems"])


#: What an engine answers is asked for here, and not whether it does so within the usual time.
PATIENT = ("--timeout", "300")


@pytest.mark.parametrize("mine", [None, "other"])
def test_a_wrong_secret_is_a_clear_error_and_changes_nothing(
    run, checkpoint_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, mine: str | None
) -> None:
    said = "different secrets" if mine else "no MAC"
    with running_server(checkpoint_dirs["step-0"], secret="right") as url:
        if mine is not None:
            monkeypatch.setenv("RANKCAST_SECRET", mine)
        status = run("status", url, "--json", *PATIENT)
        assert status.code == 1
        assert said in " ".join(status.json["problems"])
        assert (status.json["reachable"], status.json["servable"]) == (True, False)
        push = run("push", checkpoint_dirs["step-1"], url)
        assert push.code == 1
        assert said in push.words
        monkeypatch.setenv("RANKCAST_SECRET", "right")
        good = run("status", url, "--json", *PATIENT)
        assert good.code == 0
        assert good.json["weight_version"] == "default"
        assert run("push", checkpoint_dirs["step-1"], url).code == 0


def test_a_secret_that_the_engine_does_not_have_is_an_error_that_speaks_of_secrets(
    run, fleet_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKCAST_SECRET", "only mine")
    ran = run("status", fleet_url)
    assert ran.code == 1
    assert "RANKCAST_SECRET" in ran.words


@pytest.mark.parametrize("command", [["push", "step-1"], ["status"]], ids=lambda command: command[0])
def test_the_url_for_openai_s_clients_is_refused_with_the_one_to_give(
    run, fleet_url: str, checkpoint_dirs: dict[str, Path], command: list[str]
) -> None:
    ran = run(command[0], *(checkpoint_dirs[name] for name in command[1:]), f"{fleet_url}/v1")
    assert (ran.code, ran.out) == (1, "")
    assert f"{fleet_url}/v1 is where OpenAI's clients find an engine: give {fleet_url})" in ran.words
    assert "VLLM_SERVER_DEV_MODE" not in ran.words


def test_a_push_on_a_terminal_keeps_one_live_line_and_stdout_clean(
    fleet_url: str, checkpoint_dirs: dict[str, Path]
) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "rankcast", "push", checkpoint_dirs["step-1"], fleet_url, "--bucket", "64k"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            stdin=subprocess.DEVNULL,
            env={**environment(), "TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(theirs)
        shown = _read_all(ours)
        assert process.communicate(timeout=60)[0] == b""
        assert process.returncode == 0
    finally:
        os.close(ours)
    progress = [part for part in shown.split("\r") if "push 'step-1'" in part]
    assert len(progress) > 1
    assert "install 1 of" in progress[0]
    assert "100%" in progress[-1]
    assert "published" in progress[-1]
    # Nothing of the line is left between it and what follows.
    assert shown.split("\r\n")[0].endswith(progress[-1].rstrip("\n"))
    assert "'step-1' is published: " in shown
    assert re.search(r"\d [KM]iB to 4 workers", shown)
    assert not re.search(r"\d [kM]B\b", shown)


def _read_all(terminal: int) -> str:
    data = b""
    while select.select([terminal], [], [], 120)[0]:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # how a terminal says that its other end is closed
            break
        if not part:
            break
        data += part
    return data.decode()


def test_the_reference_server_command_serves_what_push_and_status_meet(run, checkpoint_dirs: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "rankcast", "reference-server", checkpoint_dirs["step-0"]]
    process = subprocess.Popen(
        [*command, "--pp", "2", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 120)[0]
        facts = json.loads(process.stdout.readline())
        ran = run("status", facts["url"], "--json")
        assert ran.code == 0
        assert [row["worker"]["pp"] for row in _rows(ran.json)] == [0, 1]
        assert run("push", checkpoint_dirs["step-1"], facts["url"]).code == 0
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stdout.close()
