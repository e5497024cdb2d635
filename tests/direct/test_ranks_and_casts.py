"""Several trainer ranks with boxes at random, rounding on the way, and tensors that have to go another way.

As in ``test_every_worker``: every worker equals the oracle, bit for bit, after every push.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankcast
from checkpoints import as_torch, bits_of, tiny_config, write_checkpoint
from direct.models import models
from direct.origins import MODULES, Named, Origin, cut_boxes, declared, laid_out, put
from direct.ranks import ranks
from fleets_inprocess import Fleet, Weights
from oracle import unique_weights
from rankcast import ModuleSource
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout
from rankcast.rollout.installer import LoaderInstaller
from rankcast.trainer.sources import DeclaredSource


@settings(max_examples=25)
@given(model=models(), size=st.integers(1, 3), mode=st.sampled_from(["direct", "auto"]), seed=st.integers(0, 999))
def test_boxes_at_random_over_trainer_ranks_replicas_included_fill_every_worker(
    model: tuple[dict[str, Any], Layout], size: int, mode: str, seed: int
) -> None:
    config, layout = model
    random = np.random.default_rng(seed)
    shapes = {name: bits.shape for name, bits in unique_weights(config, 0).items()}
    boxes = cut_boxes(shapes, random)
    dtype = getattr(torch, config["dtype"])
    held = [laid_out("one storage", shapes, dtype) for _ in range(size)]
    sources = []
    for rank in range(size):
        mine = {}
        for name, cuts in boxes.items():
            # Every box is held by one rank at least: by the one that this says, and perhaps by others as a replica.
            mine[name] = [
                cut for at, cut in enumerate(cuts) if (at + len(name)) % size == rank or random.random() < 0.3
            ]
        sources.append(DeclaredSource(list(declared(held[rank], mine))))
    with Fleet(config, layout) as fleet, ranks(fleet.receivers, sources, mode=mode) as trainer:
        for step in (1, 2, 3):
            weights = unique_weights(config, step)
            for tensors in held:
                for name, bits in weights.items():
                    put(tensors[name], bits)
            report, *_ = trainer.push(str(step))
            assert fleet.differences(weights) == []
            assert report.worker_calls == layout.workers
            assert report.staged_bytes == report.cast_tensors == report.cast_nbytes == 0
        plan = trainer.syncs[0].plan
        assert plan is not None
        assert sum(plan.sender_bytes) == report.nbytes


def numbers(weights: Weights) -> dict[str, Any]:
    """float32 bits with every NaN made a large number: which NaN rounding gives depends, in torch, on strides."""
    exponent, fraction = np.uint32(0x7F800000), np.uint32(0x007FFFFF)
    found = {}
    for name, bits in weights.items():
        nan = ((bits & exponent) == exponent) & ((bits & fraction) != 0)
        found[name] = np.where(nan, bits ^ np.uint32(0x00800000), bits)
    return found


def rounded(weights: Weights) -> dict[str, Any]:
    return {name: bits_of(tensor.to(torch.bfloat16)) for name, tensor in as_torch(weights).items()}


@settings(max_examples=15)
@given(
    model=models(dtypes=("bfloat16",)),
    kind=st.sampled_from([*MODULES, "file"]),
    said=st.booleans(),
    mode=st.sampled_from(["direct", "auto"]),
)
def test_a_float32_master_reaches_bfloat16_workers_rounded_as_to_rounds(
    model: tuple[dict[str, Any], Layout], kind: str, said: bool, mode: str
) -> None:
    config, layout = model
    wide = {**config, "dtype": "float32"}
    shapes = {name: bits.shape for name, bits in unique_weights(config, 0).items()}
    with tempfile.TemporaryDirectory() as folder, Fleet(config, layout) as fleet:
        first = numbers(unique_weights(wide, 1))
        if kind == "file":
            write_checkpoint(folder, wide, first, shards=2)
            with rankcast.connect(fleet.receivers, Path(folder), mode=mode, timeout=60) as sync:
                sync.push("1")
            assert fleet.differences(rounded(first)) == []
            return
        tensors = laid_out(kind, shapes, torch.float32)
        # With the wire's dtype stated, or found out from the workers.
        source = ModuleSource(Named(tensors), dtype=torch.bfloat16 if said else None)
        with rankcast.connect(fleet.receivers, source, mode=mode, timeout=60) as sync:
            for step in (1, 2, 3):
                weights = numbers(unique_weights(wide, step))
                for name, bits in weights.items():
                    put(tensors[name], bits)
                report = sync.push(str(step))
                assert fleet.differences(rounded(weights)) == []
                assert report.direct_tensors == report.cast_tensors == report.tensors
                assert report.cast_nbytes == report.direct_nbytes


@pytest.mark.parametrize("kind", ["one storage", "transposed", "strided"])
def test_rounding_keeps_what_is_no_number_no_number(kind: str) -> None:
    bits = unique_weights(tiny_config(num_hidden_layers=1), 1)["lm_head.weight"]
    tensors = laid_out(kind, {"weight": bits.shape}, torch.float32)
    put(tensors["weight"], bits)
    served = torch.nn.Linear(bits.shape[1], bits.shape[0], bias=False, dtype=torch.bfloat16)
    with rankcast.connect(rankcast.Receiver(served), Named(tensors), mode="direct", timeout=60) as sync:
        sync.push("1")
    expected = tensors["weight"].to(torch.bfloat16)
    assert 0 < int(expected.isnan().sum()) < expected.numel()
    assert torch.equal(served.weight.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(served.weight[number].view(torch.int16), expected[number].view(torch.int16))


def computing(names: Iterable[str]) -> Any:
    """Makes installers whose loader computes (a copy) with ``names`` before it slices them."""
    chosen = frozenset(names)

    def installer(rank: int, model: ReferenceModel) -> LoaderInstaller:
        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
            return model.load_weights((name, tensor.clone() if name in chosen else tensor) for name, tensor in weights)

        return LoaderInstaller(model, load, may_ignore=lambda name: name == "lm_head.weight")

    return installer


@settings(max_examples=20)
@given(model=models(), kind=st.sampled_from(["separate", "one storage", "2 files"]), data=st.data())
def test_auto_takes_for_each_tensor_the_way_that_is_possible(
    model: tuple[dict[str, Any], Layout], kind: str, data: st.DataObject
) -> None:
    config, layout = model
    names = list(unique_weights(config, 0))
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1))
    bucket = data.draw(st.sampled_from([1, 500, 2**20]))
    with tempfile.TemporaryDirectory() as folder, Fleet(config, layout, installer=computing(chosen)) as fleet:
        origin = Origin(kind, config, Path(folder))
        for step in (1, 2, 3):
            weights = unique_weights(config, step)
            origin.become(weights, str(step))
            if step == 1 or not origin.lasting:
                sync = rankcast.connect(fleet.receivers, origin.source, bucket_bytes=bucket, timeout=60)
            report = sync.push(str(step))
            assert fleet.differences(weights) == []
            assert report.direct_tensors == len(names) - len(chosen)
            assert report.through_loader == {"through the loader: clone computes what is copied": len(chosen)}
            if not origin.lasting:
                sync.close()
        sync.close()


def test_tensors_that_cannot_be_shared_are_staged_and_the_others_go_direct() -> None:
    config = tiny_config(num_hidden_layers=1, hidden_size=64, vocab_size=512)
    first = unique_weights(config, 1)
    tensors = laid_out("one storage", {name: bits.shape for name, bits in first.items()}, torch.float32)
    lent = np.zeros(first["lm_head.weight"].shape, dtype=np.float32)
    tensors["lm_head.weight"] = torch.from_numpy(lent)
    with Fleet(config, Layout(tp=2)) as fleet:
        with rankcast.connect(fleet.receivers, Named(tensors), timeout=60) as sync:
            for step in (1, 2, 3):
                weights = unique_weights(config, step)
                for name, bits in weights.items():
                    put(tensors[name], bits)
                report = sync.push(str(step))
                assert fleet.differences(weights) == []
                assert report.staged_bytes == lent.nbytes
                ((reason, count),) = report.through_loader.items()
                assert count == 1
                assert "lent by or to another library" in reason


class Normalised(torch.nn.Module):
    """A model with buffers: statistics, and a count that is no floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(300, 80)
        self.norm = torch.nn.BatchNorm1d(80)


