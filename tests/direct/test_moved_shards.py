"""A storage that moves between pushes: the plan keeps its routes, and only who reads that storage is told again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import rankcast
from checkpoints import tiny_config
from direct.origins import Named, laid_out, put
from direct.ranks import Ranks
from fleets_inprocess import Fleet, WatchedClient, opened
from oracle import touched, unique_weights
from rankcast import Declared, DeclaredSource, ModuleSource
from rankcast.engines.reference.layout import Layout
from rankcast.plan.routes import Plan
from rankcast.trainer import direct, planning, shares

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=16, num_experts=4)
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
SHAPES = {name: bits.shape for name, bits in unique_weights(CONFIG, 0).items()}
EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"
EVERYBODYS = "model.norm.weight"
READERS = {rank for rank in range(LAYOUT.workers) if EXPERT in touched(CONFIG, LAYOUT, rank)}


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a storage of its own, large enough to be shared as it lies."""
    return torch.empty(2**15).as_strided(tensor.shape, tensor.contiguous().stride()).copy_(tensor)


class Moving:
    """Two trainer ranks that hold the same tensors, and what was said, planned and cut since they last pushed."""

    def __init__(self, sources: Callable[[int, Named], Any]) -> None:
        self.fleet = Fleet(CONFIG, LAYOUT)
        self.client = WatchedClient(self.fleet.receivers)
        self.modules = []
        for _ in range(2):
            tensors = laid_out("separate", SHAPES, torch.float32)
            self.modules.append(Named({name: elsewhere(tensor) for name, tensor in tensors.items()}))
        self.step = 0
        self.planned = mock.Mock(side_effect=direct.make_plan)
        self.cut = mock.Mock(side_effect=shares.cut_share)
        self._patches = [
            mock.patch.object(direct, "make_plan", self.planned),
            mock.patch.object(planning, "cut_share", self.cut),
        ]
        for patch in self._patches:
            patch.start()
        given = [sources(rank, module) for rank, module in enumerate(self.modules)]
        self.ranks = Ranks(self.client, given, mode="direct")
        self.push()

    def push(self) -> set[int]:
        """Push other weights, which every worker must hold then; returns the ranks of workers that were told anew."""
        self.step += 1
        weights = unique_weights(CONFIG, self.step)
        for module in self.modules:
            own = dict(module.named_parameters())
            for name, bits in weights.items():
                put(own[name], bits)
        self.planned.reset_mock()
        self.cut.reset_mock()
        self.ranks.push(str(self.step))
        assert self.fleet.differences(weights) == []
        (*_, last) = [payload for call, payload in self.client.payloads if call == "prepare"]
        return {int(rank) for rank, entry in last["entries"].items() if opened(entry)["program"] is not None}

    def move(self, rank: int, name: str) -> None:
        parameter = self.modules[rank].get_parameter(name)
        parameter.data = elsewhere(parameter.data)

    @property
    def plan(self) -> Plan:
        plan = self.ranks.syncs[0].plan
        assert plan is not None
        return plan

    def close(self) -> None:
        self.ranks.close()
        self.fleet.close()
        for patch in self._patches:
            patch.stop()


@pytest.fixture
def moving() -> Iterator[Moving]:
    made = Moving(lambda rank, module: ModuleSource(module))
    yield made
    made.close()


def reading(moving: Moving, rank: int, name: str) -> set[int]:
    """The workers that read the tensor ``name`` from trainer rank ``rank``."""
    said = moving.plan.explain(name)
    return {worker for worker in range(LAYOUT.workers) if _reads(said, worker, rank)}


def _reads(said: str, worker: int, rank: int) -> bool:
    return any(f"worker {worker} reads" in line and f"trainer rank {rank} " in line for line in said.splitlines())


def test_a_storage_that_moves_makes_no_new_plan_and_only_its_readers_are_told_again(moving: Moving) -> None:
    assert moving.push() == set()
    assert (moving.planned.call_count, moving.cut.call_count) == (0, 0)
    for name in (EXPERT, EVERYBODYS, "lm_head.weight"):
        for rank in range(2):
            readers = reading(moving, rank, name)
            moving.move(rank, name)
            assert moving.push() == readers
            assert (moving.planned.call_count, moving.cut.call_count) == (0, len(readers))
            assert moving.push() == set()
    assert reading(moving, 0, EXPERT) | reading(moving, 1, EXPERT) == READERS
    assert 0 < len(READERS) < LAYOUT.workers


