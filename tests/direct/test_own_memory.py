"""A worker whose parameters lie in the trainer's own memory is refused before anything is written, in every mode."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import rankcast
from rankcast import PushError, Receiver
from rankcast.rollout import apart
from rankcast.transports.own_memory import Spans, lend, lent

MODES = ["direct", "auto", "ranklocal", "broadcast"]
#: Columns of a square weight: one that is packed with other small ones, and one that is shared on its own.
SIZES = [8, 512]

Aliasing = Callable[[nn.Linear, nn.Linear], None]


def all_of_it(served: nn.Linear, trained: nn.Linear) -> None:
    served.weight.data = trained.weight.data


def transposed(served: nn.Linear, trained: nn.Linear) -> None:
    served.weight.data = trained.weight.data.t()


def one_element(served: nn.Linear, trained: nn.Linear) -> None:
    """The worker's weight begins with the last element of the trainer's."""
    size = trained.weight.numel()
    room = torch.empty(2 * size)
    room[:size] = trained.weight.data.view(-1)
    trained.weight.data = room[:size].view(trained.weight.shape)
    served.weight.data = room[size - 1 : 2 * size - 1].view(served.weight.shape).fill_(3.0)


CASES = [
    pytest.param(mode, alias, id=f"{mode} {alias.__name__}")
    for mode in MODES
    for alias in (all_of_it, transposed, one_element)
    if (mode, alias) != ("direct", transposed)  # no copy program fills a transposed parameter
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("mode", "alias"), CASES)
def test_a_parameter_in_the_trainers_memory_is_refused_naming_both_and_nothing_is_written(
    mode: str, alias: Aliasing, size: int
) -> None:
    trained, served = nn.Linear(size, size), nn.Linear(size, size)
    alias(served, trained)
    before = copy.deepcopy((trained.state_dict(), served.state_dict()))
    receiver = Receiver(served)
    with rankcast.connect(receiver, trained, mode=mode, timeout=20) as sync:
        with pytest.raises(PushError) as refusal:
            sync.push("1")
        assert "the trainer's tensor weight and the worker's parameter weight share memory" in str(refusal.value)
        assert "copy.deepcopy" in str(refusal.value)
        assert "changed its weights" not in str(refusal.value)
        assert (refusal.value.codes, refusal.value.tensor) == (("unsupported",), "weight")
        for held, was in zip((trained.state_dict(), served.state_dict()), before, strict=True):
            assert all(torch.equal(held[name], was[name]) for name in was)
        assert receiver.servable
        served.weight.data = torch.zeros_like(served.weight.data)  # of the same strides
        sync.push("2")
    assert torch.equal(served.weight, trained.weight)
    assert torch.equal(trained.weight, before[0]["weight"])


@pytest.mark.parametrize("mode", MODES)
def test_a_module_pushed_into_itself_is_refused(mode: str) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    receiver = Receiver(model)
    with rankcast.connect(receiver, model, mode=mode, timeout=20) as sync:
        with pytest.raises(PushError, match="share memory"):
            sync.push("1")
    assert receiver.servable
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_memory_that_comes_to_be_shared_between_two_pushes_is_found(mode: str, size: int) -> None:
    trained, served = nn.Linear(size, size), nn.Linear(size, size)
    with rankcast.connect(Receiver(served), trained, mode=mode, timeout=20) as sync:
        sync.push("1")
        own = served.weight.data
        served.weight.data = trained.weight.data
        with pytest.raises(PushError, match="share memory"):
            sync.push("2")
        served.weight.data = own
        sync.push("3")
        trained.weight.data = own
        with pytest.raises(PushError, match="share memory"):
            sync.push("4")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_parts_of_one_storage_that_share_no_byte_are_pushed(mode: str, size: int) -> None:
    room = torch.randn(2, size, size)
    trained, served = nn.Linear(size, size), nn.Linear(size, size)
    trained.weight.data, served.weight.data = room[0], room[1]
    wanted = room[0].clone()
    with rankcast.connect(Receiver(served), trained, mode=mode, timeout=20) as sync:
        sync.push("1")
    assert torch.equal(served.weight, wanted)
    assert torch.equal(trained.weight, wanted)


@pytest.mark.parametrize("mode", ["direct", "ranklocal"])
def test_a_worker_of_another_process_knows_the_trainers_memory_by_the_segment_that_it_reads(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between processes, where nobody knows the other's addresses and both have the same shared memory mapped."""
    monkeypatch.setattr(apart, "lent", lambda name: [])
    trained, served = nn.Linear(512, 512), nn.Linear(512, 512)
    trained.weight.data.share_memory_()
    one_element(served, trained)
    trained.weight.untyped_storage().share_memory_()
    before = copy.deepcopy(trained.state_dict())
    with rankcast.connect(Receiver(served), trained, mode=mode, timeout=20) as sync:
        for version in ("1", "2"):
            with pytest.raises(
                PushError, match=r"parameter weight lies in the trainer's own memory, from which"
            ) as said:
                sync.push(version)
            assert ("tensor weight" if mode == "ranklocal" else "a part of parameter weight") in str(said.value)
        assert torch.equal(trained.weight, before["weight"])
        # The other half of the same storage is nobody's.
        size = trained.weight.numel()
        served.weight.data = trained.weight.data.view(-1).as_strided((512, 512), (512, 1), size)
        sync.push("3")
    assert torch.equal(served.weight, before["weight"])


def test_of_a_checkpoint_no_file_is_opened_to_know_that_it_lies_in_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = nn.Linear(8, 8)
    save_file({name: tensor + 1 for name, tensor in served.state_dict().items()}, tmp_path / "model.safetensors")
    wanted = served.weight.detach() + 1
    source = rankcast.SafetensorsSource(tmp_path)
    monkeypatch.setattr(source, "shards", lambda: pytest.fail("its files are opened"))
    with rankcast.connect(Receiver(served), source, mode="ranklocal", timeout=20) as sync:
        sync.push("1")
    assert torch.equal(served.weight, wanted)


ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=8)


@given(ranges, ranges)
def test_spans_meet_where_they_have_a_byte_in_common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    mine = {f"m{i}": range(start, start + size) for i, (start, size) in enumerate(one)}
    theirs = {f"t{i}": range(start, start + size) for i, (start, size) in enumerate(other)}
    spans = [Spans.of((name, r.start, r.stop) for name, r in rows.items()) for rows in (mine, theirs)]
    met = spans[0].meeting(spans[1])
    common = {(a, b) for a in mine for b in theirs if set(mine[a]) & set(theirs[b])}
    assert (met is None) == (not common)
    assert met is None or met in common


def test_what_is_lent_under_a_name_is_seen_until_its_lender_ends_that() -> None:
    first, second = Spans.of([("a", 0, 1)]), Spans.of([("b", 2, 3)])
    ends = [lend("x", lambda: first), lend("x", lambda: second)]  # each of which keeps its lender
    assert lent("x") == [first, second]
    assert lent("y") == []
    ends[0]()
    ends[0]()
    assert lent("x") == [second]
    ends[1]()
    assert lent("x") == []


def test_a_sync_that_nobody_has_any_more_keeps_no_model_alive() -> None:
    served, trained = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    receiver = rankcast.Receiver(served)
    sync = rankcast.connect(receiver, trained)
    sync.push("1")
    weight = weakref.ref(trained)
    del sync, trained
    gc.collect()
    assert weight() is None
    receiver.close()