@pytest.mark.parametrize("mode", ["direct", "auto"])
def test_persistent_buffers_go_with_the_parameters(mode: str) -> None:
    trained, served = Normalised(), Normalised()
    receiver = rankcast.Receiver(served)
    with rankcast.connect(receiver, trained, mode=mode, timeout=60) as sync:
        for step in (1, 2, 3):
            trained.norm(trained.layer(torch.randn(16, 300, generator=torch.Generator().manual_seed(step))))
            with torch.no_grad():
                trained.layer.weight.add_(step)
            report = sync.push(str(step))
            assert report.direct_tensors == 7
            for name, tensor in trained.state_dict().items():
                assert torch.equal(tensor, served.state_dict()[name]), name
    assert int(served.norm.num_batches_tracked) == 3


class Counting(LoaderInstaller):
    """Counts what the loader is given."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.given: list[str] = []

    def install(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights = list(weights)
        self.given += [name for name, _ in weights]
        super().install(weights)


def test_the_loader_is_not_run_by_a_direct_push() -> None:
    config = tiny_config(num_hidden_layers=1)
    weights = unique_weights(config, 1)
    made: list[Counting] = []

    def installer(rank: int, model: ReferenceModel) -> Counting:
        made.append(Counting(model))
        return made[-1]

    with Fleet(config, Layout(tp=2), installer=installer) as fleet:
        for mode in ("direct", "ranklocal"):
            with rankcast.connect(fleet.receivers, Named(as_torch(weights)), mode=mode, timeout=60) as sync:
                sync.push(mode)
            assert fleet.differences(weights) == []
            assert [bool(one.given) for one in made] == [mode == "ranklocal"] * 2
