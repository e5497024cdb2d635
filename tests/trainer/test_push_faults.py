"""Pushes that go wrong: what is refused at connect, what stops a push, and what every worker serves afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rankcast
from checkpoints import as_torch, bits_of, tiny_config
from fleets_inprocess import Failing, Fleet, Stream, Trained, WatchedClient, all_bits
from oracle import compare, unique_weights
from rankcast import Declared, DeclaredSource, IterableSource, PushError, Receiver
from rankcast.engines.reference.layout import Layout
from rankcast.manifest import Manifest
from rankcast.topology import new_engine_id

CONFIG = tiny_config(num_hidden_layers=2, hidden_size=16, num_experts=4)
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
OLD, NEW, NEXT = (unique_weights(CONFIG, step) for step in (1, 2, 3))
NAMES = list(NEW)


def connect(target: Any, source: Any, **options: Any) -> rankcast.Sync:
    return rankcast.connect(target, source, **{"timeout": 20, "bucket_bytes": 8192, **options})


@pytest.fixture(params=["ranklocal", "broadcast"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(CONFIG, LAYOUT) as made:
        made.load(OLD)
        yield made


def untouched(fleet: Fleet) -> bool:
    return fleet.differences(OLD) == [] and fleet.servable == [True] * 4


# -- at connect ------------------------------------------------------------------------------------------------------


def test_missing_tensors_are_refused_at_connect_by_name_and_count(mode: str, fleet: Fleet) -> None:
    kept = {name: bits for name, bits in NEW.items() if "o_proj" not in name}
    with pytest.raises(PushError, match=r"missing tensors leave 2 parameters incomplete") as refusal:
        connect(fleet.receivers, Stream(as_torch(kept)), mode=mode)
    assert "model.layers.0.self_attn.o_proj.weight" in str(refusal.value)
    assert refusal.value.codes == ("manifest",)
    assert untouched(fleet)


def test_of_many_missing_tensors_the_first_ten_are_named_and_all_are_counted(fleet: Fleet) -> None:
    with pytest.raises(PushError) as refusal:
        connect(fleet.receivers, Stream(as_torch({"model.norm.weight": NEW["model.norm.weight"]})))
    parameters = len(dict(fleet.models[0].named_parameters()))
    assert f"missing tensors leave {parameters - 1} parameters incomplete" in refusal.value.faults[0]
    assert refusal.value.faults[0].count("are filled by no tensor") == 10
    assert untouched(fleet)


def test_one_missing_expert_is_refused_on_the_worker_that_needs_it(mode: str, fleet: Fleet) -> None:
    absent = "model.layers.1.mlp.experts.3.up_proj.weight"
    kept = {name: bits for name, bits in NEW.items() if name != absent}
    with pytest.raises(PushError) as refusal:
        connect(fleet.receivers, Stream(as_torch(kept)), mode=mode)
    assert len(refusal.value.faults) == 1
    assert "worker 3 of 4" in refusal.value.faults[0]
    assert "model.layers.1.mlp.experts.w13_weight" in refusal.value.faults[0]
    assert untouched(fleet)


def test_extra_tensors_are_refused_at_connect_by_name(mode: str, fleet: Fleet) -> None:
    extra = {**as_torch(NEW), "model.extra.weight": torch.zeros(2)}
    with pytest.raises(PushError, match=r"model\.extra\.weight") as refusal:
        connect(fleet.receivers, Stream(extra), mode=mode)
    assert "manifest" in refusal.value.codes
    assert untouched(fleet)


def test_tensors_that_a_loader_passes_over_without_being_asked_to_are_counted_and_named() -> None:
    model = nn.Linear(2, 2)

    def careless(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(model.named_parameters())
        for name, tensor in weights:
            if name in own:
                own[name].data.copy_(tensor)

    receiver = Receiver(model, load_weights=careless)
    extra = {f"extra.{index:02}": torch.zeros(1) for index in range(12)}
    source = Stream({"weight": torch.ones(2, 2), "bias": torch.ones(2), **extra})
    with pytest.raises(PushError, match=r"unknown tensors.*extra\.00.*extra\.09 and 2 more \(12 in all\)") as refusal:
        connect(receiver, source)
    assert "extra.10" not in str(refusal.value)
    receiver.close()


def test_a_tensor_yielded_twice_is_refused_at_connect(fleet: Fleet) -> None:
    def twice() -> Iterator[tuple[str, torch.Tensor]]:
        yield from as_torch(NEW).items()
        yield NAMES[0], as_torch(NEW)[NAMES[0]]

    with pytest.raises(rankcast.RankcastError, match=r"embed_tokens\.weight twice"):
        connect(fleet.receivers, twice)
    assert untouched(fleet)


@pytest.mark.parametrize("kind", ["module", "stream", "declared", "own"])
def test_a_name_that_cannot_travel_is_refused_at_the_source_naming_the_tensor_by_its_repr(
    kind: str, fleet: Fleet
) -> None:
    tensors = {**as_torch(NEW), "odd\udc80name": torch.zeros(2)}
    module = nn.Module()
    module.register_parameter("odd\udc80name", nn.Parameter(torch.zeros(2)))
    sources: dict[str, Any] = {
        "module": module,
        "stream": lambda: iter(tensors.items()),
        "declared": DeclaredSource([Declared(name, tuple(t.shape), t) for name, t in tensors.items()]),
        "own": Unchecked(tensors),
    }
    with pytest.raises(rankcast.ManifestError, match="not UTF-8") as refusal:
        connect(fleet.receivers, sources[kind])
    assert "'odd\\udc80name'" in str(refusal.value)
    assert untouched(fleet)


def test_a_push_that_fails_with_words_that_cannot_travel_ends_the_session_everywhere(fleet: Fleet) -> None:
    stream = Stream(as_torch(NEW))
    with connect(fleet.receivers, stream) as sync:
        stream.odd[0] = OSError("no file odd\udc80name")
        with pytest.raises(PushError, match="every worker still serves the weights it had before"):
            sync.push("2")
        assert {receiver.session_open for receiver in fleet.receivers} == {False}
    assert untouched(fleet)


class Unchecked(rankcast.WeightSource):
    """A source of somebody's own, which builds its manifest by hand."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def manifest(self) -> Manifest:
        return Manifest(
            tuple(self._tensors),
            tuple(str(t.dtype).removeprefix("torch.") for t in self._tensors.values()),
            tuple(tuple(t.shape) for t in self._tensors.values()),
        )

    def read(self) -> Iterator[Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(lambda t: t.to(torch.bfloat16), "bfloat16"), (lambda t: t[1:], "shape"), (lambda t: t[None], "shape")],
    ids=["dtype", "fewer rows", "one more dimension"],
)
def test_a_tensor_of_another_dtype_or_shape_is_refused_at_connect(spoil: Any, words: str, fleet: Fleet) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = {**as_torch(NEW), name: spoil(as_torch(NEW)[name])}
    with pytest.raises(PushError) as refusal:
        connect(fleet.receivers, Stream(tensors))
    assert name in str(refusal.value)
    assert words in str(refusal.value)
    assert untouched(fleet)


