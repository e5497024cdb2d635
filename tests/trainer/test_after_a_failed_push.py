"""What a push that failed leaves behind: nothing of it may reach the next one, and what is said of it is true."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankcast
from direct.ranks import ranks
from rankcast import PushError, Receiver, StateError, TrainerError, UnsupportedError, Worker
from rankcast.control.inprocess import InProcessClient
from rankcast.process import this_process
from rankcast.rollout.installer import LoaderInstaller
from rankcast.topology import new_engine_id

SHAPE = (200, 300)
#: Claim, init, and the second claim: what goes by the init route at a push that meets an engine again.
SECOND_CLAIM = 3


class Losing(InProcessClient):
    """Its ``lost``-th message on the init route from now on does not arrive; the receivers may be replaced."""

    lost = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.lost -= 1
        if self.lost == 0:
            raise ConnectionError("lost on the way")
        super().init_weight_transfer_engine(init_info)

    def restart(self, receivers: Iterable[Receiver]) -> None:
        self._receivers = tuple(receivers)


class Taking(nn.Module):
    """A worker that takes one tensor of those that come, into the one that it has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.full(SHAPE, -1.0))
        self._name = name

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self._name:
                self.own.data.copy_(tensor)

    @property
    def value(self) -> float:
        (value,) = self.own.detach().unique().tolist()
        return float(value)


def engine_of(names: Iterable[str], *, may_ignore: bool = False) -> tuple[list[Taking], list[Receiver]]:
    """An engine that has just started, of a worker for each of ``names``."""
    models, engine = [Taking(name) for name in names], new_engine_id()
    receivers = []
    for rank, model in enumerate(models):
        worker = Worker(engine=engine, rank=rank, workers=len(models), tp=rank, process=this_process())
        installer = LoaderInstaller(model, model.load_weights, may_ignore=lambda name: may_ignore)
        receivers.append(Receiver(model, worker=worker, installer=installer))
    return models, receivers


def experts() -> nn.Module:
    module = nn.Module()
    for number in range(2):
        module.register_parameter(f"e{number}", nn.Parameter(torch.full(SHAPE, float(number))))
    return module


def test_a_storage_that_moved_before_a_push_that_failed_is_read_where_it_lies_by_the_next() -> None:
    trained, served = nn.Linear(300, 200, bias=False), nn.Linear(300, 200, bias=False)
    client = Losing([Receiver(served)])
    with rankcast.connect(client, trained, mode="direct", timeout=20) as sync:
        sync.push("1")
        flat = torch.randn(400, 300)
        trained.weight.data = flat[200:]
        client.lost = 1
        with pytest.raises(PushError, match="lost on the way"):
            sync.push("2")
        sync.push("3")
        assert torch.equal(served.weight, flat[200:])


@pytest.mark.parametrize("mode", ["ranklocal", "auto", "direct"])
def test_an_engine_that_came_back_with_other_experts_gets_those_also_after_a_push_that_failed(mode: str) -> None:
    (model,), receivers = engine_of(["e0"], may_ignore=True)
    client = Losing(receivers)
    with rankcast.connect(client, experts(), mode=mode, timeout=20) as sync:
        sync.push("1")
        assert model.value == 0.0
        (model,), receivers = engine_of(["e1"], may_ignore=True)
        client.restart(receivers)
        client.lost = SECOND_CLAIM
        with pytest.raises(PushError, match="lost on the way"):
            sync.push("2")
        assert model.value == -1.0
        sync.push("3")
        assert model.value == 1.0


@pytest.mark.parametrize("mode", ["ranklocal", "auto", "broadcast"])
def test_an_engine_that_came_back_without_a_worker_for_a_tensor_is_refused_by_every_push(mode: str) -> None:
    models, receivers = engine_of(["e0", "e1"])
    client = Losing(receivers)
    with rankcast.connect(client, experts(), mode=mode, timeout=20) as sync:
        sync.push("1")
        assert [model.value for model in models] == [0.0, 1.0]
        models, receivers = engine_of(["e0", "e0"])
        client.restart(receivers)
        for version in "23":
            with pytest.raises(PushError, match="unknown tensors, which no worker takes: e1"):
                sync.push(version)
            assert [model.value for model in models] == [-1.0, -1.0]
        models, receivers = engine_of(["e1", "e0"])
        client.restart(receivers)
        sync.push("4")
        assert [model.value for model in models] == [1.0, 0.0]


