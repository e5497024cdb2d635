"""Module walks that are remembered: nothing that was replaced goes unnoticed, and nothing is kept alive or locked.

It knows modules and what can be done to them between two pushes; it must not know pushes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rankcast.trainer.sources import ModuleSource, walked
from rankcast.trainer.sources.names import checkpoint_tensors
from rankcast.trainer.sources.walked import WalkedModule


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)


def model() -> nn.Module:
    made = nn.Module()
    made.embed = nn.Embedding(5, 3)
    made.layers = nn.ModuleList([Block(), Block()])
    made.head = nn.Linear(3, 5, bias=False)
    made.head.weight = made.embed.weight
    return made


def reorder(made: Any) -> None:
    own = made.layers[0].first._parameters
    own["weight"] = own.pop("weight")


def change_places(made: Any) -> None:
    first, second = made.layers[0], made.layers[1]
    made.layers[0], made.layers[1] = second, first


def add_modules(made: Any) -> None:
    made.add_module("wrapped", nn.Module())
    made.wrapped.add_module("module", nn.Linear(2, 2))
    made.wrapped.add_module("other", nn.Linear(2, 2))


def become_wrapper(made: Any) -> None:
    """The class of a known wrapper over the same contents makes its child's segment go."""
    if "wrapped" in made._modules:
        made.wrapped.__class__ = type("DataParallel", (nn.Module,), {})


def give_and_take(made: Any) -> None:
    """A set of names that changes and stays as large."""
    norm = made.layers[1].norm
    kept = "running_mean" if "running_mean" in norm._non_persistent_buffers_set else "running_var"
    other = "running_var" if kept == "running_mean" else "running_mean"
    norm._non_persistent_buffers_set.discard(kept)
    norm._non_persistent_buffers_set.add(other)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(*shape))


CHANGES: dict[str, Callable[[Any], None]] = {
    "a parameter": lambda made: setattr(made.layers[0].first, "weight", parameter(4, 3)),
    "a bias that was None": lambda made: setattr(made.layers[1].second, "bias", parameter(3)),
    "a bias that goes": lambda made: setattr(made.layers[0].first, "bias", None),
    "a buffer": lambda made: setattr(made.layers[0].norm, "running_mean", torch.rand(3)),
    "a new buffer": lambda made: made.register_buffer("late", torch.zeros(2)),
    "a buffer that goes out of checkpoints": lambda made: made.layers[0].norm.register_buffer(
        "running_var", torch.ones(3), persistent=False
    ),
    "which buffers are persistent": give_and_take,
    "a module": lambda made: setattr(made.layers[0], "second", nn.Linear(4, 3, bias=False)),
    "a block": lambda made: made.layers.__setitem__(1, Block()),
    "one more block": lambda made: made.layers.append(Block()),
    "blocks that change places": change_places,
    "a tie": lambda made: setattr(made.head, "weight", parameter(5, 3)),
    "another tie": lambda made: setattr(made.layers[1].second, "weight", made.layers[0].second.weight),
    "a module used twice": lambda made: setattr(made.layers[1], "first", made.layers[0].first),
    "another order": reorder,
    "more modules": add_modules,
    "a class": become_wrapper,
    "storages": lambda made: [setattr(one, "data", one.data.clone()) for one in made.parameters()] and None,
    "nothing": lambda made: None,
}


def same(made: nn.Module, walk: WalkedModule) -> None:
    expected = list(checkpoint_tensors(made))
    found = walk.tensors()
    assert len(found) == len(expected)
    assert all(one is other for one, (_, _, other) in zip(found, expected, strict=True))
    assert walk.paths == tuple(path for _, path, _ in expected)


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_replaced_is_found_by_the_next_walk(change: str) -> None:
    made = model()
    walk = WalkedModule(made)
    same(made, walk)
    CHANGES[change](made)
    same(made, walk)
    same(made, walk)