# -- a stream that deviates ------------------------------------------------------------------------------------------

DEVIATIONS: dict[str, Any] = {
    "another name": lambda item: ("model.other.weight", item[1]),
    "another shape": lambda item: (item[0], item[1][1:]),
    "another dtype": lambda item: (item[0], item[1].to(torch.float64)),
    "a tensor left out": lambda item: None,
    "an exception": lambda item: ZeroDivisionError("the trainer's own"),
}


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_stream_that_deviates_before_the_first_write_leaves_the_old_weights(
    deviation: str, mode: str, fleet: Fleet
) -> None:
    stream = Stream(as_torch(NEW))
    with connect(fleet.receivers, stream, mode=mode) as sync:
        stream.odd = {0: DEVIATIONS[deviation]((NAMES[0], stream.weights[NAMES[0]]))}
        with pytest.raises(PushError, match="still serves the weights it had before"):
            sync.push("2")
        assert untouched(fleet)
        stream.odd = {}
        sync.push("2")
        assert fleet.differences(NEW) == []


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_stream_that_deviates_after_the_first_write_leaves_workers_unusable_until_a_full_push(
    deviation: str, mode: str, fleet: Fleet
) -> None:
    stream = Stream(as_torch(NEW))
    client = WatchedClient(fleet.receivers)
    with connect(client, stream, mode=mode) as sync:
        at = len(NAMES) - 2
        stream.odd = {at: DEVIATIONS[deviation]((NAMES[at], stream.weights[NAMES[at]]))}
        with pytest.raises(PushError, match="unusable until the next full push"):
            sync.push("2")
        assert fleet.servable == [False] * 4
        assert {receiver.state for receiver in fleet.receivers} == {"unusable"}
        assert fleet.versions == {""}
        assert client.paused
        assert client.weight_version == ""
        stream.odd = {}
        stream.weights = as_torch(NEXT)
        sync.push("3")
        assert fleet.differences(NEXT) == []
        assert fleet.servable == [True] * 4
        assert not client.paused


