"""Where bytes lie during a push: buckets and their reuse, tensors exported as they lie, odd sizes, numbers told."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rankcast
from by_hand import manifest_of
from checkpoints import as_torch, bits_of, tiny_config
from fleets import environment
from fleets_inprocess import Fleet, Stream, Trained, WatchedClient
from oracle import compare, touched, unique_weights
from rankcast import Progress, Receiver, WeightSource
from rankcast.engines.reference.layout import Layout
from rankcast.manifest import Manifest
from rankcast.trainer.sources.base import Weight

CONFIG = tiny_config(num_hidden_layers=2, hidden_size=16, num_experts=4)
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
NEW, NEXT = (unique_weights(CONFIG, step) for step in (2, 3))
TOTAL = sum(bits.nbytes for bits in NEW.values())


def connect(target: Any, source: Any, **options: Any) -> rankcast.Sync:
    return rankcast.connect(target, source, **{"mode": "ranklocal", "timeout": 20, "bucket_bytes": 8192, **options})


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(CONFIG, LAYOUT) as made:
        yield made


# -- buckets ---------------------------------------------------------------------------------------------------------


class Patient(WeightSource):
    """Writes a tensor of one round only when every worker has answered for the round before.

    So whatever is read before it was staged, or staged over before it was read, shows: nothing is left to the race.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.answered = threading.Semaphore(0)
        self.round_of: dict[str, int] = {}
        self.reached = 0

    def manifest(self) -> Manifest:
        return manifest_of(self.weights)

    def read(self) -> Iterator[Weight]:
        self.reached = 0
        for meta in self.manifest().rows():
            yield Weight(meta, lambda buffer, name=meta.name: self.fill(name, buffer))  # type: ignore[misc]  # the default is a name

    def fill(self, name: str, buffer: torch.Tensor) -> None:
        while self.reached < self.round_of[name]:
            assert self.answered.acquire(timeout=20)
            self.reached += 1
        buffer.copy_(self.weights[name].reshape(-1).view(torch.uint8))


def test_each_round_holds_what_was_staged_for_it_and_no_other(fleet: Fleet) -> None:
    source = Patient(as_torch(NEW))
    client = WatchedClient(fleet.receivers)
    with connect(client, source, bucket_bytes=4096) as sync:
        rounds = sync._exports.rounds
        assert rounds.count > 4
        source.round_of = dict(zip(sync._exports.manifest.names, rounds.rounds, strict=True))
        client.update_weights = told(client.update_weights, source.answered)  # type: ignore[method-assign]
        for weights in (NEW, NEXT):
            source.weights = as_torch(weights)
            while source.answered.acquire(blocking=False):
                pass
            sync.push("1")
            assert fleet.differences(weights) == []


def told(call: Any, answered: threading.Semaphore) -> Any:
    def update_weights(payload: Any) -> None:
        call(payload)
        if '"kind":"install"' in repr(payload):
            answered.release()

    return update_weights


def test_there_are_two_buckets_of_what_was_asked_for_and_one_for_tensors_that_are_larger(fleet: Fleet) -> None:
    with connect(fleet.receivers, Stream(as_torch(NEW)), bucket_bytes=5000) as sync:
        report = sync.push("1")
        staging = sync._exports.staging
        assert staging is not None
        sizes = [buffer.size for buffer in staging._buffers if buffer is not None]
        assert len([size for size in sizes if size <= 5000]) == 2
        assert [size for size in sizes if size > 5000] == [max(bits.nbytes for bits in NEW.values())]
        for row in sync._exports.rounds.buckets:
            for turn, filled in enumerate(row):
                alone = [
                    name
                    for name, at in zip(sync._exports.manifest.names, sync._exports.rounds.rounds, strict=True)
                    if at == turn
                ]
                assert filled <= 5000 or len(alone) == 1
        assert TOTAL / 5000 < report.rounds < len(NEW)
    assert fleet.differences(NEW) == []


def test_a_tensor_larger_than_a_bucket_arrives_whole() -> None:
    model = nn.Linear(100, 30, bias=True)
    receiver = Receiver(model)
    new = {"weight": torch.randn(30, 100), "bias": torch.randn(30)}
    with connect(receiver, Stream(new), bucket_bytes=64) as sync:
        assert sync.push("1").rounds == 2
    assert torch.equal(model.weight, new["weight"])
    assert torch.equal(model.bias, new["bias"])
    receiver.close()