@given(st.lists(st.sampled_from(list(CHANGES)), min_size=2, max_size=6))
def test_any_changes_one_after_the_other_are_found(changes: list[str]) -> None:
    made = model()
    walk = WalkedModule(made)
    for change in changes:
        CHANGES[change](made)
        same(made, walk)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that were walked through in full."""
    seen: list[nn.Module] = []

    def counting(module: nn.Module) -> Iterator[Any]:
        seen.append(module)
        return checkpoint_tensors(module)

    monkeypatch.setattr(walked, "checkpoint_tensors", counting)
    return seen


def test_a_module_in_which_nothing_is_replaced_is_walked_once_whatever_is_written(walks: list[nn.Module]) -> None:
    made = model()
    source = ModuleSource(made)
    places, versions = source.addresses(), source.versions()
    for _ in range(3):
        made.layers[0].first(torch.rand(2, 3)).sum().backward()
        torch.optim.AdamW(made.parameters()).step()
        assert source.addresses() == places
        assert source.versions() != versions
    made.head.weight.data = made.head.weight.data.clone()
    assert source.addresses() != places
    assert walks == [made]


REPLACED: dict[str, Callable[[Any], None]] = {
    "data": lambda made: setattr(made.layers[0].first.weight, "data", torch.rand(4, 3)),
    "data, turned": lambda made: setattr(made.layers[0].first.weight, "data", made.layers[0].first.weight.data.t()),
    "a parameter": CHANGES["a parameter"],
    "a module": CHANGES["a module"],
    "a block": CHANGES["a block"],
    "a buffer": CHANGES["a buffer"],
    "blocks that change places": CHANGES["blocks that change places"],
    "names": lambda made: made._modules.update(tail=made._modules.pop("head")),
    "names of layers": lambda made: made.layers[1]._modules.update(third=made.layers[1]._modules.pop("norm")),
}


@pytest.mark.parametrize("change", REPLACED)
def test_the_addresses_show_whatever_was_replaced(change: str) -> None:
    made = model()
    made.head.weight = parameter(5, 3)
    source = ModuleSource(made)
    before = source.addresses()
    kept = list(made.parameters())  # so that no address is given out again
    assert source.addresses() == before
    REPLACED[change](made)
    assert source.addresses() != before
    assert kept


@pytest.mark.parametrize("change", ["data", "a parameter", "a module", "a block", "a buffer", "a bias that goes"])
def test_the_versions_show_what_was_replaced_while_a_push_ran(change: str) -> None:
    made = model()
    source = ModuleSource(made)
    source.addresses()
    before = source.versions()
    assert source.versions() == before
    kept = [one.untyped_storage()._weak_ref() for one in made.parameters()]  # as an export does
    {**CHANGES, **REPLACED}[change](made)
    assert source.versions() != before
    for reference in kept:
        torch.UntypedStorage._free_weak_ref(reference)


def test_each_value_of_the_versions_has_the_name_of_its_tensor() -> None:
    made = model()
    source = ModuleSource(made, rename=lambda name: f"model.{name}")
    names, before = source.version_names(), source.versions()
    assert len(names) == len(before) == len(set(names))
    assert set(names) == set(source.manifest().names)
    with torch.no_grad():
        made.layers[1].second.weight.zero_()
        made.layers[0].norm.running_var.zero_()
    differing = {name for name, a, b in zip(names, before, source.versions(), strict=True) if a != b}
    assert differing == {"model.layers.1.second.weight", "model.layers.0.norm.running_var"}


def test_what_was_replaced_is_not_kept_alive() -> None:
    made = model()
    source = ModuleSource(made)
    source.addresses()
    source.versions()
    old = [made.layers[0], made.layers[1].second.weight, made.layers[0].first.weight]
    gone = [weakref.ref(one) for one in old]
    made.layers[1].second.weight = parameter(3, 4)
    made.layers[0] = Block()
    del old
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_a_module_of_dtensors_can_still_be_moved_and_cast(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        made = nn.Linear(4, 4, bias=False)
        made.weight = nn.Parameter(distribute_tensor(made.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)]))
        source = ModuleSource(made)
        before = source.addresses(), source.versions()
        made.to(torch.float64)
        made.to(torch.float32)
        assert source.addresses() != before[0]
        assert source.versions() != before[1]
        with torch.no_grad():
            places, versions = source.addresses(), source.versions()
            made.weight.mul_(2)
            assert (source.addresses() == places, source.versions() == versions) == (True, False)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("odd", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_tensors_without_memory_can_be_walked_over(odd: torch.Tensor) -> None:
    made = model()
    made.register_buffer("odd", odd)
    source = ModuleSource(made)
    places, versions = source.addresses(), source.versions()
    assert (source.addresses(), source.versions()) == (places, versions)
    made.embed.weight.data = torch.rand(5, 3)
    assert source.addresses() != places


def test_tensors_made_in_inference_mode_have_no_count_and_the_others_do() -> None:
    with torch.inference_mode():
        made = nn.Linear(3, 4)
    made.bias = parameter(4)
    source = ModuleSource(made)
    before = source.versions()
    with torch.no_grad():
        made.bias.add_(1)
    assert [a != b for a, b in zip(before, source.versions(), strict=True)] == [False, True]