def test_a_stream_that_ends_early_is_named(fleet: Fleet) -> None:
    stream = Stream(as_torch(NEW))
    with connect(fleet.receivers, stream) as sync:
        stream.odd = {len(NAMES) - 1: None}
        with pytest.raises(PushError, match=r"lm_head\.weight did not come") as failure:
            sync.push("2")
        assert failure.value.codes == ("source",)
        assert failure.value.tensor == "lm_head.weight"


def test_metadata_that_the_stream_does_not_keep_to_is_refused_before_the_first_write(fleet: Fleet) -> None:
    weights = as_torch(NEW)
    stated = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
    wrong = IterableSource(lambda: iter(list(weights.items())[::-1]), metadata=stated)
    with connect(fleet.receivers, wrong) as sync:
        with pytest.raises(PushError, match=r"where its manifest has model\.embed_tokens\.weight"):
            sync.push("2")
        assert untouched(fleet)


# -- a loader that fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["begin", "install", "finish"])
def test_a_loader_that_fails_makes_its_worker_unusable_and_nobody_publishes(stage: str, mode: str) -> None:
    made: dict[int, Failing] = {}

    def installer(rank: int, model: Any) -> Failing:
        return made.setdefault(rank, Failing(model, after=5, stage=stage))

    with Fleet(CONFIG, LAYOUT, installer=installer) as fleet:
        fleet.load(OLD)
        client = WatchedClient(fleet.receivers)
        with connect(client, Stream(as_torch(NEW)), mode=mode) as sync:
            made[2].armed = True
            with pytest.raises(PushError, match=f"the loader broke in {stage}") as failure:
                sync.push("2")
            assert failure.value.codes == ("install",)
            assert len(failure.value.faults) == 1
            assert "worker 2 of 4" in failure.value.faults[0]
            assert not fleet.servable[2]
            assert client.paused
            assert client.weight_version == ""
            assert (client.name, "version") not in client.log
            # The others are unusable, or whole at what is not published; none claims the old version.
            for rank in (0, 1, 3):
                receiver = fleet.receivers[rank]
                assert receiver.state == ("idle" if receiver.servable else "unusable")
            # Still broken: it stays unusable.
            with pytest.raises(PushError):
                sync.push("3")
            assert not fleet.servable[2]
            made[2].armed = False
            sync.push("4")
            assert fleet.differences(NEW) == []
            assert fleet.servable == [True] * 4
            assert not client.paused


def test_every_workers_fault_is_named() -> None:
    made: list[Failing] = []

    def installer(rank: int, model: Any) -> Failing:
        made.append(Failing(model))
        return made[-1]

    with Fleet(CONFIG, LAYOUT, installer=installer) as fleet:
        with connect(fleet.receivers, Stream(as_torch(NEW))) as sync:
            made[0].armed = made[3].armed = True
            with pytest.raises(PushError) as failure:
                sync.push("2")
        assert len(failure.value.faults) == 2
        assert "worker 0 of 4" in failure.value.faults[0]
        assert "worker 3 of 4" in failure.value.faults[1]


