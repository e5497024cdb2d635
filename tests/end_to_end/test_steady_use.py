"""Thirty pushes in a row: nobody's memory, descriptors or segments grow, and staging stays within its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from end_to_end.conftest import Start
from end_to_end.seen import differences, usage
from fleets import started_server
from oracle import Layout, unique_weights

#: Two tensors, embedding and head, of 2 MiB, so that one push that is kept somewhere shows.
WIDE = tiny_config(num_hidden_layers=1, vocab_size=16384)
LARGEST = 16384 * 32 * 4
BUCKET = 2**18
#: What resident memory may grow by from the 10th to the 30th push, which carry 4 MiB each.
SLACK = 8 * LARGEST


@pytest.mark.slow
@pytest.mark.parametrize("source", ["module", "gathered"])
def test_over_thirty_pushes_nothing_grows_in_the_trainer_or_in_any_worker(
    tmp_path: Path, start: Start, source: str
) -> None:
    directory = write_checkpoint(tmp_path / "wide", WIDE, scaled_weights(WIDE, 0))
    with started_server(directory, dp=2, expert_parallel=True) as server:
        pids = (server.pid, *server.workers)
        ranks = start(1, WIDE)
        assert ranks.one(0, "connect", [server.url], source, ["unique", 0], {"bucket_bytes": BUCKET}) == "shm"
        first = pushed(ranks, 10, pids)
        last = pushed(ranks, 20, pids)
        layout = Layout(dp=2, expert_parallel=True)
        assert differences(server.url, WIDE, unique_weights(WIDE, 19 % 3), layout) == []
    for before, after in zip(first, last, strict=True):
        steady = ("descriptors", "open", "mapped")
        assert {key: after[key] for key in steady} == {key: before[key] for key in steady}
        # The thread of the last call to an engine may not be gone yet.
        assert after["threads"] <= before["threads"] + 1
        assert after["resident"] - before["resident"] < SLACK
    trainer, server_process, *workers = last
    assert LARGEST < trainer["staged"] <= 2 * BUCKET + LARGEST
    assert server_process["mapped"] == 0
    # A worker maps each buffer once, and keeps no descriptor but the one that Python keeps beside a mapping.
    buffers = trainer["mapped"]
    assert {(worker["mapped"], worker["open"]) for worker in workers} == {(buffers, buffers)}


def pushed(ranks: Any, count: int, pids: tuple[int, ...]) -> list[dict[str, int]]:
    """What the trainer, the server and each worker use after ``count`` more pushes."""
    used = ranks.one(0, "pushes", count, seconds=180.0)
    return [used, *(usage(pid) for pid in pids)]
