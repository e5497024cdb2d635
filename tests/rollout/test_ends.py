"""How sessions end without being finished, what is let go of then, and what a repeated prepare must agree with."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import ByHand, codes
from fleets_inprocess import Failing
from rankcast import InstallError, Receiver
from rankcast.wire.bodies import Program, Schedule

NEW = {"weight": torch.full((2, 2), 5.0), "bias": torch.full((2,), 5.0)}


class Stuck(Failing):
    """An installer that cannot abandon what it began, while ``armed``."""

    def abandon(self) -> None:
        self._maybe("abandon")


@pytest.fixture
def stuck() -> Iterator[tuple[Stuck, Receiver, ByHand]]:
    installer = Stuck(torch.nn.Linear(2, 2), stage="abandon")
    receiver = Receiver(installer._model, installer=installer)
    with ByHand([receiver], NEW) as trainer:
        yield installer, receiver, trainer
    receiver.close()


def to_first_install(trainer: ByHand) -> None:
    trainer.open()
    assert codes(trainer.prepare()) == [()]
    assert codes(trainer.install(1)) == [()]


def mapped() -> int:
    gc.collect()
    return sum("rankcast" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("by", ["abort", "claim"])
def test_an_engine_that_fails_to_abandon_is_reported_and_the_session_ends_all_the_same(
    by: str, stuck: tuple[Stuck, Receiver, ByHand]
) -> None:
    installer, receiver, trainer = stuck
    to_first_install(trainer)
    installer.armed = True
    [report] = trainer.send(trainer.abort_body) if by == "abort" else trainer.claim()
    assert [fault.code for fault in report.faults] == ["install"]
    assert "abandoning on worker 0" in report.faults[0].message
    assert (report.state, report.servable) == ("unusable", False)
    installer.armed = False
    trainer.open()
    assert codes(trainer.prepare()) == [()]
    assert codes([*trainer.install(1), *trainer.install(2), *trainer.finish()]) == [(), (), ()]
    assert receiver.servable


def test_a_start_whose_engine_cannot_let_go_of_the_last_session_leaves_none_open(
    stuck: tuple[Stuck, Receiver, ByHand],
) -> None:
    installer, receiver, trainer = stuck
    receiver.start_weight_update()
    installer.armed, installer.stage, installer.after = True, "install", 1
    with pytest.raises(InstallError):
        receiver.update_weights(trainer.bare())
    installer.stage = "abandon"
    with pytest.raises(InstallError, match="abandoning"):
        receiver.start_weight_update()
    assert (receiver.state, receiver.session_open) == ("unusable", False)
    installer.armed = False
    receiver.start_weight_update()
    receiver.update_weights(trainer.bare())
    receiver.finish_weight_update()
    assert receiver.servable


def test_a_session_that_is_aborted_leaves_nothing_mapped_and_is_prepared_anew() -> None:
    receiver = Receiver(torch.nn.Linear(2, 2))
    before = mapped()
    with ByHand([receiver], NEW) as trainer:
        own = mapped() - before
        to_first_install(trainer)
        assert mapped() > before + own
        [report] = trainer.send(trainer.abort_body)
        assert report.plan_hash == ""
        assert report.connection == trainer.connection
        assert mapped() == before + own
        assert codes(trainer.claim()) == [()]
        assert codes(trainer.start()) == [()]
        assert codes(trainer.prepare(schedule=None, handles=None)) == [("state",)]
        assert codes(trainer.prepare()) == [()]
    receiver.close()


def test_a_bare_client_that_comes_after_an_expired_lease_finds_nothing_mapped() -> None:
    receiver = Receiver(torch.nn.Linear(2, 2))
    before = mapped()
    with ByHand([receiver], NEW) as trainer:
        own = mapped() - before
        to_first_install(trainer)
        receiver._session._lease_until = 0.0
        receiver.start_weight_update()
        assert mapped() == before + own
    receiver.close()


CHANGES: dict[str, dict[str, Any]] = {
    "another plan": {"plan_hash": "f" * 32},
    "another number of installs": {"installs": 1},
    "another name": {"weight_version": "another"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_second_prepare_is_a_repeat_only_of_the_same(change: str) -> None:
    receiver = Receiver(torch.nn.Linear(2, 2))
    with ByHand([receiver], NEW) as trainer:
        trainer.open()
        assert codes(trainer.prepare()) == [()]
        [again] = trainer.prepare()
        assert (again.repeated, again.faults) == (True, ())
        [other] = trainer.prepare(**CHANGES[change])
        assert [fault.code for fault in other.faults] == ["state"]
        assert not other.repeated
        # It changed nothing: the first one goes on.
        assert codes([*trainer.install(1), *trainer.install(2), *trainer.finish()]) == [(), (), ()]
    receiver.close()


@pytest.mark.parametrize("installs", [0, -1])
def test_a_worker_that_is_unusable_stays_so_when_a_session_would_install_nothing(installs: int) -> None:
    receiver = Receiver(torch.nn.Linear(2, 2))
    with ByHand([receiver], NEW) as trainer:
        to_first_install(trainer)
        assert codes(trainer.send(trainer.abort_body)) == [()]
        assert not receiver.servable
        trainer.open()
        program = Program(("weight",), (), (), (), (), (), (), (), ())
        for parts in ({}, {"program": program}, {"program": program, "schedule": Schedule((), (), (), (), (), ())}):
            assert codes(trainer.prepare(installs=installs, **parts)) == [("payload",)]
            assert codes(trainer.finish()) == [("state",)]
        assert not receiver.servable
        assert codes(trainer.prepare()) == [()]
        assert codes([*trainer.install(1), *trainer.install(2), *trainer.finish()]) == [(), (), ()]
        assert receiver.servable
    receiver.close()


class Greedy(torch.nn.Module):
    """A model whose loader changes what it is given, in a way that torch does not count."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(4096), requires_grad=False)
        self.way = way

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            if not tensor.is_meta:
                if self.way == "data":
                    tensor.data.mul_(2)
                elif self.way == "numpy":
                    tensor.numpy()[:] *= 2
                else:
                    tensor.mul_(2)
            self.value.data.copy_(tensor)


@pytest.mark.parametrize("way", ["in place", "data", "numpy"])
def test_what_a_loader_does_to_its_tensors_does_not_reach_the_next_push(way: str) -> None:
    model = Greedy(way)
    receiver = Receiver(model)
    with ByHand([receiver], {"value": torch.full((4096,), 3.0)}, installs=1) as trainer:
        for _ in range(3):
            trainer.open()
            assert codes(trainer.prepare()) == [()]
            assert codes([*trainer.install(1), *trainer.finish(), *trainer.release()]) == [(), (), ()]
            assert model.value.unique().tolist() == [6.0]
    receiver.close()


def test_a_persistent_buffer_that_no_tensor_fills_is_named_and_one_that_is_filled_is_not() -> None:
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    receiver = Receiver(model)
    new = {"weight": torch.ones(2), "bias": torch.ones(2), "running_mean": torch.ones(2)}
    with ByHand([receiver], new) as trainer:
        [report] = trainer.init()
        assert report.touched is not None
        assert report.touched.untouched == ("running_var", "num_batches_tracked")
        assert report.touched.missing_count == 0
    receiver.close()