def test_a_tensor_that_cannot_go_the_way_that_was_agreed_is_refused_by_every_push() -> None:
    trained, served = experts(), experts()
    with rankcast.connect(Receiver(served), trained, mode="auto", timeout=20) as sync:
        sync.push("1")
        trained.e1.data = torch.from_numpy(np.full(SHAPE, 7, dtype=np.float32))
        for version in "23":
            lent = (
                r"e1 .* cannot go the way that was agreed at connect .*lent by or to another library.*: connect again"
            )
            with pytest.raises(PushError, match=lent):
                sync.push(version)
        assert float(served.e1.detach().mean()) == 1.0
    with rankcast.connect(Receiver(served), trained, mode="auto", timeout=20) as sync:
        sync.push("4")
    assert float(served.e1.detach().mean()) == 7.0


def test_a_push_that_fails_before_the_fleet_hears_of_it_says_what_the_last_one_left() -> None:
    trained, served = nn.Linear(300, 200), nn.Linear(300, 200)
    receiver = Receiver(served)

    def with_another_shape(version: str) -> str:
        weight, trained.weight = trained.weight, nn.Parameter(torch.zeros(3, 3))
        with pytest.raises(PushError) as failure:
            sync.push(version)
        trained.weight = weight
        return str(failure.value)

    class Writing(InProcessClient):
        writes = False

        def update_weights(self, payload: Any) -> None:
            super().update_weights(payload)
            if self.writes and receiver.state == "installed":
                with torch.no_grad():
                    trained.weight.add_(1)

    client = Writing([receiver])
    with rankcast.connect(client, trained, mode="direct", timeout=20) as sync:
        assert with_another_shape("0").endswith("nothing was said to the fleet: every worker serves what it had")
        sync.push("1")
        assert with_another_shape("2").endswith("nothing was said to the fleet: every worker serves '1'")
        client.writes = True
        with pytest.raises(PushError, match="unusable until the next full push"):
            sync.push("3")
        client.writes = False
        assert not receiver.servable
        said = with_another_shape("4")
        assert "nothing was said to the fleet: unusable until the next full push" in said
        assert "every worker serves" not in said
        sync.push("5")
        assert torch.equal(served.weight, trained.weight)


def test_a_direct_connection_refuses_by_the_same_error_whichever_push_is_the_first() -> None:
    lent = experts()
    lent.e0.data = torch.from_numpy(np.zeros(SHAPE, dtype=np.float32))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"e0 .* cannot go by route"):
            rankcast.connect(Receiver(experts()), lent, mode="direct", timeout=20)


def test_a_rank_that_missed_a_push_makes_the_next_one_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("direct.ranks.SECONDS", 5.0)
    served = nn.Linear(30, 20)
    sources = [nn.Linear(30, 20) for _ in range(2)]
    sources[1].load_state_dict(sources[0].state_dict())
    with ranks(Receiver(served), sources, mode="ranklocal") as trainer:
        trainer.push("1")
        with pytest.raises(TrainerError, match="no progress from trainer rank 1"):
            trainer.syncs[0].push("2")
        for version in ("3", "4"):
            with torch.no_grad():
                for source in sources:
                    source.weight.add_(1)
            trainer.push(version)
            assert torch.equal(served.weight, sources[0].weight)


@pytest.mark.parametrize("wrong", [5, "", "\ud800"])
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}])
def test_after_a_rank_gave_no_proper_version_the_next_push_is_made(who: set[int], wrong: object) -> None:
    served = nn.Linear(30, 20)
    sources = [nn.Linear(30, 20) for _ in range(2)]
    sources[1].load_state_dict(sources[0].state_dict())
    with ranks(Receiver(served), sources, mode="ranklocal") as trainer:

        def push(rank: int) -> type[BaseException]:
            with pytest.raises((StateError, PushError, TrainerError)) as refusal:
                trainer.syncs[rank].push(wrong if rank in who else "1")  # type: ignore[arg-type]
            return refusal.type

        assert {rank for rank, kind in enumerate(trainer.all(push)) if kind is StateError} == who
        trainer.push("2")
        assert torch.equal(served.weight, sources[0].weight)


def test_a_push_within_a_push_is_refused_and_the_first_one_goes_on() -> None:
    served, source = nn.Linear(30, 20), nn.Linear(30, 20)
    refused: list[str] = []

    def watch(progress: Any) -> None:
        try:
            sync.push("inner")
        except StateError as error:
            refused.append(error.message)

    receiver = Receiver(served)
    with rankcast.connect(receiver, source, progress=watch) as sync:
        sync.push("outer")
    assert receiver.weight_version == "outer"
    assert refused
    assert set(refused) == {"push within a push of the same sync, from another thread or its progress callback"}
