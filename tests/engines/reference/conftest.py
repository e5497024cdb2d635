"""What the fleet's and server's tests share: two checkpoints of one model, and servers that live for a module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints import scaled_weights, tiny_config, write_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory, its config and its weights as raw bits."""

    directory: Path
    config: dict[str, Any]
    weights: dict[str, Any]


def _checkpoint(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int) -> Checkpoint:
    config = tiny_config()
    weights = scaled_weights(config, seed)
    return Checkpoint(write_checkpoint(tmp_path_factory.mktemp(name), config, weights), config, weights)


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The checkpoint that servers under test begin with."""
    return _checkpoint(tmp_path_factory, "first", 1)


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Another checkpoint of the same model."""
    return _checkpoint(tmp_path_factory, "second", 2)
