"""Loaders that look at more than one tensor at a time: exact where all come together, refused where they do not.

And what else a loader may do that a trace alone would not show.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import rankcast
from rankcast import ModuleSource, PushError, Receiver

ROWS, COLUMNS = 40, 500
Weights = Iterable[tuple[str, torch.Tensor]]
#: Two tensors of a model do not fit in one bucket of this size.
SMALL = ROWS * COLUMNS * 4


class Policy(nn.Module):
    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        for number, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(torch.full((ROWS, COLUMNS), float(number + 1))))


class Served(nn.Module):
    def __init__(self, names: Iterable[str], rows: int = ROWS) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((rows, COLUMNS), -1.0)))
        self.kept: dict[str, torch.Tensor] = {}


class Tied(Served):
    """Without a head among the tensors of a call, the embedding is the head."""

    def __init__(self) -> None:
        super().__init__(["embed", "head"])

    def load_weights(self, weights: Weights) -> None:
        came = dict(weights)
        for name, tensor in came.items():
            self.get_parameter(name).data.copy_(tensor.clone())
        if "head" not in came and "embed" in came:
            self.head.data.copy_(came["embed"])  # type: ignore[union-attr]


class Waiting(Served):
    """Writes nothing before all three are there."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__(["qkv"], 3 * ROWS)
        self.keeps = keeps

    def load_weights(self, weights: Weights) -> None:
        if not self.keeps:
            self.kept = {}
        for name, tensor in weights:
            self.kept[name] = tensor
            if len(self.kept) == 3:
                self.qkv.data.copy_(torch.cat([self.kept[part] for part in "qkv"]))  # type: ignore[union-attr]
                self.kept = {}


class Clearing(Served):
    """Clears what it fills: all of it in every call, or each tensor's own part."""

    def __init__(self, *, all_of_it: bool) -> None:
        super().__init__(["qkv"], 3 * ROWS)
        self.all_of_it = all_of_it

    def load_weights(self, weights: Weights) -> None:
        if self.all_of_it:
            self.qkv.data.zero_()  # type: ignore[union-attr]
        for name, tensor in weights:
            own = self.qkv.data[ROWS * "qkv".index(name) :][:ROWS]  # type: ignore[union-attr]
            own.zero_()
            own.copy_(tensor)


CASES: dict[str, Any] = {
    "tied": (lambda: Tied(), ("embed", "head")),
    "waiting": (lambda: Waiting(keeps=False), "qkv"),
    "waiting and keeping": (lambda: Waiting(keeps=True), "qkv"),
    "clearing all": (lambda: Clearing(all_of_it=True), "qkv"),
}


def held(served: nn.Module, names: Iterable[str]) -> list[float]:
    """The value of each tensor where it went, of those that went as they are; -1.0 where nothing came."""
    own = list(served.parameters())
    parts = own if len(own) > 1 else own[0].detach().split(ROWS)
    found = []
    for part in parts:
        (value,) = part.detach().unique().tolist()
        found.append(value)
    return found


@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
@pytest.mark.parametrize("case", list(CASES))
def test_a_loader_that_needs_tensors_together_is_refused_when_they_come_apart_and_exact_when_they_do_not(
    case: str, mode: str
) -> None:
    make, names = CASES[case]
    served, policy = make(), Policy(names)
    receiver = Receiver(served)
    with rankcast.connect(receiver, policy, mode=mode, bucket_bytes=SMALL, timeout=20) as sync:
        with pytest.raises(PushError, match=r"the loader .*raise bucket_bytes"):
            sync.push("1")
    assert receiver.servable
    assert set(held(served, names)) == {-1.0}
    with rankcast.connect(receiver, policy, mode=mode, timeout=20) as sync:
        assert sync.push("2").rounds == 1
    assert held(served, names) == [float(number + 1) for number in range(len(held(served, names)))]


def test_a_loader_that_clears_each_tensors_own_part_may_have_them_in_any_round() -> None:
    served, policy = Clearing(all_of_it=False), Policy("qkv")
    with rankcast.connect(Receiver(served), policy, mode="ranklocal", bucket_bytes=SMALL, timeout=20) as sync:
        assert sync.push("1").rounds == 3
    assert held(served, "qkv") == [1.0, 2.0, 3.0]


