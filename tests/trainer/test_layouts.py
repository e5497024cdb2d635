"""Laying out: it is collective, and whatever stopped it on one rank, all of them do it again, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rankcast
from direct.ranks import Ranks, ranks
from rankcast import LimitError, ModuleSource, RankcastError, Receiver
from rankcast.trainer import staging
from rankcast.trainer.exports import Exports

ROWS, COLUMNS = 200, 300


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(ROWS, COLUMNS))
        self.b = nn.Parameter(torch.randn(ROWS, COLUMNS))


@pytest.fixture
def served() -> Iterator[tuple[Two, Receiver]]:
    model = Two()
    receiver = Receiver(model)
    yield model, receiver
    receiver.close()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def attempted(trainer: Ranks, version: str) -> list[str]:
    """What each rank's push came to: nothing, or its error."""

    def push(rank: int) -> str:
        try:
            trainer.syncs[rank].push(version)
        except RankcastError as failure:
            return str(failure)
        return ""

    return trainer.all(push)


@pytest.mark.parametrize("unlucky", [0, 1])
@pytest.mark.parametrize("where", ["before anything is made", "when the buffers are made"])
def test_a_layout_that_failed_on_one_rank_is_made_again_by_all_of_them_at_the_next_push(
    unlucky: int, where: str, served: tuple[Two, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, receiver = served
    trained = [Two() for _ in range(2)]
    for one in trained:
        one.load_state_dict(trained[0].state_dict())
        one.share_memory()
    patched, name = (Exports, "_lay_out") if where.startswith("before") else (staging.Staging, "__init__")
    right: Any = getattr(patched, name)

    def no_room(self: Any, *arguments: Any, **named: Any) -> None:
        rank = self._group.rank if isinstance(self, Exports) else named["rank"]
        if rank == unlucky:
            raise LimitError("no room (simulated)")
        right(self, *arguments, **named)

    with ranks(receiver, [ModuleSource(one) for one in trained], mode="ranklocal", timeout=20) as trainer:
        assert attempted(trainer, "1") == ["", ""]
        for one in trained:
            one.a.data = one.a.data.clone()
        monkeypatch.setattr(patched, name, no_room)
        assert all("no room (simulated)" in said for said in attempted(trainer, "2"))
        monkeypatch.setattr(patched, name, right)
        for one in trained:
            with torch.no_grad():
                one.a.add_(1)
        assert attempted(trainer, "3") == ["", ""]
        assert equal(model, trained[0])
        assert attempted(trainer, "4") == ["", ""]


def test_staging_is_there_again_after_a_layout_that_failed_and_a_tensor_that_went_back_to_its_place(
    served: tuple[Two, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, receiver = served
    trained = Two()
    trained.share_memory()
    with rankcast.connect(receiver, trained, mode="ranklocal", timeout=20) as sync:
        sync.push("1")
        place = trained.a.data
        trained.a.data = place.clone()

        def no_room(*arguments: Any, **named: Any) -> Any:
            raise LimitError("no room (simulated)")

        with monkeypatch.context() as patching:
            patching.setattr(staging, "create_segment", no_room)
            with pytest.raises(RankcastError, match="no room"):
                sync.push("2")
        trained.a.data = place
        with torch.no_grad():
            trained.a.add_(1)
        for version in ("3", "4"):
            sync.push(version)
            assert equal(model, trained)


def test_buffers_are_kept_over_a_push_that_failed_elsewhere(served: tuple[Two, Receiver]) -> None:
    _, receiver = served
    trained = Two()
    source = ModuleSource(trained)
    with rankcast.connect(receiver, source, mode="ranklocal", timeout=20) as sync:
        sync.push("1")
        handles = sync._exports.staging and sync._exports.staging.handles
        weight = trained.a
        trained.a = nn.Parameter(torch.zeros(3))
        with pytest.raises(RankcastError, match=r"a was float32\[200, 300\] at connect"):
            sync.push("2")
        trained.a = weight
        sync.push("3")
        assert (sync._exports.staging and sync._exports.staging.handles) == handles
