"""Which entry of a payload a worker takes: by list position, by identity, or the one dict that is for all."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from by_hand import ByHand, codes
from fleets_inprocess import OneValue
from rankcast import Receiver, Worker
from rankcast.manifest import Manifest
from rankcast.topology import engine_rank, new_engine_id

GRIDS = list(itertools.product((1, 2, 3), (1, 2), (1, 2, 3, 4)))


class Grid:
    """One worker with one value for each place of a (dp, pp, tp) grid, and a trainer with a value for each."""

    def __init__(self, dp: int, pp: int, tp: int) -> None:
        engine = new_engine_id()
        self.models: list[OneValue] = []
        self.receivers: list[Receiver] = []
        for dp_index, pp_index, tp_index in itertools.product(range(dp), range(pp), range(tp)):
            rank = engine_rank(dp_index=dp_index, world_size=pp * tp, rank=pp_index * tp + tp_index)
            worker = Worker(engine=engine, rank=rank, workers=dp * pp * tp, dp=dp_index, pp=pp_index, tp=tp_index, ep=0)
            self.models.append(OneValue())
            self.receivers.append(Receiver(self.models[-1], worker=worker))
        # Tensors of one name for different workers: each lies at a place of its own in one segment.
        values = {f"value of {rank}": torch.full((1,), float(rank)) for rank in range(len(self.models))}
        self.trainer = ByHand(self.receivers, values, installs=1)

    def bare(self, rank: int) -> dict[str, Any]:
        entry = self.trainer.bare([f"value of {rank}"])
        return {**entry, "names": ["value"]}

    @property
    def values(self) -> list[float]:
        return [model.value.item() for model in self.models]

    def update(self, payload: Any) -> None:
        for receiver in self.receivers:
            receiver.start_weight_update()
        for receiver in self.receivers:
            receiver.update_weights(payload)
        for receiver in self.receivers:
            receiver.finish_weight_update()

    def close(self) -> None:
        self.trainer.segment.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture(params=GRIDS, ids=lambda grid: "dp{}pp{}tp{}".format(*grid))
def grid(request: pytest.FixtureRequest) -> Iterator[Grid]:
    made = Grid(*request.param)
    yield made
    made.close()


@pytest.fixture
def small() -> Iterator[Grid]:
    made = Grid(2, 1, 2)
    yield made
    made.close()


def test_a_list_gives_worker_i_entry_i(grid: Grid) -> None:
    grid.update([grid.bare(rank) for rank in range(len(grid.models))])
    assert grid.values == [float(rank) for rank in range(len(grid.models))]
    assert all(receiver.servable for receiver in grid.receivers)


def test_the_same_entries_by_identity_reach_the_same_workers(grid: Grid) -> None:
    # All of them receive a "value"; where it lies is each worker's own entry's business.
    grid.trainer.manifest = Manifest(("value",), ("float32",), ((1,),))
    for reports in (grid.trainer.init(), grid.trainer.claim(), grid.trainer.start()):
        assert codes(reports) == [()] * len(grid.models)

    def body(receiver: Receiver) -> Any:
        offset = grid.trainer.offsets[f"value of {receiver.worker.rank}"]
        grid.trainer.offsets["value"] = offset
        return grid.trainer.prepare_body(receiver)

    assert codes(grid.trainer.send(body)) == [()] * len(grid.models)
    assert codes(grid.trainer.install(1)) == [()] * len(grid.models)
    assert codes(grid.trainer.finish()) == [()] * len(grid.models)
    assert grid.values == [float(rank) for rank in range(len(grid.models))]


@pytest.mark.parametrize(("dp", "pp", "tp"), [(2, 1, 1), (3, 2, 4), (2, 2, 2)])
def test_a_replica_that_was_created_again_is_known_by_its_index_and_not_its_rank(dp: int, pp: int, tp: int) -> None:
    made = Grid(dp, pp, tp)
    try:
        # Its data-parallel rank is 0 now; only the index says which replica it is.
        rank_within, world = pp * tp - 1, pp * tp
        again = engine_rank(dp_index=dp - 1, world_size=world, rank=rank_within)
        assert again != 0 * world + rank_within
        made.update([made.bare(rank) for rank in range(len(made.models))])
        assert made.models[again].value.item() == float(again)
    finally:
        made.close()


def test_a_dict_is_the_same_for_every_worker(grid: Grid) -> None:
    payload = grid.bare(0)
    before = copy.deepcopy(payload)
    grid.update(payload)
    assert grid.values == [0.0] * len(grid.models)
    assert payload == before


def test_a_bare_empty_entry_is_delivered_and_changes_nothing(small: Grid) -> None:
    payload: list[dict[str, Any]] = [{"names": []} for _ in small.models]
    payload[2] = small.bare(2)
    small.update(payload)
    assert small.values == [-1.0, -1.0, 2.0, -1.0]
    assert [receiver._session.generation for receiver in small.receivers] == [1, 1, 1, 1]
    assert all(receiver.servable for receiver in small.receivers)


def test_an_empty_payload_for_everybody_changes_nothing(small: Grid) -> None:
    small.update({"names": []})
    assert small.values == [-1.0] * 4
    assert all(receiver.servable and receiver.state == "idle" for receiver in small.receivers)


def test_an_empty_entry_of_our_own_is_delivered_and_changes_nothing(small: Grid) -> None:
    """A model without parameters has nothing to receive, and is as much a part of the session as the others."""
    empty = [Receiver(torch.nn.Module(), worker=receiver.worker) for receiver in small.receivers]
    with ByHand(empty, {"value": torch.ones(1)}) as trainer:
        trainer.manifest = trainer.manifest.take([])
        trainer.open()
        assert codes(trainer.prepare()) == [()] * 4
        for sequence in (1, 2):
            reports = trainer.install(sequence)
            assert codes(reports) == [()] * 4
            assert [(report.tensors, report.nbytes) for report in reports] == [(0, 0)] * 4
        assert codes(trainer.finish()) == [()] * 4
        assert [report.attested_version for report in trainer.release(published=True)] == ["by hand"] * 4
    assert [receiver.weight_version for receiver in empty] == ["by hand"] * 4
    for receiver in empty:
        receiver.close()


def test_an_empty_entry_does_not_make_a_broken_worker_servable() -> None:
    model = OneValue()
    model.register_parameter("other", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    receiver = Receiver(model)
    with ByHand([receiver], {"value": torch.ones(1), "other": torch.ones(1)}) as trainer:
        receiver.start_weight_update()
        receiver.update_weights(trainer.bare(["value"]))
        with pytest.raises(Exception, match="does not fill every parameter"):
            receiver.finish_weight_update()
        assert not receiver.servable
        receiver.start_weight_update()
        receiver.update_weights({"names": []})
        with pytest.raises(Exception, match="nothing came"):
            receiver.finish_weight_update()
        assert not receiver.servable
        assert receiver.state == "unusable"
        receiver.start_weight_update()
        receiver.update_weights(trainer.bare(["value"]))
        receiver.update_weights(trainer.bare(["other"]))
        receiver.finish_weight_update()
        assert receiver.servable
    receiver.close()