def test_a_tensor_that_goes_direct_is_missed_by_a_loader_that_asks_for_it() -> None:
    class Embedding(Tied):
        """Its head goes direct, and its embedding through the loader, which then takes it for the head as well."""

        def load_weights(self, weights: Weights) -> None:
            came = dict(weights)
            if "head" in came:
                self.head.data.copy_(came["head"])  # type: ignore[union-attr]
            if "embed" in came:
                self.embed.data.copy_(came["embed"].clone())  # type: ignore[union-attr]
                if "head" not in came:
                    self.head.data.copy_(came["embed"])  # type: ignore[union-attr]

    served, policy = Embedding(), Policy(("embed", "head"))
    receiver = Receiver(served)
    with rankcast.connect(receiver, policy, mode="auto", timeout=20) as sync:
        with pytest.raises(PushError, match="the loader does not do with embed in round 0"):
            sync.push("1")
    assert receiver.servable
    assert held(served, ("embed", "head")) == [-1.0, -1.0]


@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
def test_a_loader_that_keeps_parameters_is_not_trusted_once_one_of_them_was_replaced(mode: str) -> None:
    class Caching(Served):
        def __init__(self) -> None:
            super().__init__("ab")
            self.cached = dict(self.named_parameters())

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                self.cached[name].data.copy_(tensor)

    served, policy = Caching(), Policy("ab")
    with rankcast.connect(Receiver(served), policy, mode=mode, timeout=20) as sync:
        sync.push("1")
        assert held(served, "ab") == [1.0, 2.0]
        served.a = nn.Parameter(torch.full((ROWS, COLUMNS), -1.0))
        with pytest.raises(PushError, match="neither its own nor a destination"):
            sync.push("2")
        assert held(served, "ab") == [-1.0, 2.0]


def test_a_loader_that_assigns_is_refused_and_the_model_is_as_it_was() -> None:
    served, policy = Served("ab"), Policy("ab")
    before = dict(served.named_parameters())

    def assign(weights: Weights) -> None:
        served.load_state_dict(dict(weights), assign=True)

    with pytest.raises(PushError, match=r"the loader replaces a of a Served instead of copying into it"):
        rankcast.connect(Receiver(served, load_weights=assign), policy, timeout=20)
    now = dict(served.named_parameters())
    assert all(now[name] is parameter for name, parameter in before.items())
    assert held(served, "ab") == [-1.0, -1.0]


@pytest.mark.parametrize("mode", ["ranklocal", "direct"])
def test_padding_that_was_lost_is_filled_again_at_every_push(mode: str) -> None:
    served, policy = Served("a", ROWS + 8), Policy("a")

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            served.a.data[:ROWS].copy_(tensor)  # type: ignore[union-attr]
            served.a.data[ROWS:].zero_()  # type: ignore[union-attr]

    with rankcast.connect(Receiver(served, load_weights=load), policy, mode=mode, timeout=20) as sync:
        for version in "12":
            with torch.no_grad():
                served.a.fill_(float("nan"))  # type: ignore[operator]
            sync.push(version)
            assert served.a.detach()[:ROWS].unique().tolist() == [1.0]  # type: ignore[union-attr]
            assert served.a.detach()[ROWS:].unique().tolist() == [0.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["ranklocal", "direct", "auto"])
def test_a_parameter_whose_storage_was_freed_is_refused_by_name_and_the_old_weights_serve(mode: str) -> None:
    served, policy = Served("ab"), Policy("ab")
    receiver = Receiver(served)
    with rankcast.connect(receiver, ModuleSource(policy), mode=mode, timeout=20) as sync:
        sync.push("1")
        kept, policy.b.data = policy.b.data, torch.empty(ROWS, COLUMNS)  # type: ignore[union-attr]
        policy.b.data.untyped_storage().resize_(0)  # type: ignore[operator,union-attr]
        with pytest.raises(PushError, match="b needs 80000 bytes and its storage has 0"):
            sync.push("2")
        assert receiver.servable
        assert held(served, "ab") == [1.0, 2.0]
        policy.b.data = kept  # type: ignore[union-attr]
        sync.push("3")
