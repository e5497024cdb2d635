"""The command line run in this process, and checkpoints and a fleet for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from fleets import running_server
from rankcast.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout; fails when there is anything else."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Stderr without the line breaks and frames that a width puts in."""
        return " ".join(self.err.replace("│", " ").split())


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["rankcast", *map(str, arguments)])
        capfd.readouterr()
        code = main()
        return Ran(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def checkpoint_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three checkpoints of one config with different weights; ``step-2`` has two files and an index."""
    folder = tmp_path_factory.mktemp("checkpoints")
    config = tiny_config()
    return {
        name: write_checkpoint(folder / name, config, scaled_weights(config, seed), shards=shards)
        for name, seed, shards in (("step-0", 0, 1), ("step-1", 1, 1), ("step-2", 2, 2))
    }


@pytest.fixture(scope="module")
def fleet_url(checkpoint_dirs: dict[str, Path]) -> Iterator[str]:
    """An embedded fleet of four workers that serves ``step-0``."""
    with running_server(checkpoint_dirs["step-0"], dp=2, tp=2, expert_parallel=True) as url:
        yield url
