"""The mode auto where a few tensors have to go through the loader: the others cost, and are refused, nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankcast
from direct.mixed_ranks import COMPUTED, checkpoint, run
from direct.origins import Named
from rankcast import Declared, DeclaredSource, UnsupportedError
from rankcast.rollout.installer import LoaderInstaller

Given = Iterable[tuple[str, torch.Tensor]]


def serving(model: nn.Module, computed: Collection[str], read: Callable[[str, Any], Any] | None = None) -> Any:
    """A receiver whose loader computes with the tensors ``computed``; ``read`` takes what it wants of a tensor."""
    own = dict(model.named_parameters())

    def load(given: Given) -> None:
        for name, tensor in given:
            wanted = tensor if read is None else read(name, tensor)
            own[name].data.copy_(wanted.clone() if name in computed else wanted)

    return rankcast.Receiver(model, installer=LoaderInstaller(model, load))


@pytest.fixture
def served() -> Named:
    return Named({"a": torch.zeros(100, 300), "b": torch.zeros(200, 300)})


def test_only_what_is_staged_is_gathered_and_every_rank_takes_part(tmp_path: Path) -> None:
    counted = run(tmp_path)
    for one in counted:
        # Of the packed experts one is staged: they are gathered once.
        assert one["gathered"] == [len(COMPUTED)] * 2
        assert one["tensors"] == [len(checkpoint(0))] * 2
        assert one["direct"] == [len(checkpoint(0)) - len(COMPUTED)] * 2
    assert counted[0]["equal"] == [True, True]


def test_a_part_goes_direct_beside_a_tensor_that_goes_through_the_loader(served: Named) -> None:
    a, b = torch.randn(200, 300), torch.randn(200, 300)
    receiver = serving(served, {"b"}, lambda name, tensor: tensor[:100] if name == "a" else tensor)
    source = DeclaredSource(
        [
            Declared("a", (200, 300), a[:100], ((0, 100), (0, 300))),
            Declared("b", (200, 300), b[:120], ((0, 120), (0, 300))),
            Declared("b", (200, 300), b[120:], ((120, 200), (0, 300))),
        ]
    )
    with rankcast.connect(receiver, source, timeout=20) as sync:
        for step in range(2):
            a.add_(step)
            b.add_(step)
            report = sync.push(str(step))
            assert report.direct_tensors == 1
            assert torch.equal(served.get_parameter("a"), a[:100])
            assert torch.equal(served.get_parameter("b"), b)
    receiver.close()


def test_a_part_that_has_to_go_through_the_loader_is_refused_at_connect_by_name_with_ways_out(served: Named) -> None:
    a, b = torch.randn(200, 300), torch.randn(200, 300)
    receiver = serving(served, {"a"}, lambda name, tensor: tensor[:100] if name == "a" else tensor)
    source = DeclaredSource(
        [Declared("a", (200, 300), a[:100], ((0, 100), (0, 300))), Declared("b", (200, 300), b)],
    )
    for mode in ("auto", "ranklocal"):
        with pytest.raises(UnsupportedError) as refusal:
            rankcast.connect(receiver, source, mode=mode, timeout=20)
        assert refusal.value.tensor == "a"
        for words in ("a float32[200, 300] goes through the engine's loader", "lacks [100:200, 0:300]", "all of it on"):
            assert words in str(refusal.value)
    assert receiver.servable
    receiver.close()
    assert not served.get_parameter("b").any()


@pytest.mark.parametrize("mode", ["auto", "ranklocal"])
def test_all_that_is_staged_may_be_without_bytes(mode: str) -> None:
    full = {"a": torch.randn(200, 300)} if mode == "auto" else {}
    trained = Named({**full, "z": torch.empty(0, 5)})
    model = Named({name: torch.zeros_like(tensor) for name, tensor in trained.named_parameters()})
    receiver = serving(model, {"z"})
    with rankcast.connect(receiver, trained, mode=mode, timeout=20) as sync:
        for version in ("1", "2"):
            report = sync.push(version)
            assert report.direct_tensors == len(full)
            assert report.staged_bytes == 0
    receiver.close()
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in full.items())
