"""What a push costs and what it says about that: work that is not done twice, and counts of what came, not of plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rankcast
from checkpoints import as_torch
from fleets_inprocess import Fleet, Stream, Trained, WatchedClient
from rankcast import ModuleSource, PushError, Receiver
from rankcast.rollout.connection import Prepared
from rankcast.trainer import exports, planning
from rankcast.trainer.sources import sharing
from trainer.two_engines import CONFIG, LAYOUT, NEW, NEXT, OLD, Two, connect

PUSHES = ("2", "3", "4", "5")


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(CONFIG, LAYOUT) as made:
        made.load(OLD)
        yield made


class Watched(ModuleSource):
    """A module that counts how often it is gone through."""

    passes = 0

    def read(self) -> Iterator[rankcast.Weight]:
        self.passes += 1
        yield from super().read()


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[object]:
    calls: list[object] = []
    right = getattr(where, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return right(*arguments, **named)

    monkeypatch.setattr(where, name, counting)
    return calls


# -- what is not done twice ------------------------------------------------------------------------------------------


def test_a_shared_module_that_stays_where_it_is_is_gone_through_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(NEW, "float32")
    trained.share_memory()
    source = Watched(trained)
    maps = counted(monkeypatch, exports, "SharedMemoryMap")
    with connect(fleet.receivers, source, mode="ranklocal") as sync:
        for version in PUSHES:
            trained.become(NEW if version < "4" else NEXT)
            sync.push(version)
            assert fleet.differences(NEW if version < "4" else NEXT) == []
        assert (source.passes, len(maps)) == (1, 1)
        # A tensor that moves is found where it lies now.
        norm = trained.get_submodule("model.norm")
        moved = norm.weight.detach().clone().share_memory_()
        norm.weight.data = moved
        moved.fill_(2.0)
        sync.push("6")
        assert (source.passes, len(maps)) == (2, 2)
        assert fleet.models[0].get_parameter("model.norm.weight").unique().tolist() == [2.0]


def test_a_module_that_is_staged_is_gone_through_once_a_push(fleet: Fleet) -> None:
    trained = Trained(NEW, "float32")
    source = Watched(trained)
    with connect(fleet.receivers, source, mode="ranklocal") as sync:
        before = source.passes
        for version in PUSHES:
            sync.push(version)
        assert source.passes - before == len(PUSHES)
        assert fleet.differences(NEW) == []


def test_a_freed_tensors_address_is_not_taken_for_the_tensor(fleet: Fleet) -> None:
    """Other memory may come to lie where the old was; what is exported must be the new."""
    trained = Trained(NEW, "float32")
    trained.share_memory()
    with connect(fleet.receivers, trained, mode="ranklocal") as sync:
        norm = trained.get_submodule("model.norm")
        for step in range(8):
            norm.weight = None
            fresh = torch.full((CONFIG["hidden_size"],), float(step)).share_memory_()
            norm.weight = nn.Parameter(fresh, requires_grad=False)
            sync.push(f"v{step}")
            assert fleet.models[0].get_parameter("model.norm.weight").unique().tolist() == [float(step)]


@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
def test_shares_are_cut_at_the_first_push_only_and_from_the_second_on_every_push_sends_the_same_bytes(
    mode: str, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = counted(monkeypatch, planning, "cut_share")
    with connect(two.clients, Stream(as_torch(NEW)), mode=mode) as sync:
        sizes, cuts = [], []
        for version in PUSHES:
            for client in two.clients:
                client.payloads.clear()
            sync.push(version)
            cuts.append(len(cut))
            # Claims and releases carry a count, which takes a digit more in time.
            kinds = ("prepare", "install")
            sent = [payload for client in two.clients for call, payload in client.payloads if call in kinds]
            sizes.append(len(repr(sent)))
        assert cuts[0] > 0
        assert cuts[1:] == [cuts[0]] * 3
        assert sizes[1:] == [sizes[1]] * 3
        assert sizes[0] > 2 * sizes[1]


def test_no_report_is_kept_when_a_push_is_over_whether_it_succeeded_or_not(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        leading = sync._leading
        assert leading is not None
        store = leading._fleet._channel
        for version in PUSHES:
            sync.push(version)
            assert store._sizes == {}
        for call in ("pause", "prepare", "install", "finish", "version", "resume"):
            two.clients[1].fail[call] = ConnectionError("lost")
            with pytest.raises(PushError):
                sync.push(call)
            two.clients[1].fail.clear()
            assert store._sizes == {}, call
            assert store._bytes == 0
        sync.push("6")
        assert store._sizes == {}


# -- what is counted -------------------------------------------------------------------------------------------------


class Silent(WatchedClient):
    """Swallows what a test tells it to, as an engine does that answers without having done anything."""

    def reset_prefix_cache(self) -> bool:
        self.log.append((self.name, "cache"))
        return True

    def is_paused(self) -> bool:
        self.log.append((self.name, "is paused"))
        return super().is_paused()


def test_calls_of_workers_and_of_engines_are_counted_apart_and_as_they_were_made() -> None:
    two = Two(client=Silent)
    try:
        with connect(two.clients, Stream(as_torch(NEW))) as sync:
            sync.push("1")
            two.log.clear()
            report = sync.push("2")
        of_engines = ("pause", "is paused", "version", "cache", "resume")
        of_workers = ("claim", "start", "prepare", "install", "finish", "release")
        calls = [call for _, call in two.log]
        assert report.engine_calls == sum(calls.count(call) for call in of_engines) == 2 * len(of_engines)
        # The release of the connection came after the report.
        made = sum(calls.count(call) for call in of_workers) - 2
        assert report.worker_calls + report.control_calls == 2 * made
        assert report.worker_calls == sum(row.calls for row in report.workers) <= 4 * report.rounds
    finally:
        two.close()


def test_an_install_that_is_repeated_on_the_way_is_counted_once(fleet: Fleet) -> None:
    client = WatchedClient(fleet.receivers)

    def twice(call: str, payload: Any) -> Any:
        if call == "install":
            for receiver in fleet.receivers:
                receiver.update_weights(payload)
        return payload

    with connect(client, Stream(as_torch(NEW))) as sync:
        once = sync.push("1")
        client.change = twice
        again = sync.push("2")
        assert once.worker_calls == sum(row.calls for row in once.workers) > 0
        assert again.worker_calls == once.worker_calls
        assert fleet.differences(NEW) == []


@pytest.mark.parametrize("mode", ["ranklocal", "broadcast", "direct"])
def test_bytes_are_those_that_each_worker_says_it_read_and_not_the_plan_s(
    fleet: Fleet, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(fleet.receivers, Trained(NEW, "float32"), mode=mode) as sync:
        before = sync.push("1")
        carries = Prepared.carries

        def one_byte_more(self: Prepared, number: int) -> tuple[int, int]:
            tensors, nbytes = carries(self, number)
            return tensors, nbytes + 1

        monkeypatch.setattr(Prepared, "carries", one_byte_more)
        report = sync.push("2")
    assert [row.nbytes for row in report.workers] == [row.nbytes + row.calls for row in before.workers]
    assert report.nbytes == sum(row.nbytes for row in report.workers) > before.nbytes


def test_the_report_says_how_many_tensors_and_bytes_went_which_way_and_why(fleet: Fleet) -> None:
    total = sum(bits.nbytes for bits in NEW.values())
    for mode in ("ranklocal", "broadcast"):
        with connect(fleet.receivers, Stream(as_torch(NEW)), mode=mode) as sync:
            report = sync.push("1")
        (row,) = report.ways
        assert (row.way, row.why) == (mode, f"mode={mode!r}")
        assert (row.tensors, row.nbytes) == (len(NEW), report.nbytes)
        assert (report.direct_tensors, report.direct_nbytes) == (0, 0)
    assert report.nbytes == 2 * total
    with connect(fleet.receivers, Stream(as_torch(NEW))) as sync:
        report = sync.push("2")
    (row,) = report.ways
    assert (row.way, row.tensors, row.nbytes) == ("ranklocal", len(NEW), report.nbytes)
    assert "no shards that last" in row.why
    with connect(fleet.receivers, Trained(NEXT, "float32"), mode="direct") as sync:
        report = sync.push("3")
    (row,) = report.ways
    assert (row.way, row.tensors, row.nbytes) == ("direct", len(NEW), report.nbytes)
    assert (report.direct_tensors, report.direct_nbytes) == (len(NEW), report.nbytes)
    assert fleet.differences(NEXT) == []


class TwoParts(nn.Module):
    """One parameter that takes what it is given, one that takes its double, and buffers that nobody fills."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.zeros(sharing.SMALL), requires_grad=False)
        self.doubled = nn.Parameter(torch.zeros(2 * sharing.SMALL), requires_grad=False)
        self.register_buffer("persistent", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor * 2 if name == "doubled" else tensor)


def test_tensors_that_go_different_ways_are_counted_apart_and_buffers_that_nobody_fills_are_named() -> None:
    model = TwoParts()
    trained = nn.Module()
    for name, parameter in model.named_parameters():
        trained.register_parameter(name, nn.Parameter(torch.ones_like(parameter), requires_grad=False))
    receiver = Receiver(model)
    with connect(receiver, trained) as sync:
        report = sync.push("1")
    assert report.untouched == ("persistent",)
    direct, other = report.ways
    assert (direct.way, direct.tensors, direct.nbytes) == ("direct", 1, model.plain.nbytes)
    assert (other.way, other.tensors, other.nbytes) == ("ranklocal", 1, model.doubled.nbytes)
    assert report.through_loader == {other.why: 1}
    assert (report.direct_tensors, report.direct_nbytes, report.nbytes) == (1, direct.nbytes, direct.nbytes * 3)
    assert (report.worker_calls, report.rounds) == (2, 2)
    assert model.plain.unique().tolist() == [1.0]
    assert model.doubled.unique().tolist() == [2.0]
    receiver.close()
