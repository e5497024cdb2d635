"""An engine for the pages' examples: the one that the pages' own command starts, and the same behind TLS.

It knows how the engine and its checkpoint are made; it must not know any page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from docs.surroundings import Surroundings
from docs.tls_front import tls_before
from fleets import started_server
from fleets_inprocess import Trained


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory, lasting_processes: set[int]) -> Iterator[Surroundings]:
    config = tiny_config()
    folder = tmp_path_factory.mktemp("pages") / "checkpoint"
    checkpoint: Path = write_checkpoint(folder, config, scaled_weights(config, seed=1))
    with started_server(checkpoint, dp=2, tp=2, expert_parallel=True) as server, tls_before(server.url) as secure_url:
        lasting_processes |= {server.pid, *server.workers}
        trained = scaled_weights(config, seed=2)
        yield Surroundings(server.url, secure_url, checkpoint, lambda: Trained(trained, str(config["dtype"])))
