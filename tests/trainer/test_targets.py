"""Receivers given as targets: of one engine all its workers, each once, or they are refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import rankcast
from rankcast import Receiver, UnsupportedError, Worker, cli
from rankcast.topology import new_engine_id

ENGINE = new_engine_id()


def receiver(rank: int, workers: int) -> Receiver:
    return Receiver(nn.Linear(3, 2), worker=Worker(engine=ENGINE, rank=rank, workers=workers))


def refused(targets: Any) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as refusal:
        rankcast.connect(targets, nn.Linear(3, 2), timeout=20)
    return refusal.value


def test_a_receiver_given_twice_is_refused_naming_it() -> None:
    mine = Receiver(nn.Linear(3, 2))
    other = Receiver(nn.Linear(3, 2))
    refusal = refused([mine, other, mine])
    assert f"the Receiver of {mine.worker.label} is given twice" in str(refusal)
    assert "give each Receiver once" in str(refusal)
    assert refusal.worker == mine.worker.label


def test_two_receivers_of_one_rank_are_refused_naming_the_rank_and_the_ways_out() -> None:
    refusal = refused([receiver(1, 2), receiver(1, 2)])
    assert "two Receivers say that they are worker 1 of 2" in str(refusal)
    assert "an engine id of its own" in str(refusal)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([(0, 2)], "rank 1 of 2 is missing"),
        ([(1, 2)], "rank 0 of 2 is missing"),
        ([(1, 4), (2, 4)], "ranks 0, 3 of 4 are missing"),
    ],
)
def test_receivers_that_are_not_all_of_their_engine_are_refused_naming_them_and_who_is_missing(
    given: list[tuple[int, int]], words: str
) -> None:
    mine = [receiver(rank, workers) for rank, workers in given]
    refusal = refused(mine)
    assert words in str(refusal)
    assert all(one.worker.label in str(refusal) for one in mine)
    assert "in one list" in str(refusal)
    assert "report channel" not in str(refusal)


def test_receivers_that_do_not_agree_on_their_number_are_refused_naming_both() -> None:
    refusal = refused([receiver(0, 2), receiver(1, 3)])
    assert "worker 0 of 2" in str(refusal)
    assert "worker 1 of 3" in str(refusal)


def test_all_receivers_of_two_engines_are_taken_in_any_order() -> None:
    other = new_engine_id()
    served, trained = [nn.Linear(3, 2) for _ in range(3)], nn.Linear(3, 2)
    workers = [
        Worker(engine=ENGINE, rank=1, workers=2),
        Worker(engine=other),
        Worker(engine=ENGINE, rank=0, workers=2),
    ]
    targets = [Receiver(model, worker=worker) for model, worker in zip(served, workers, strict=True)]
    with rankcast.connect(targets, trained, timeout=20) as sync:
        assert len(sync.push("1").workers) == 3
    assert all(torch.equal(model.weight, trained.weight) for model in served)


def test_no_password_of_a_url_is_in_what_is_said_of_its_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://me:hush@127.0.0.1:9"
    with pytest.raises(rankcast.PushError, match=r"http://127\.0\.0\.1:9") as refusal:
        rankcast.connect(url, nn.Linear(3, 2), timeout=20)
    assert "hush" not in str(refusal.value)
    assert "named twice" in str(refused([url, url + "/"]))
    assert "hush" not in str(refused([url, url + "/"]))
    assert "named twice" in str(refused([Receiver(nn.Linear(3, 2)), url, url]))
    for given in ([url], [url, "--json"]):
        monkeypatch.setattr(sys, "argv", ["rankcast", "status", *given])
        assert cli.main() != 0
    said = capsys.readouterr()
    assert "hush" not in said.out + said.err
    assert "http://127.0.0.1:9" in said.out
