"""Tensors that share a page while one of them goes through a loader that changes what it is given.

A worker reads segments through private mappings: what its loader writes there makes copies of whole pages, on which
neighbours lie that a copy program reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

import rankcast
from rankcast import Receiver
from rankcast.rollout.delivery import Segments
from rankcast.transports.shm import create_segment

#: Elements of each tensor: the border between the two is no border of a page, wherever the storage begins.
SIZE = 64 * 1024 + 16


class Neighbours(torch.nn.Module):
    """Two parameters in one storage."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.zeros(2 * SIZE)
        self.changed = torch.nn.Parameter(flat[:SIZE], requires_grad=False)
        self.copied = torch.nn.Parameter(flat[SIZE:], requires_grad=False)

    def become(self, value: float) -> None:
        self.changed.fill_(value)
        self.copied.fill_(10 * value)


class Doubling(torch.nn.Module):
    """Its loader doubles one of the tensors where it lies, before it copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = torch.nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.copied = torch.nn.Parameter(torch.zeros(SIZE), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "changed":
                tensor.mul_(2)
            self.get_parameter(name).data.copy_(tensor)


def test_a_program_reads_the_trainers_bytes_beside_a_tensor_that_the_loader_changed_in_place() -> None:
    trained, model = Neighbours(), Doubling()
    receiver = Receiver(model)
    trained.become(1)
    with rankcast.connect(receiver, trained, timeout=60) as sync:
        for step in (1, 2, 3):
            trained.become(step)
            report = sync.push(str(step))
            # One of each, or the test shows nothing.
            assert (report.direct_tensors, sum(report.through_loader.values())) == (1, 1)
            assert model.changed.unique().tolist() == [2 * step]
            assert model.copied.unique().tolist() == [10 * step]
    receiver.close()


def test_only_segments_that_a_loader_was_given_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments()
    calls: list[object] = []

    def refreshed() -> int:
        calls.clear()
        for held in segments._open.values():
            monkeypatch.setattr(held, "refresh", lambda: calls.append(None))
        segments.refresh()
        return len(calls)

    with create_segment(64) as one, create_segment(64) as other:
        opened = segments.use([one.handle, other.handle])
        assert refreshed() == 0
        segments.lend(opened[:1])
        assert refreshed() == 1
        # Given once, it may be written to at any time: also when what is prepared next leaves it to a program.
        segments.use([one.handle, other.handle])
        assert refreshed() == 1
        segments.use([other.handle])
        assert refreshed() == 0
        segments.close()
