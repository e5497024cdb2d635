"""Trainer ranks, as processes: what each gets, and that whatever happens to one of them reaches all.

It knows the contract of `TrainerGroup`; it must not know how a group is wired. An answer that must come before a
group's timeout (60 s) is waited for 10 s.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.group_ranks import Ranks, running

SOON = 10.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with running(3, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture
def ranks(fleet: Ranks) -> Iterator[Ranks]:
    """Three ranks with a group of their own for this test, in their first epoch."""
    assert fleet.all("form", 60.0) == [[0, 3], [1, 3], [2, 3]]
    assert fleet.all("begin") == [None] * 3
    yield fleet
    assert fleet.all("close") == [None] * 3


def raised(answer: Any) -> str:
    assert isinstance(answer, dict), f"no error but {answer}"
    assert answer["error"] == "TrainerError"
    return str(answer["text"])


def each(ranks: Ranks, call: str, what: str) -> list[Any]:
    for rank in range(ranks.size):
        ranks.ask(rank, call, f"from {rank}", what)
    return [ranks.answer(rank) for rank in range(ranks.size)]


def test_every_call_gives_each_rank_what_it_says(ranks: Ranks) -> None:
    everything = ["from 0", "from 1", "from 2"]
    for _ in range(3):
        assert each(ranks, "gather", "g") == [everything, [], []]
        assert each(ranks, "broadcast", "b") == ["from 0"] * 3
        assert each(ranks, "exchange", "e") == [everything] * 3


def test_empty_and_large_data_arrive_whole(ranks: Ranks) -> None:
    assert ranks.all("exchange_large", 0) == [True] * 3
    assert ranks.all("exchange_large", 20_000_000) == [True] * 3


def test_ranks_may_run_ahead_of_rank_0(ranks: Ranks) -> None:
    for number in range(50):
        for rank in (1, 2):
            ranks.ask(rank, "gather", str(rank), f"call {number}")
            assert ranks.answer(rank) == []
    for number in range(50):
        ranks.ask(0, "gather", "0", f"call {number}")
        assert ranks.answer(0) == ["0", "1", "2"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_wakes_every_waiting_rank_with_its_text(ranks: Ranks, failing: int) -> None:
    others = [rank for rank in range(3) if rank != failing]
    for rank in others:
        ranks.ask(rank, "exchange", "", "x")
    ranks.ask(failing, "fail", "the disk is full")
    assert ranks.answer(failing) is None
    texts = [raised(ranks.answer(rank, SOON)) for rank in others]
    assert texts[0] == texts[1]
    assert "the disk is full" in texts[0]
    assert f"trainer rank {failing} (pid {ranks.pid(failing)}" in texts[0]


def test_a_failure_is_raised_by_the_next_call_of_ranks_that_were_not_waiting(ranks: Ranks) -> None:
    ranks.ask(2, "fail", "no more")
    assert ranks.answer(2) is None
    # Rank 0 hears of it when it waits; rank 1 only from rank 0.
    ranks.ask(0, "gather", "", "x")
    assert "no more" in raised(ranks.answer(0, SOON))
    ranks.ask(1, "broadcast", "", "x")
    assert "no more" in raised(ranks.answer(1, SOON))


def test_the_first_failure_of_an_epoch_is_the_one_that_all_report(ranks: Ranks) -> None:
    for rank in (0, 1):
        ranks.ask(rank, "exchange", "", "x")
    for text in ("first", "second"):
        ranks.ask(2, "fail", text)
        assert ranks.answer(2) is None
    assert all("first" in raised(ranks.answer(rank, SOON)) for rank in (0, 1))
    assert "first" in raised(ranks.all("check")[1])


def test_the_next_epoch_works_and_hears_nothing_of_the_last(ranks: Ranks) -> None:
    ranks.ask(1, "gather", "stale", "x")
    assert ranks.answer(1) == []
    ranks.ask(2, "fail", "once")
    assert ranks.answer(2) is None
    ranks.ask(0, "gather", "", "x")
    assert "once" in raised(ranks.answer(0, SOON))
    assert ranks.all("begin") == [None] * 3
    assert each(ranks, "gather", "x")[0] == ["from 0", "from 1", "from 2"]
    assert ranks.all("check") == [None] * 3


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (["gather", "gather", "gather"], ["gather 'a'", "gather 'b'"]),
        (["gather", "broadcast", "gather"], ["gather 'a'", "broadcast 'b'"]),
        (["broadcast", "exchange", "broadcast"], ["broadcast 'a'", "exchange 'b'"]),
    ],
)
def test_ranks_that_make_different_calls_all_say_so(ranks: Ranks, calls: list[str], said: list[str]) -> None:
    for rank, call in enumerate(calls):
        ranks.ask(rank, call, "", "b" if rank == 1 else "a")
    answers = [ranks.answer(rank, SOON) for rank in range(3)]
    text = raised(answers[0])
    assert all(part in text for part in [*said, "trainer rank 0", "trainer rank 1"])
    if calls[1] != "gather":  # a gather does not wait elsewhere than on rank 0
        assert raised(answers[1]) == text
    assert ranks.all("begin") == [None] * 3


def test_a_rank_that_begins_anew_without_telling_is_named(ranks: Ranks) -> None:
    for rank in (0, 1):
        ranks.ask(rank, "exchange", "", "x")
    ranks.ask(2, "begin")
    texts = [raised(ranks.answer(rank, SOON)) for rank in (0, 1)]
    assert all("trainer rank 2" in text and "begins another" in text for text in texts)
    for rank in (0, 1):
        ranks.ask(rank, "begin")
    assert [ranks.answer(rank) for rank in range(3)] == [None] * 3
    assert each(ranks, "broadcast", "x") == ["from 0"] * 3


def test_a_rank_that_leaves_after_its_last_call_spoils_it_for_nobody(ranks: Ranks) -> None:
    ranks.ask(1, "gather", "1", "last")
    assert ranks.answer(1) == []
    ranks.ask(1, "close")
    assert ranks.answer(1) is None
    for rank in (2, 0):
        ranks.ask(rank, "gather", str(rank), "last")
    assert ranks.answer(2, SOON) == []
    assert ranks.answer(0, SOON) == ["0", "1", "2"]
    for rank in (0, 2):
        ranks.ask(rank, "begin")
    for rank in (0, 2):
        text = raised(ranks.answer(rank, SOON))
        assert f"trainer rank 1 (pid {ranks.pid(1)}" in text
        assert "left the group" in text


def test_a_call_after_close_is_refused(ranks: Ranks) -> None:
    ranks.ask(1, "close")
    assert ranks.answer(1) is None
    ranks.ask(1, "begin")
    assert "connect again" in raised(ranks.answer(1, SOON))


def test_a_stopped_rank_is_named_with_what_was_waited_for_and_comes_back(fleet: Ranks) -> None:
    assert fleet.all("form", 3.0) == [[0, 3], [1, 3], [2, 3]]
    assert fleet.all("begin") == [None] * 3
    fleet.signal(2, signal.SIGSTOP)
    try:
        for rank in range(3):
            fleet.ask(rank, "exchange", "", "manifests")
        texts = [raised(fleet.answer(rank, 30.0)) for rank in (0, 1)]
    finally:
        fleet.signal(2, signal.SIGCONT)
    assert texts[0] == texts[1]
    for part in (f"trainer rank 2 (pid {fleet.pid(2)}", "3 s", "exchange 'manifests'"):
        assert part in texts[0]
    assert raised(fleet.answer(2, SOON)) == texts[0]
    assert fleet.all("begin") == [None] * 3
    assert each(fleet, "broadcast", "x") == ["from 0"] * 3
    assert fleet.all("close") == [None] * 3


def test_a_stopped_rank_0_is_named_by_the_others(fleet: Ranks) -> None:
    assert fleet.all("form", 3.0) == [[0, 3], [1, 3], [2, 3]]
    assert fleet.all("begin") == [None] * 3
    fleet.signal(0, signal.SIGSTOP)
    try:
        for rank in (1, 2):
            fleet.ask(rank, "broadcast", "", "prepared")
        texts = [raised(fleet.answer(rank, 30.0)) for rank in (1, 2)]
    finally:
        fleet.signal(0, signal.SIGCONT)
    assert all(f"trainer rank 0 (pid {fleet.pid(0)}" in text and "broadcast 'prepared'" in text for text in texts)
    assert fleet.all("begin") == [None] * 3
    assert fleet.all("close") == [None] * 3


@pytest.mark.parametrize("working", [0, 2])
def test_a_rank_that_pulses_is_waited_for_beyond_the_timeout(fleet: Ranks, working: int) -> None:
    assert fleet.all("form", 2.5) == [[0, 3], [1, 3], [2, 3]]
    assert fleet.all("begin") == [None] * 3
    fleet.ask(working, "pulse_for", 6.0)
    fleet.ask(working, "exchange", str(working), "x")
    others = [rank for rank in range(3) if rank != working]
    for rank in others:
        fleet.ask(rank, "exchange", str(rank), "x")
    assert fleet.answer(working) is None
    assert [fleet.answer(rank) for rank in range(3)] == [["0", "1", "2"]] * 3
    assert fleet.all("close") == [None] * 3


def test_descriptors_and_threads_stay_flat_over_many_groups(fleet: Ranks) -> None:
    for counts in fleet.all("cycles", 12):
        assert counts[1:] == [counts[1]] * (len(counts) - 1)


def test_a_group_of_some_ranks_numbers_them_anew(fleet: Ranks) -> None:
    assert fleet.all("form", 60.0, [2, 1]) == [[], [0, 2], [1, 2]]
    members = (1, 2)
    for call in ("begin", "exchange", "close"):
        for rank in members:
            fleet.ask(rank, call, *([str(rank), "x"] if call == "exchange" else []))
        assert [fleet.answer(rank) for rank in members] == [["1", "2"] if call == "exchange" else None] * 2


@pytest.mark.parametrize("dying", [0, 1])
def test_a_killed_rank_is_named_by_all_at_once_and_by_every_later_call(tmp_path: Path, dying: int) -> None:
    with running(3, tmp_path) as ranks:
        assert ranks.all("form", 60.0) == [[0, 3], [1, 3], [2, 3]]
        assert ranks.all("begin") == [None] * 3
        others = [rank for rank in range(3) if rank != dying]
        for rank in others:
            ranks.ask(rank, "exchange", "", "x")
        ranks.signal(dying, signal.SIGKILL)
        for rank in others:
            text = raised(ranks.answer(rank, SOON))
            assert f"trainer rank {dying} (pid {ranks.pid(dying)} on {os.uname().nodename}) died" in text
        for call in (["check"], ["gather", "", "y"], ["broadcast", "", "y"], ["begin"], ["begin"]):
            for rank in others:
                ranks.ask(rank, *call)
            for rank in others:
                assert f"trainer rank {dying}" in raised(ranks.answer(rank, SOON))
        for rank in others:
            ranks.ask(rank, "close")
            assert ranks.answer(rank, SOON) is None


def test_a_killed_rank_is_noticed_although_its_child_keeps_its_connection_open(tmp_path: Path) -> None:
    with running(2, tmp_path) as ranks:
        assert ranks.all("form", 60.0) == [[0, 2], [1, 2]]
        assert ranks.all("begin") == [None] * 2
        ranks.ask(1, "fork")
        child = ranks.answer(1)
        try:
            ranks.ask(0, "gather", "", "x")
            ranks.signal(1, signal.SIGKILL)
            assert f"trainer rank 1 (pid {ranks.pid(1)}" in raised(ranks.answer(0, SOON))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_process_group_without_a_cpu_backend_gets_a_group_all_the_same(tmp_path: Path) -> None:
    with running(3, tmp_path, backend="cuda:gloo") as ranks:
        for _ in range(2):
            assert ranks.all("form", 60.0) == [[0, 3], [1, 3], [2, 3]]
            assert ranks.all("begin") == [None] * 3
            assert each(ranks, "exchange", "x") == [["from 0", "from 1", "from 2"]] * 3
            assert ranks.all("close") == [None] * 3
        for _ in range(2):
            assert ranks.all("form_local", 60.0, [0, 2]) == [[0, 2], [], [1, 2]]
            for rank in (0, 2):
                ranks.ask(rank, "begin")
            assert [ranks.answer(rank) for rank in (0, 2)] == [None] * 2
