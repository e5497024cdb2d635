"""Binding a copy program to targets that are no longer what was traced."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

import rankcast
from rankcast import InstallError, ManifestError, Receiver
from rankcast.manifest import Manifest, TensorMeta
from rankcast.rollout.installer import LoaderInstaller
from rankcast.rollout.padding import padding_of
from rankcast.rollout.program import BoundProgram, CopyProgram
from rankcast.rollout.traced_targets import TracedTargets
from rankcast.rollout.writing import Writing
from rankcast.session import Session
from rankcast.transports.opening import Opened
from rankcast.transports.shm import create_segment, open_handle
from rankcast.wire.bodies import Program


class Padded(torch.nn.Module):
    """Two parameters of four elements, of which a tensor fills three and the loader the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((4,), 7.0), requires_grad=False)
        self.second = torch.nn.Parameter(torch.full((4,), 7.0), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            target = self.get_parameter(name).data
            target[:3].copy_(tensor)
            target[3:].zero_()


def program_for(model: Padded, opened: Opened) -> CopyProgram:
    manifest = Manifest.of(TensorMeta(name, "float32", (3,)) for name in ("first", "second"))
    trace = LoaderInstaller(model).trace(manifest)
    program = Program(
        parameters=("first", "second"),
        destinations=(0, 1),
        offsets=(0, 0),
        strides=((1,), (1,)),
        sizes=((3,), (3,)),
        segments=(0, 0),
        addresses=(0, 0),
        source_strides=((1,), (1,)),
        dtypes=("float32", "float32"),
    )
    return CopyProgram(program, [opened], TracedTargets(trace), padding_of(trace))


def test_no_padding_is_written_when_a_later_target_is_of_another_form() -> None:
    model = Padded()
    with create_segment(12) as segment, open_handle(segment.handle) as opened:
        program = program_for(model, opened)
        model.second = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        with pytest.raises(ManifestError, match=r"second is now float32\[2, 2\], and was float32\[4\]"):
            program.bind(dict(model.named_parameters()))
        assert model.first.tolist() == [7.0] * 4
        program.drop()


def test_a_copy_program_that_fails_is_not_called_a_loader() -> None:
    model = Padded()
    session = Session()
    session.start()
    with create_segment(12) as segment, open_handle(segment.handle) as opened:
        program = program_for(model, opened)
        model.second = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        with pytest.raises(InstallError, match="the copy program of worker 0 failed"):
            Writing(LoaderInstaller(model), session, "worker 0").program(program)
        program.drop()


def test_each_set_of_targets_is_bound_once_and_again_only_when_one_of_them_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[tuple[str, ...]] = []
    bind = CopyProgram.bind

    def watched(self: CopyProgram, targets: dict[str, torch.Tensor]) -> BoundProgram:
        bound.append(tuple(targets))
        return bind(self, targets)

    monkeypatch.setattr(CopyProgram, "bind", watched)
    model = Padded()
    with create_segment(12) as segment, open_handle(segment.handle) as opened:
        program = program_for(model, opened)
        for value in (1.0, 2.0, 3.0):
            segment.memory.view(torch.float32).fill_(value)
            program.run({"first": model.first})
            program.run({"second": model.second})
            assert model.first.tolist() == model.second.tolist() == [value, value, value, 0.0]
        assert bound == [("first",), ("second",)]
        model.second = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        program.run({"first": model.first})
        program.run({"second": model.second})
        assert model.second.tolist() == [3.0, 3.0, 3.0, 0.0]
        assert bound == [("first",), ("second",), ("second",)]
        program.drop()


class Tied(torch.nn.Module):
    """A parameter under two names, and a module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(200, 100, bias=False)
        self.head = torch.nn.Linear(200, 100, bias=False)
        self.head.weight = self.embed.weight
        block = torch.nn.Linear(100, 200)
        self.blocks = torch.nn.ModuleList([block, block])


@pytest.mark.parametrize("mode", ["broadcast", "ranklocal", "direct"])
def test_parameters_that_have_several_names_are_pushed_into_and_no_name_counts_as_new(mode: str) -> None:
    trained, served = Tied(), Tied()
    with rankcast.connect(Receiver(served), trained, mode=mode) as sync:
        for step in range(2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(step + 1)
            sync.push(str(step))
            for mine, theirs in zip(served.parameters(), trained.parameters(), strict=True):
                assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