# -- loaders and models with habits ----------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("persistent", torch.tensor([0.5, float("nan"), -0.0]))
        self.register_buffer("scratch", torch.tensor(0.0188), persistent=False)


def test_buffers_that_are_not_in_the_payload_stay_as_they_are_over_two_updates() -> None:
    model = WithBuffers()
    before = all_bits(model)
    receiver = Receiver(model)
    with connect(receiver, Stream({"weight": torch.arange(8.0)})) as sync:
        sync.push("1")
        sync.push("2")
    after = all_bits(model)
    assert (
        compare({k: v for k, v in before.items() if k != "weight"}, {k: v for k, v in after.items() if k != "weight"})
        == []
    )
    assert model.weight.tolist() == list(range(8))
    receiver.close()


def test_a_buffer_in_the_payload_is_updated() -> None:
    model = WithBuffers()
    receiver = Receiver(model)
    with connect(receiver, Stream({"weight": torch.ones(8), "persistent": torch.full((3,), 2.0)})) as sync:
        sync.push("1")
    assert model.persistent.tolist() == [2.0, 2.0, 2.0]
    assert model.scratch.item() == pytest.approx(0.0188)
    receiver.close()


def test_updating_twice_equals_updating_once(mode: str, fleet: Fleet) -> None:
    with connect(fleet.receivers, Stream(as_torch(NEW)), mode=mode) as sync:
        sync.push("2")
        once = fleet.bits()
        sync.push("2")
        assert fleet.changed(once) == []
        assert fleet.differences(NEW) == []


@pytest.mark.parametrize("shared", [False, True], ids=["staged", "exported as it lies"])
def test_a_loader_that_changes_what_it_is_given_changes_neither_the_trainer_nor_the_next_push(shared: bool) -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]

    def vandal(model: nn.Module) -> Any:
        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            own = dict(model.named_parameters())
            for name, tensor in weights:
                own[name].data.copy_(tensor)
                if not tensor.is_meta:
                    tensor.mul_(0.5)

        return load

    trained = nn.Linear(4, 4)
    if shared:
        trained.share_memory()
    before = {name: bits_of(tensor) for name, tensor in trained.named_parameters()}
    engine = new_engine_id()
    receivers = [
        Receiver(model, worker=rankcast.Worker(engine=engine, rank=rank, workers=2), load_weights=vandal(model))
        for rank, model in enumerate(models)
    ]
    with connect(receivers, trained) as sync:
        for version in ("1", "2", "3"):
            sync.push(version)
            for model in models:
                assert compare(before, {name: bits_of(tensor) for name, tensor in model.named_parameters()}) == []
    assert compare(before, {name: bits_of(tensor) for name, tensor in trained.named_parameters()}) == []
    for receiver in receivers:
        receiver.close()


def test_a_module_that_lost_a_tensor_since_connect_is_refused_before_anything_is_written(fleet: Fleet) -> None:
    trained = Trained(NEW, "float32")
    client = WatchedClient(fleet.receivers)
    with connect(client, trained) as sync:
        norm = trained.get_submodule("model.norm")
        kept = norm.weight
        del norm.weight
        with pytest.raises(PushError, match=r"has lost tensors since connect: model\.norm\.weight"):
            sync.push("2")
        assert untouched(fleet)
        assert (client.name, "pause") not in client.log
        norm.register_parameter("weight", kept)
        sync.push("2")
        assert fleet.differences(NEW) == []


@pytest.mark.parametrize("version", ["", None])
def test_a_push_without_a_version_is_refused(version: Any, fleet: Fleet) -> None:
    with connect(fleet.receivers, Stream(as_torch(NEW))) as sync:
        with pytest.raises(rankcast.StateError, match="name the weights"):
            sync.push(version)
    assert untouched(fleet)


def test_a_closed_sync_does_not_push(fleet: Fleet) -> None:
    sync = connect(fleet.receivers, Stream(as_torch(NEW)))
    sync.close()
    sync.close()
    with pytest.raises(rankcast.StateError, match="connect again"):
        sync.push("2")
    assert untouched(fleet)
