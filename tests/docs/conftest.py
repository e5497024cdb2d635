"""What the pages' examples need to run: a checkpoint, an engine, and a trainer's module.

It knows the placeholders that the pages use; it must not know any page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from fleets import RunningServer, started_server
from fleets_inprocess import Trained

#: What pages write for an engine's address and for a checkpoint's path.
URL, CHECKPOINT = "http://127.0.0.1:8000", "CHECKPOINT"


@dataclass(frozen=True)
class Surroundings:
    """What an example is run in: the placeholders' values, and the names that the reader is to bring."""

    url: str
    checkpoint: Path
    model: Callable[[], nn.Module]

    def fill(self, text: str) -> str:
        """``text`` with real values in place of the placeholders."""
        return text.replace(URL, self.url).replace(CHECKPOINT, str(self.checkpoint))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_checkpoint(tmp_path_factory.mktemp("pages") / "checkpoint", config, scaled_weights(config, seed=1))


@pytest.fixture(scope="session")
def server(checkpoint: Path, lasting_processes: set[int]) -> Iterator[RunningServer]:
    """The engine that the pages' commands start."""
    with started_server(checkpoint, dp=2, tp=2, expert_parallel=True) as running:
        lasting_processes |= {running.pid, *running.workers}
        yield running


@pytest.fixture(scope="session")
def surroundings(server: RunningServer, checkpoint: Path) -> Surroundings:
    config = tiny_config()
    return Surroundings(
        server.url, checkpoint, lambda: Trained(scaled_weights(config, seed=2), str(config["dtype"]))
    )


def train_step(model: nn.Module) -> None:
    """Other weights than before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


#: The command line, run as a user does.
RANKCAST = [sys.executable, "-m", "rankcast"]
os.environ.setdefault("COLUMNS", "160")
