"""What the direct mode refuses: at connect what it cannot serve, and in prepare, by the worker, what does not fit.

A program that a worker refuses was put into a real push on its way there. Nothing is written then, the old weights
serve, and the same sync pushes again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankcast
from checkpoints import as_torch, tiny_config, write_checkpoint
from direct.origins import Named, laid_out, put
from fleets_inprocess import Fleet, Stream, WatchedClient, closed, opened
from oracle import unique_weights
from rankcast import IterableSource, ModuleSource, PushError, UnsupportedError
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout
from rankcast.rollout.connection import Connection
from rankcast.rollout.installer import LoaderInstaller
from rankcast.trainer.sources import Declared, DeclaredSource, sharing
from rankcast.wire.handles import ShmNameHandle

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=16, num_experts=4)
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
FIRST, SECOND, THIRD = (unique_weights(CONFIG, step) for step in (1, 2, 3))
# The worker whose program is spoiled: not the first, so that others get theirs before it; it has padded rows.
VICTIM = "3"

Columns = dict[str, list[Any]]


def module(weights: Any = FIRST) -> Named:
    tensors = laid_out("one storage", {name: bits.shape for name, bits in FIRST.items()}, torch.float32)
    made = Named(tensors)
    become(made, weights)
    return made


def become(made: Named, weights: Any) -> None:
    own = dict(made.named_parameters())
    for name, bits in weights.items():
        put(own[name], bits)


# -- at connect --------------------------------------------------------------------------------------------------------


def refused(target: Any, source: Any) -> str:
    with pytest.raises((UnsupportedError, PushError)) as refusal:
        rankcast.connect(target, source, mode="direct", timeout=60)
    return str(refusal.value)


def test_a_source_whose_tensors_lie_nowhere_that_lasts_is_refused_by_direct_and_staged_by_auto() -> None:
    with Fleet(CONFIG, LAYOUT) as fleet:
        stream = Stream(as_torch(FIRST))
        said = refused(fleet.receivers, IterableSource(stream))
        assert "model.embed_tokens.weight" in said
        assert "no shards that last" in said
        assert "mode='auto'" in said
        with rankcast.connect(fleet.receivers, stream, timeout=60) as sync:
            report = sync.push("1")
        assert fleet.differences(FIRST) == []
        assert report.direct_tensors == 0
        assert sum(report.through_loader.values()) == report.tensors
        assert sync.plan is None


class Computing(LoaderInstaller):
    """Its loader doubles one tensor and rounds it back, which no copy of bytes does."""

    def __init__(self, model: ReferenceModel) -> None:
        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
            return model.load_weights(
                (name, tensor + 0 if name == "model.norm.weight" else tensor) for name, tensor in weights
            )

        super().__init__(model, load)


def test_a_loader_that_computes_is_refused_by_direct_naming_tensor_and_operator() -> None:
    with Fleet(CONFIG, LAYOUT, installer=lambda rank, model: Computing(model)) as fleet:
        before = fleet.bits()
        said = refused(fleet.receivers, module())
        assert "model.norm.weight" in said
        assert "add computes what is copied" in said
        assert "mode='auto'" in said
        assert fleet.changed(before) == []


def test_missing_tensors_are_refused_by_name() -> None:
    lacking = {name: bits for name, bits in FIRST.items() if name != "model.layers.0.self_attn.k_proj.weight"}
    with Fleet(CONFIG, LAYOUT) as fleet:
        said = refused(fleet.receivers, Named(as_torch(lacking)))
        assert "missing tensors" in said
        assert "model.layers.0.self_attn.qkv_proj.weight" in said


def test_rows_that_no_trainer_rank_holds_are_refused_naming_the_tensor() -> None:
    tensors = as_torch(FIRST)
    whole = [Declared(name, tuple(t.shape), t) for name, t in tensors.items() if name != "lm_head.weight"]
    head = tensors["lm_head.weight"]
    half = Declared("lm_head.weight", tuple(head.shape), head[:60], ((0, 60), (0, 16)))
    with Fleet(CONFIG, LAYOUT) as fleet:
        with pytest.raises(rankcast.ManifestError, match=r"lm_head\.weight"):
            rankcast.connect(fleet.receivers, DeclaredSource([*whole, half]), mode="direct", timeout=60)


def test_a_cast_through_the_loader_is_refused_also_where_other_tensors_go_direct() -> None:
    config = {**CONFIG, "dtype": "bfloat16"}
    with Fleet(config, LAYOUT, installer=lambda rank, model: Computing(model)) as fleet:
        with pytest.raises(PushError, match=r"model\.norm\.weight is float32 at the trainer but bfloat16") as refusal:
            rankcast.connect(fleet.receivers, module(), timeout=60)
        assert "ModuleSource(model, dtype=torch.bfloat16)" in str(refusal.value)


@pytest.mark.parametrize("mode", ["direct", "auto", "ranklocal"])
@pytest.mark.parametrize(
    ("held", "declared", "kept"),
    [
        (torch.float32, torch.bfloat16, torch.float16),  # would be rounded twice
        (torch.float32, torch.bfloat16, torch.float32),  # would arrive unrounded
        (torch.float32, None, torch.float16),  # may overflow
        (torch.float32, None, torch.int64),  # loses fractions
        (torch.complex64, None, torch.float32),  # loses a half
    ],
)
def test_a_cast_that_is_no_declared_or_harmless_rounding_is_refused_naming_both_dtypes(
    held: torch.dtype, declared: torch.dtype | None, kept: torch.dtype, mode: str
) -> None:
    source = ModuleSource(Named({"weight": torch.ones(300, 200, dtype=held)}), dtype=declared)
    served = Named({"weight": torch.zeros(300, 200, dtype=kept)})
    sent = str(declared or held).removeprefix("torch.")
    named = str(kept).removeprefix("torch.")
    with pytest.raises(PushError, match=rf"weight is {sent} at the trainer but {named} in the worker"):
        rankcast.connect(rankcast.Receiver(served), source, mode=mode, timeout=20)
    assert not served.get_parameter("weight").any()


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_that_is_declared_or_harmless_goes_direct(kept: torch.dtype) -> None:
    held = torch.randn(300, 200)
    source = ModuleSource(Named({"weight": held.clone()}), dtype=torch.float16 if kept == torch.float16 else None)
    served = Named({"weight": torch.zeros(300, 200, dtype=kept)})
    with rankcast.connect(rankcast.Receiver(served), source, mode="direct", timeout=20) as sync:
        report = sync.push("1")
    assert torch.equal(served.get_parameter("weight"), held.to(kept))
    assert (report.cast_tensors, report.cast_nbytes) == (1, held.nbytes)


@pytest.mark.parametrize("mode", ["direct", "auto", "ranklocal", "broadcast"])
def test_a_module_is_not_said_to_go_by_files(mode: str) -> None:
    with pytest.raises(UnsupportedError, match=r"transport='file'.*mode='auto'|weight.*it lies in memory"):
        rankcast.connect(
            rankcast.Receiver(torch.nn.Linear(300, 200)), torch.nn.Linear(300, 200), mode=mode, transport="file"
        )


@pytest.mark.parametrize(("transport", "went"), [("auto", "file"), ("file", "file"), ("shm", "shm")])
def test_a_checkpoint_goes_by_its_files_unless_memory_is_asked_for(tmp_path: Path, transport: str, went: str) -> None:
    write_checkpoint(tmp_path, CONFIG, FIRST)
    with Fleet(CONFIG, LAYOUT) as fleet:
        with rankcast.connect(fleet.receivers, tmp_path, transport=transport, timeout=60) as sync:
            report = sync.push("1")
        assert fleet.differences(FIRST) == []
    assert report.transport == went
    assert report.direct_tensors == (report.tensors if went == "file" else 0)
    assert all("it lies in a file" in reason for reason in report.through_loader)


def test_without_room_in_shared_memory_direct_is_refused_and_auto_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "named_room", lambda: 64 * 1024)
    trained, served = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    with pytest.raises(rankcast.LimitError, match="--shm-size"):
        rankcast.connect(rankcast.Receiver(served), trained, mode="direct", timeout=20)
    with rankcast.connect(rankcast.Receiver(served), trained, timeout=20) as sync:
        report = sync.push("1")
    assert torch.equal(served.weight, trained.weight)
    ((reason, count),) = report.through_loader.items()
    assert count == report.tensors == 2
    assert "trainer rank 0" in reason
    assert "--shm-size" in reason


def test_a_cast_is_refused_at_connect_also_where_workers_cannot_read_the_trainers_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = Connection.try_probe

    def only_by_name(probe: Any) -> tuple[bool, str]:
        return tried(probe) if isinstance(probe, ShmNameHandle) else (False, "as in another pid namespace")

    monkeypatch.setattr(Connection, "try_probe", staticmethod(only_by_name))
    served = torch.nn.Linear(300, 200, dtype=torch.bfloat16)
    with pytest.raises(PushError, match="weight is float32 at the trainer but bfloat16 in the worker"):
        rankcast.connect(rankcast.Receiver(served), torch.nn.Linear(300, 200), timeout=20)


# -- programs ----------------------------------------------------------------------------------------------------------


class Pushed:
    """A fleet that serves the first weights by a direct push, and a client that can spoil what comes next."""

    def __init__(self) -> None:
        self.fleet = Fleet(CONFIG, LAYOUT)
        self.client = WatchedClient(self.fleet.receivers)
        self.module = module()
        self.sync = rankcast.connect(self.client, self.module, mode="direct", timeout=60)
        self.serve_first()

    def serve_first(self) -> None:
        self.client.change = None
        become(self.module, FIRST)
        self.sync.push("first")

    def close(self) -> None:
        self.sync.close()
        self.fleet.close()

    def refused(self, spoil: Callable[[Columns], None]) -> str:
        """As ``refused_whole``, for what is wrong with the program itself."""
        return self.refused_whole(lambda body: spoil(body["program"]))

    def refused_whole(self, spoil: Callable[[dict[str, Any]], None]) -> str:
        """Push the second weights with one prepare spoiled, which must be refused with nothing written on any worker.

        Then push the third, which must succeed.
        """

        def change(call: str, payload: Any) -> Any:
            if call != "prepare":
                return payload
            body = opened(payload["entries"][VICTIM])
            spoil(body)
            return {**payload, "entries": {**payload["entries"], VICTIM: closed(body)}}

        # A storage that moves makes the trainer send programs again.
        embedding = self.module.get_parameter("model.embed_tokens.weight")
        embedding.data = torch.empty(2**16).as_strided(embedding.shape, embedding.stride()).copy_(embedding.data)
        before = self.fleet.bits()
        become(self.module, SECOND)
        self.client.change = change
        with pytest.raises(PushError) as refusal:
            self.sync.push("second")
        assert self.fleet.changed(before) == []
        assert self.fleet.servable == [True] * 4
        assert self.fleet.versions == {"first"}
        assert not self.client.paused
        self.client.change = None
        become(self.module, THIRD)
        self.sync.push("third")
        assert self.fleet.differences(THIRD) == []
        return str(refusal.value)


@pytest.fixture(scope="module")
def one_fleet() -> Iterator[Pushed]:
    made = Pushed()
    yield made
    made.close()


@pytest.fixture
def pushed(one_fleet: Pushed) -> Pushed:
    # One sync for all faults, one after another: none of them may leave anything behind.
    one_fleet.serve_first()
    return one_fleet


def each_column(columns: Columns) -> list[str]:
    return [name for name in columns if name != "parameters"]


def route_into(columns: Columns, parameter: str) -> int:
    """The last route into ``parameter``."""
    at = columns["parameters"].index(parameter)
    return max(i for i, destination in enumerate(columns["destinations"]) if destination == at)


def drop_last(columns: Columns) -> None:
    for name in each_column(columns):
        columns[name].pop()


def drop_all(columns: Columns) -> None:
    for name in each_column(columns):
        columns[name].clear()


def repeat_last(columns: Columns) -> None:
    for name in each_column(columns):
        columns[name].append(columns[name][-1])


def set_last(name: str, value: Callable[[Any], Any]) -> Callable[[Columns], None]:
    def spoil(columns: Columns) -> None:
        columns[name][-1] = value(columns[name][-1])

    return spoil


def into_padding(columns: Columns) -> None:
    # 100 rows, padded to 128: the second of two workers has 36 of them and 28 rows of padding.
    route = route_into(columns, "lm_head.weight")
    columns["sizes"][route][0] += 1


def one_row_less(columns: Columns) -> None:
    columns["sizes"][route_into(columns, "lm_head.weight")][0] -= 1


def one_row_on(columns: Columns) -> None:
    columns["offsets"][route_into(columns, "lm_head.weight")] += 16


def no_box(columns: Columns) -> None:
    route = route_into(columns, "lm_head.weight")
    columns["strides"][route] = [16, 2]
    columns["sizes"][route] = [36, 8]


def beyond_the_segment(columns: Columns) -> None:
    columns["addresses"][route_into(columns, "lm_head.weight")] = 2**40


def steps_out_of_the_segment(columns: Columns) -> None:
    columns["source_strides"][route_into(columns, "lm_head.weight")] = [2**40, 1]


SPOILED: dict[str, tuple[Callable[[Columns], None], str]] = {
    "a hole": (one_row_less, r"leaves 16 elements of lm_head\.weight as they are"),
    "a route dropped": (drop_last, r"leaves [\d,]+ elements of .* as they are"),
    "an overlap": (repeat_last, r"writes .* twice at"),
    "a hole and an overlap": (one_row_on, r"lm_head\.weight"),
    "into padding": (into_padding, r"writes 16 elements of lm_head\.weight that no tensor goes to"),
    "outside its parameter": (set_last("offsets", lambda _: 10**9), r"which is no box of its shape"),
    "no box": (no_box, r"would write lm_head\.weight at element 0 .* which is no box of its shape"),
    "outside its segment": (beyond_the_segment, r"lm_head\.weight.* would lie at bytes"),
    "steps outside its segment": (steps_out_of_the_segment, r"lm_head\.weight.* would lie at bytes"),
    "a segment that did not come": (set_last("segments", lambda _: 99), r"segment 99, which do not exist"),
    "a negative segment": (set_last("segments", lambda _: -1), r"segment -1, which do not exist"),
    "a parameter that is not there": (set_last("destinations", lambda _: 9999), r"parameter 9999"),
    "an unknown parameter": (
        lambda columns: columns["parameters"].__setitem__(0, "model.nothing"),
        r"parameters that the worker does not have: model\.nothing",
    ),
    "a column too short": (lambda columns: columns["offsets"].pop(), r"routes but \d+ offsets"),
    "strides too few": (set_last("strides", lambda steps: steps[:-1]), r"other numbers of strides"),
    "a negative size": (set_last("sizes", lambda sizes: [-1] * len(sizes)), r"negative size"),
    "a negative offset": (set_last("offsets", lambda _: -1), r"negative size, stride, offset or address"),
    "a negative address": (set_last("addresses", lambda _: -8), r"negative size, stride, offset or address"),
    "an unknown dtype": (set_last("dtypes", lambda _: "float33"), r"float33"),
    "no route at all": (
        drop_all,
        r"leaves [\d,]+ elements",
    ),
    "columns of another type": (set_last("offsets", lambda _: "0"), r"malformed"),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_a_program_that_does_not_fit_is_refused_and_nothing_is_written(pushed: Pushed, fault: str) -> None:
    spoil, words = SPOILED[fault]
    said = pushed.refused(spoil)
    assert re.search(words, said), said
    assert "worker 3 of 4" in said


def no_install(body: dict[str, Any]) -> None:
    body["installs"] = 0


def no_handles(body: dict[str, Any]) -> None:
    body["handles"] = None


def another_source(body: dict[str, Any]) -> None:
    """Two sources exchanged: still in bounds, and every element is written once."""
    columns = body["program"]
    of_size: dict[str, list[int]] = {}
    for i, sizes in enumerate(columns["sizes"]):
        of_size.setdefault(str(sizes), []).append(i)
    first, second = next(routes for routes in of_size.values() if len(routes) > 1)[:2]
    for name in ("addresses", "segments"):
        columns[name][first], columns[name][second] = columns[name][second], columns[name][first]


WHOLE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a program that no install runs": (no_install, r"announces 0 installs, which leaves none for its copy program"),
    "a program without handles": (no_handles, r"a program and no handles"),
    "another program than its hash names": (another_source, r"calls its .* plan \w{8}, and they are plan \w{8}"),
}


@pytest.mark.parametrize("fault", WHOLE)
def test_a_prepare_whose_parts_do_not_belong_together_is_refused_and_nothing_is_written(
    pushed: Pushed, fault: str
) -> None:
    spoil, words = WHOLE[fault]
    said = pushed.refused_whole(spoil)
    assert re.search(words, said), said
    assert "worker 3 of 4" in said


def test_a_checkpoint_without_some_tensors_is_refused_before_a_file_is_read(tmp_path: Path) -> None:
    lacking = dict(list(FIRST.items())[:-1])
    write_checkpoint(tmp_path, CONFIG, lacking)
    with Fleet(CONFIG, LAYOUT) as fleet:
        assert "missing tensors" in refused(fleet.receivers, tmp_path)
