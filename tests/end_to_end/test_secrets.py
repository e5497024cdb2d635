"""A fleet with a secret takes nothing from a trainer without it, and everything from one that has it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import scaled_weights, write_checkpoint
from end_to_end.conftest import CONFIG
from end_to_end.here import Trainer, push
from end_to_end.seen import answer, differences, info
from fleets import RunningServer, environment, started_server
from oracle import Layout
from rankcast import PushError

LAYOUT = Layout(tp=2)
OLD, NEW, LATER = (scaled_weights(CONFIG, seed) for seed in (0, 11, 12))
SECRET = "kept between the tests and their fleet"


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text(f"{SECRET}\n")
    return path


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, secret_file: Path) -> Iterator[RunningServer]:
    """A fleet that reads its secret from a file."""
    with started_server(checkpoint, tp=2, variables={"RANKCAST_SECRET_FILE": str(secret_file)}) as server:
        yield server


@pytest.mark.parametrize(("mine", "said"), [(None, "carries no MAC"), ("another", "different secrets")])
def test_a_trainer_without_the_secret_is_told_so_and_changes_nothing(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch, mine: str | None, said: str
) -> None:
    push(guarded.url, OLD, "old", secret=SECRET)
    with pytest.raises(PushError, match=said) as refusal:
        Trainer(guarded.url, NEW, secret=mine)
    assert "RANKCAST_SECRET" in str(refusal.value) or mine is not None
    assert differences(guarded.url, CONFIG, OLD, LAYOUT) == []
    assert (info(guarded.url)["is_paused"], answer(guarded.url)["weight_version"]) == (False, "old")


def test_a_trainer_with_the_secret_pushes_whether_given_or_found_in_the_environment(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(guarded.url, NEW, "given", secret=SECRET)
    assert differences(guarded.url, CONFIG, NEW, LAYOUT) == []
    monkeypatch.setenv("RANKCAST_SECRET", SECRET)
    push(guarded.url, LATER, "found")
    assert differences(guarded.url, CONFIG, LATER, LAYOUT) == []
    assert answer(guarded.url)["weight_version"] == "found"


def test_the_command_line_finds_the_secret_in_a_file(guarded: RunningServer, secret_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rankcast", "push", write_checkpoint(tmp_path / "new", CONFIG, NEW), guarded.url]
    variables = {**environment(), "RANKCAST_SECRET_FILE": str(secret_file)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stderr + done.stdout
    assert differences(guarded.url, CONFIG, NEW, LAYOUT) == []
    assert info(guarded.url)["weight_version"] == "new"
