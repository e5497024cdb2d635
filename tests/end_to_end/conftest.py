"""What the end-to-end tests share: a small model, its checkpoints, and fleets that live for a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from end_to_end.trainers import Trainers, trainers
from fleets import RunningServer, environment, started_server
from rankcast.engines.reference.nursery import Nursery

CONFIG = tiny_config(num_hidden_layers=2)
Start = Callable[..., Trainers]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every fleet starts with: the weights ``["scaled", 0]``."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), CONFIG, scaled_weights(CONFIG, 0))


@pytest.fixture(scope="session")
def fleet(checkpoint: Path, lasting_processes: set[int]) -> Iterator[RunningServer]:
    """Four workers, for all modules: two data-parallel replicas of two, experts spread over all four."""
    with started_server(checkpoint, dp=2, tp=2, expert_parallel=True) as server:
        lasting_processes.add(server.pid)
        yield server


@pytest.fixture(scope="session")
def piped(checkpoint: Path, lasting_processes: set[int]) -> Iterator[RunningServer]:
    """Another four workers of the same model: two pipeline stages of two."""
    with started_server(checkpoint, pp=2, tp=2) as server:
        lasting_processes.add(server.pid)
        yield server


@pytest.fixture(scope="session")
def nursery(lasting_processes: set[int]) -> Iterator[Nursery]:
    """Where trainer ranks are forked."""
    made = Nursery(environment(), "end_to_end.forked_trainers")
    lasting_processes.add(made.pid)
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path, nursery: Nursery) -> Iterator[Start]:
    """Starts trainer ranks that are stopped with the test; one that is not ``forked`` is this process's own child."""
    made: list[Any] = []

    def begin(size: int, config: dict[str, Any] = CONFIG, *, forked: bool = True, **options: Any) -> Trainers:
        options["nursery"] = nursery if forked and "within" not in options else None
        context = trainers(size, tmp_path / f"trainers{len(made)}", config, **options)
        made.append(context)
        return context.__enter__()

    yield begin
    for context in made:
        context.__exit__(None, None, None)