def test_several_storages_that_move_at_once_on_several_ranks_are_read_where_they_are(moving: Moving) -> None:
    for _ in range(3):
        for rank in range(2):
            for name in list(SHAPES)[rank::2]:
                moving.move(rank, name)
        moving.push()
        assert moving.planned.call_count == 0
    assert moving.push() == set()


def test_a_storage_that_comes_to_lie_behind_another_one_needs_no_new_plan(moving: Moving) -> None:
    first, second = (moving.modules[0].get_parameter(name) for name in (EVERYBODYS, EXPERT))
    both = torch.empty(2**15)
    first.data = both[: first.numel()].view(first.shape).copy_(first.data)
    second.data = both[2**14 : 2**14 + second.numel()].view(second.shape).copy_(second.data)
    moving.push()
    assert moving.planned.call_count == 0


def test_a_move_before_a_push_that_failed_is_told_to_its_readers_by_the_next(moving: Moving) -> None:
    readers = reading(moving, 0, EXPERT) | reading(moving, 1, EXPERT)
    moving.client.fail["pause"] = RuntimeError("not now")
    for rank in range(2):
        moving.move(rank, EXPERT)
    with pytest.raises(rankcast.RankcastError, match="not now"):
        moving.ranks.push("lost")
    moving.client.fail.clear()
    moving.move(0, EVERYBODYS)
    assert moving.push() >= readers | reading(moving, 0, EVERYBODYS)
    assert moving.planned.call_count == 0


def test_boxes_that_become_others_are_planned_anew() -> None:
    cuts = {"at": 8}

    def declared(rank: int, module: Named) -> DeclaredSource:
        def all_of_it() -> Iterator[Declared]:
            for name, parameter in module.named_parameters():
                if name != EXPERT:
                    yield Declared(name, tuple(parameter.shape), parameter)
                    continue
            rows, columns = SHAPES[EXPERT]
            start, stop = (0, cuts["at"]) if rank == 0 else (cuts["at"], rows)
            box = ((start, stop), (0, columns))
            yield Declared(EXPERT, (rows, columns), module.get_parameter(EXPERT)[start:stop], box)

        return DeclaredSource(all_of_it)

    moving = Moving(declared)
    try:
        assert moving.push() == set()
        cuts["at"] = 4
        assert moving.push() >= READERS
        assert moving.planned.call_count == 1
    finally:
        moving.close()


def test_boxes_that_are_exchanged_between_ranks_over_the_same_memory_are_planned_anew() -> None:
    rows, columns = SHAPES[EXPERT]
    half = rows // 2
    modules = [Named(laid_out("separate", SHAPES, torch.float32)) for _ in range(2)]
    buffers = [torch.empty(half, columns) for _ in modules]
    starts = [0, half]

    def source(rank: int) -> DeclaredSource:
        def all_of_it() -> Iterator[Declared]:
            for name, parameter in modules[rank].named_parameters():
                if name != EXPERT:
                    yield Declared(name, tuple(parameter.shape), parameter)
            yield Declared(EXPERT, (rows, columns), buffers[rank], ((starts[rank], starts[rank] + half), (0, columns)))

        return DeclaredSource(all_of_it)

    with Fleet(CONFIG, LAYOUT) as fleet:
        trainer = Ranks(fleet.receivers, [source(0), source(1)], mode="direct", check="digest")
        try:
            for step in range(4):
                weights = unique_weights(CONFIG, step)
                for rank, module in enumerate(modules):
                    for name, parameter in module.named_parameters():
                        put(parameter, weights[name])
                    put(buffers[rank], weights[EXPERT][starts[rank] : starts[rank] + half])
                trainer.push(str(step))
                assert fleet.differences(weights) == []
                starts.reverse()
        finally:
            trainer.close()
