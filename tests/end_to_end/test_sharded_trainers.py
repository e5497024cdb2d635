"""Trainer ranks that each hold a part of the experts push together: each worker gets its own and equals the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from end_to_end.conftest import CONFIG, Start
from end_to_end.seen import answer, differences, info
from fleets import RunningServer, started_server
from oracle import Layout, touched, unique_weights, workers

LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
#: Seven experts do not halve: the ranks come to the end of a round at different places.
UNEVEN = tiny_config(num_hidden_layers=2, num_experts=7)


def pushed(ranks: Any, version: str, which: list[Any]) -> list[dict[str, Any]]:
    reports = ranks.all("push", version, which)
    assert [report.get("error") for report in reports] == [None] * ranks.size, reports
    return reports


@pytest.mark.parametrize("source", ["module", "gathered"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_hold_a_share_of_the_experts_fill_every_worker_exactly(
    fleet: RunningServer, start: Start, size: int, source: str
) -> None:
    ranks = start(size)
    assert ranks.all("connect", [fleet.url], source, ["unique", 0], {}) == ["shm"] * size
    for step in (1, 2):
        version = f"{source} {size} {step}"
        reports = pushed(ranks, version, ["unique", step])
        assert reports[0]["rounds"] >= 3
        assert differences(fleet.url, CONFIG, unique_weights(CONFIG, step), LAYOUT) == []
        assert info(fleet.url)["weight_version"] == version
        # Every rank has the same report, but for the times that are its own.
        own = ("seconds", "stage_seconds")
        assert len({repr({key: value for key, value in r.items() if key not in own}) for r in reports}) == 1
    assert answer(fleet.url)["weight_version"] == version
    assert ranks.all("close") == [None] * size


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = write_checkpoint(tmp_path_factory.mktemp("uneven"), UNEVEN, scaled_weights(UNEVEN, 0))
    with started_server(directory, tp=2) as server:
        yield server


def test_ranks_that_gather_as_they_go_never_wait_in_a_circle_however_rounds_are_cut(
    uneven: RunningServer, start: Start
) -> None:
    ranks = start(2, UNEVEN)
    for step, bucket in enumerate((1, 3000, 9000, 20000)):
        ranks.all("connect", [uneven.url], "gathered", ["unique", 0], {"bucket_bytes": bucket})
        pushed(ranks, str(bucket), ["unique", step])
        assert differences(uneven.url, UNEVEN, unique_weights(UNEVEN, step), Layout(tp=2)) == []
        ranks.all("close")


def test_with_two_engines_each_gets_only_its_own_entries_and_names_only_once(
    fleet: RunningServer, checkpoint: Path, start: Start
) -> None:
    other_layout = Layout(tp=1, pp=2)
    layouts = {fleet.engine_id: LAYOUT}
    with started_server(checkpoint, pp=2) as other:
        layouts[other.engine_id] = other_layout
        ranks = start(2)
        ranks.all("connect", [fleet.url, other.url], "module", ["unique", 0], {})
        ranks.one(0, "sent")
        reports = [pushed(ranks, "1", ["unique", 1])[0]]
        first = ranks.one(0, "sent")
        reports.append(pushed(ranks, "2", ["unique", 2])[0])
        second = ranks.one(0, "sent")
        for url, layout in ((fleet.url, LAYOUT), (other.url, other_layout)):
            assert differences(url, CONFIG, unique_weights(CONFIG, 2), layout) == []
            assert info(url)["weight_version"] == "2"

    for server, calls in zip((fleet, other), first, strict=True):
        layout = layouts[server.engine_id]
        entries = [(kind, said) for kind, _, said in calls if said is not None]
        assert [kind for kind, _ in entries] == ["prepare", *["install"] * reports[0]["rounds"]]
        for kind, said in entries:
            assert list(said) == [str(rank) for rank in range(workers(layout))]
            for rank, body in said.items():
                assert (body["engine"], body["rank"]) == (server.engine_id, int(rank))
                if kind == "prepare":
                    assert set(body["schedule"]["names"]) == touched(CONFIG, layout, int(rank))
    for calls in second:
        for kind, _, said in calls:
            if kind == "prepare":
                assert [body["schedule"] for body in said.values()] == [None] * len(said)
    for earlier, later in zip(first, second, strict=True):
        assert prepare_bytes(later) < prepare_bytes(earlier) / 2
    # What an install carries does not grow with what it installs.
    installs = [nbytes for one in (first, second) for calls in one for kind, nbytes, _ in calls if kind == "install"]
    assert max(installs) < 2048
    assert reports[1]["request_bytes"] < reports[0]["request_bytes"] - sum(map(prepare_bytes, first)) / 2


def prepare_bytes(calls: list[Any]) -> int:
    return sum(nbytes for kind, nbytes, _ in calls if kind == "prepare")


def test_nothing_is_pickled_between_trainer_ranks(fleet: RunningServer, start: Start) -> None:
    ranks = start(2)
    ranks.all("forbid_pickle")
    ranks.all("connect", [fleet.url], "gathered", ["unique", 0], {})
    pushed(ranks, "1", ["unique", 1])
    assert ranks.all("close") == [None, None]
    assert differences(fleet.url, CONFIG, unique_weights(CONFIG, 1), LAYOUT) == []