class Odd(nn.Module):
    """Parameters of no dimension, of no elements, and of dtypes beside floating point."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in odd_tensors(0).items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = dtype.itemsize * torch.Size(shape).numel()
        high = 2 if dtype is torch.bool else 256
        return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)

    return {
        "scalar": bits((), torch.float32),
        "scalar16": bits((), torch.bfloat16),
        "one": bits((1,), torch.float32),
        "empty": bits((0,), torch.float32),
        "empty2": bits((0, 5), torch.float64),
        "flags": bits((7,), torch.bool),
        "bytes": bits((3,), torch.int8),
        "eight": bits((5,), torch.float8_e4m3fn),
        "long": bits((2, 3), torch.int64),
        "complex": bits((2,), torch.complex64),
    }


@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
@pytest.mark.parametrize("bucket", [1, 2**20])
@pytest.mark.parametrize("shared", [False, True])
def test_scalars_empty_tensors_and_every_kind_of_element_arrive_as_they_are(
    mode: str, bucket: int, shared: bool
) -> None:
    model = Odd()
    receiver = Receiver(model)
    new = Odd()
    if shared:
        new.share_memory()
    for name, tensor in odd_tensors(7).items():
        dict(new.named_parameters())[name].copy_(tensor)
    with connect(receiver, new, mode=mode, bucket_bytes=bucket) as sync:
        report = sync.push("1")
    assert report.tensors == 10
    expected = {name: bits_of(tensor) for name, tensor in new.named_parameters()}
    assert compare(expected, {name: bits_of(tensor) for name, tensor in model.named_parameters()}) == []
    receiver.close()


# -- tensors in shared memory already --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
def test_tensors_in_shared_memory_are_exported_as_they_lie(mode: str, fleet: Fleet) -> None:
    trained = Trained(NEW, "float32")
    trained.share_memory()
    with connect(fleet.receivers, trained, mode=mode) as sync:
        report = sync.push("1")
        assert report.staged_bytes == 0
        assert fleet.differences(NEW) == []
        trained.become(NEXT)
        assert sync.push("2").staged_bytes == 0
        assert fleet.differences(NEXT) == []


def test_tensors_of_which_some_are_shared_are_staged_only_where_they_are_not(fleet: Fleet) -> None:
    trained = Trained(NEW, "float32")
    shared = [name for name in NEW if "experts" in name]
    for name in shared:
        trained.get_parameter(name).data.share_memory_()
    with connect(fleet.receivers, trained) as sync:
        staged = sync.push("1").staged_bytes
        private = sum(NEW[name].nbytes for name in NEW if name not in shared)
        assert private <= staged < private + 64 * len(NEW)
        assert fleet.differences(NEW) == []
        trained.become(NEXT)
        sync.push("2")
        assert fleet.differences(NEXT) == []


def test_a_storage_that_moved_between_pushes_is_noticed(fleet: Fleet) -> None:
    trained = Trained(NEW, "float32")
    trained.share_memory()
    with connect(fleet.receivers, trained) as sync:
        sync.push("1")
        old = {name: parameter.data for name, parameter in trained.named_parameters()}
        for name, parameter in trained.named_parameters():
            # Elsewhere, shared again; the bytes at the old place are spoiled.
            parameter.data = as_torch({name: NEXT[name]})[name].share_memory_()
        for tensor in old.values():
            tensor.fill_(-1)
        assert sync.push("2").staged_bytes == 0
        assert fleet.differences(NEXT) == []
        for name, parameter in trained.named_parameters():
            # Now into memory that nobody else can open.
            parameter.data = as_torch({name: NEW[name]})[name]
        assert sync.push("3").staged_bytes >= TOTAL
        assert fleet.differences(NEW) == []
        trained.share_memory()
        assert sync.push("4").staged_bytes == 0
        assert fleet.differences(NEW) == []


def test_views_into_one_shared_arena_are_exported_through_one_segment() -> None:
    arena = torch.empty(1000, dtype=torch.float32).share_memory_()
    trained, model = nn.Module(), nn.Module()
    for index in range(10):
        view = arena[100 * index : 100 * index + 90].view(9, 10)
        trained.register_parameter(f"p{index}", nn.Parameter(view, requires_grad=False))
        model.register_parameter(f"p{index}", nn.Parameter(torch.zeros(9, 10), requires_grad=False))
    arena.copy_(torch.arange(1000.0))
    client = WatchedClient([Receiver(model)])
    with connect(client, trained) as sync:
        assert sync.push("1").staged_bytes == 0
        prepares = [payload for call, payload in client.payloads if call == "prepare"]
        assert repr(prepares).count('"kind":"shm"') == 1
    for index in range(10):
        assert torch.equal(model.get_parameter(f"p{index}"), trained.get_parameter(f"p{index}"))
    client.receivers[0].close()


# -- many parameters and few descriptors -----------------------------------------------------------------------------

MANY = """
import resource
import torch
from torch import nn
import rankcast

assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 1024)

class Many(nn.Module):
    def __init__(self, value):
        super().__init__()
        for index in range(5000):
            values = torch.full((3,), float(value + index))
            self.register_parameter(f"p{index}", nn.Parameter(values, requires_grad=False))

trained, held = Many(1), Many(0)
receivers = [rankcast.Receiver(held, worker=rankcast.Worker(engine="e" * 32))]
with rankcast.connect(receivers, trained, timeout=60, bucket_bytes=40_000) as sync:
    for version in ("1", "2"):
        report = sync.push(version)
assert report.tensors == 5000
assert all(torch.equal(held.get_parameter(f"p{i}"), trained.get_parameter(f"p{i}")) for i in range(5000))
receivers[0].close()
print("pushed")
"""


def test_five_thousand_parameters_are_pushed_with_a_thousand_descriptors() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -n 1024 && exec "$0" -c "$1"', sys.executable, MANY],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.stdout.strip() == "pushed", done.stderr[-2000:]


# -- what is told ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
def test_the_report_counts_what_the_client_saw(mode: str, fleet: Fleet) -> None:
    client = WatchedClient(fleet.receivers)
    with connect(client, Stream(as_torch(NEW)), mode=mode) as sync:
        client.log.clear()
        report = sync.push("7")
        placed = dict(zip(sync._exports.manifest.names, sync._exports.rounds.rounds, strict=True))
        worker_routes = ("claim", "start", "prepare", "install", "finish", "release")
        asked = [what for _, what in client.log if what in worker_routes]
    assert (report.weight_version, report.mode, report.transport, report.tensors) == ("7", mode, "shm", len(NEW))
    wanted = {rank: set(NEW) if mode == "broadcast" else touched(CONFIG, LAYOUT, rank) for rank in range(4)}
    assert report.nbytes == sum(NEW[name].nbytes for names in wanted.values() for name in names)
    carrying = sum(len({placed[name] for name in names}) for names in wanted.values())
    assert report.worker_calls == carrying
    assert report.worker_calls + report.control_calls == 4 * len(asked)
    assert report.rounds == asked.count("install") == max(placed.values()) + 1
    for row in report.workers:
        assert (row.tensors, row.nbytes) == (len(wanted[row.rank]), sum(NEW[name].nbytes for name in wanted[row.rank]))
        assert row.calls == len({placed[name] for name in wanted[row.rank]})
        worker = fleet.receivers[row.rank].worker
        for name in ("engine", "rank", "dp", "pp", "tp", "ep"):
            assert getattr(row, name) == getattr(worker, name)
    assert set(report.stage_seconds) == {"plan", "prepare", "wire", "install", "check", "publish"}
    assert all(0 <= seconds <= report.seconds for seconds in report.stage_seconds.values())


def test_broadcast_tells_every_worker_everything_and_ranklocal_only_its_own(fleet: Fleet) -> None:
    with connect(fleet.receivers, Stream(as_torch(NEW)), mode="broadcast") as sync:
        everything = sync.push("1")
    with connect(fleet.receivers, Stream(as_torch(NEW)), mode="ranklocal") as sync:
        own = sync.push("2")
    assert everything.nbytes == 4 * TOTAL
    experts = sum(bits.nbytes for name, bits in NEW.items() if ".experts." in name)
    assert own.nbytes == 4 * (TOTAL - experts) + experts
    assert own.worker_calls < everything.worker_calls


def test_progress_tells_each_round_and_ends_at_the_whole(fleet: Fleet) -> None:
    said: list[Progress] = []
    with connect(fleet.receivers, Stream(as_torch(NEW)), progress=said.append) as sync:
        report = sync.push("1")
    installs = [step for step in said if step.stage == "install"]
    assert [step.round for step in installs] == list(range(report.rounds))
    assert {(step.weight_version, step.rounds, step.total) for step in said} == {("1", report.rounds, report.nbytes)}
    done = [step.done for step in said]
    assert done == sorted(done)
    assert installs[-1].done == report.nbytes
    assert said[-1].stage == "publish"
    assert said[-1].done == said[-1].total


def test_a_connection_that_is_closed_leaves_no_descriptor_and_no_mapping_behind(fleet: Fleet) -> None:
    def open_now() -> int:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum("/memfd:rankcast" in line for line in maps)

    stream = Stream(as_torch(NEW))
    before = open_now()
    for version in ("1", "2"):
        with connect(fleet.receivers, stream) as sync:
            sync.push(version)
            assert open_now() > before
        assert open_now() == before
