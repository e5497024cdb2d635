"""After a push every worker holds what the oracle says, for models, layouts, sources, bucket sizes and modes at random.

Weights are bits of every pattern: NaNs of both kinds, infinities, denormals, -0.0. Nothing is compared as a value.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankcast
from checkpoints import as_torch, tiny_config, write_checkpoint
from fleets_inprocess import Failing, Fleet, Stream, Trained, WatchedClient
from oracle import touched, unique_weights
from rankcast import IterableSource, ModuleSource, PushError
from rankcast.engines.reference.layout import Layout

#: About how many rounds a push shall take: a bucket's size follows from the model's.
ROUNDS = st.sampled_from([0, 1, 2, 5])


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], Layout]:
    """A tiny model and a layout that can divide it."""
    tp = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 3))
    pp = draw(st.integers(1, min(layers, 2 if tp == 4 else 3)))
    dp = draw(st.integers(1, 3 if tp * pp <= 2 else 2))
    heads = draw(st.sampled_from([4, 8]))
    experts = draw(st.integers(2, 7))
    layout = Layout(tp=tp, pp=pp, dp=dp, expert_parallel=draw(st.booleans()))
    config = tiny_config(
        attention_bias=draw(st.booleans()),
        decoder_sparse_step=draw(st.sampled_from([1, 2])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        head_dim=draw(st.sampled_from([2, 4])),
        hidden_size=draw(st.sampled_from([4, 12])),
        intermediate_size=4 * draw(st.integers(1, 3)),
        mlp_only_layers=draw(st.sampled_from([[], [0]])),
        moe_intermediate_size=4 * draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_experts=experts,
        num_experts_per_tok=min(2, experts),
        num_hidden_layers=layers,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        tie_word_embeddings=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([5, 64, 100, 130])),
    )
    return config, layout


class Origin:
    """One kind of source, which can be given other weights."""

    def __init__(self, kind: str, config: dict[str, Any], directory: Path) -> None:
        self.kind, self.config, self.directory = kind, config, directory
        weights = unique_weights(config, 0)
        self.module = Trained(weights, config["dtype"])
        self.stream = Stream(as_torch(weights, config["dtype"]))
        self.source: Any = {
            "module": ModuleSource(self.module),
            "plain module": self.module,
            "stream": IterableSource(self.stream),
            "function": self.stream,
        }.get(kind, directory)

    def become(self, step: int) -> dict[str, Any]:
        weights = unique_weights(self.config, step)
        if isinstance(self.source, Path):
            # A new checkpoint is a new directory, and a new source.
            self.source = self.directory / str(step)
            write_checkpoint(self.source, self.config, weights, shards=int(self.kind[0]))
        self.module.become(weights)
        self.stream.weights = as_torch(weights, self.config["dtype"])
        return weights


def bucket_for(config: dict[str, Any], rounds: int) -> int:
    """A bucket in which the whole model comes in about ``rounds`` rounds; 0 is a bucket far larger than the model."""
    total = sum(bits.nbytes for bits in unique_weights(config, 0).values())
    return total // rounds if rounds else 2**30


KINDS = ["module", "plain module", "stream", "function", "1 file", "2 files", "3 files"]


@settings(max_examples=20)
@given(
    model=models(),
    kind=st.sampled_from(KINDS),
    rounds=ROUNDS,
    mode=st.sampled_from(["ranklocal", "broadcast"]),
    data=st.data(),
)
def test_every_worker_equals_the_oracle_after_each_push_also_after_one_that_failed(
    model: tuple[dict[str, Any], Layout], kind: str, rounds: int, mode: str, data: st.DataObject
) -> None:
    config, layout = model
    broken: dict[int, Failing] = {}

    def installer(rank: int, worker: Any) -> Failing:
        return broken.setdefault(rank, Failing(worker, after=data.draw(st.integers(0, 3))))

    with tempfile.TemporaryDirectory() as directory, Fleet(config, layout, installer=installer) as fleet:
        origin = Origin(kind, config, Path(directory))
        options: dict[str, Any] = {"mode": mode, "bucket_bytes": bucket_for(config, rounds), "timeout": 30}
        first = origin.become(1)
        with rankcast.connect(fleet.receivers, origin.source, **options) as sync:
            report = sync.push("one")
            assert fleet.differences(first) == []
            assert fleet.servable == [True] * layout.workers
            _check_report(report, config, layout, mode)
            second = origin.become(2)
            if not isinstance(origin.source, Path):
                sync.push("two")
                assert fleet.differences(second) == []

        victim = data.draw(st.sampled_from(range(layout.workers)))
        broken[victim].armed = True
        origin.become(3)
        with rankcast.connect(fleet.receivers, origin.source, **options) as sync:
            with pytest.raises(PushError, match="the loader broke in install"):
                sync.push("three")
            assert not fleet.servable[victim]
            broken[victim].armed = False
            sync.push("four")
            assert fleet.differences(unique_weights(config, 3)) == []
            assert fleet.servable == [True] * layout.workers
            assert fleet.versions == {"four"}


def _check_report(report: rankcast.PushReport, config: dict[str, Any], layout: Layout, mode: str) -> None:
    """The numbers of a report, counted again from the oracle's knowledge alone."""
    weights = unique_weights(config, 0)
    for row in report.workers:
        names = set(weights) if mode == "broadcast" else touched(config, layout, row.rank)
        assert row.tensors == len(names)
        assert row.nbytes == sum(weights[name].nbytes for name in names)
    assert report.nbytes == sum(row.nbytes for row in report.workers)
    assert report.worker_calls == sum(row.calls for row in report.workers)
    # Claim, start, prepare, finish and release, and the installs that carried nothing for a worker.
    installs = layout.workers * report.rounds
    assert report.control_calls == 5 * layout.workers + installs - report.worker_calls
    assert report.tensors == len(weights)


@settings(max_examples=8)
@given(
    model=models(),
    rounds=ROUNDS,
    engines=st.integers(2, 3),
    mode=st.sampled_from(["ranklocal", "broadcast"]),
)
def test_every_worker_of_several_engines_equals_the_oracle(
    model: tuple[dict[str, Any], Layout], rounds: int, engines: int, mode: str
) -> None:
    config, layout = model
    plain = Layout(tp=layout.tp)
    fleets = [Fleet(config, layout if index == 0 else plain) for index in range(engines)]
    weights = unique_weights(config, 5)
    stream = Stream(as_torch(weights, config["dtype"]))
    try:
        clients = [WatchedClient(fleet.receivers, name=f"engine {i}") for i, fleet in enumerate(fleets)]
        with rankcast.connect(clients, stream, mode=mode, bucket_bytes=bucket_for(config, rounds), timeout=30) as sync:
            report = sync.push("five")
        for fleet in fleets:
            assert fleet.differences(weights) == []
        assert [client.weight_version for client in clients] == ["five"] * engines
        assert len(report.workers) == sum(len(fleet.receivers) for fleet in fleets)
    finally:
        for fleet in fleets:
            fleet.close()


@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
def test_a_tied_head_that_a_checkpoint_repeats_is_passed_over_and_said(mode: str) -> None:
    config = tiny_config(tie_word_embeddings=True, num_hidden_layers=1, num_experts=2)
    weights = unique_weights(config, 1)
    repeated = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    with Fleet(config, Layout(tp=2)) as fleet:
        with rankcast.connect(fleet.receivers, Stream(as_torch(repeated)), mode=mode, timeout=20) as sync:
            report = sync.push("1")
        assert report.ignored == ("lm_head.weight",)
        assert fleet.differences(weights) == []


def test_the_trainers_own_weights_are_the_same_bits_after_pushes() -> None:
    config = tiny_config(num_hidden_layers=1)
    weights = unique_weights(config, 1)
    module = Trained(weights, "float32")
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    with Fleet(config, Layout(dp=2, expert_parallel=True)) as fleet:
        with rankcast.connect(fleet.receivers, module, bucket_bytes=4096, timeout=20) as sync:
            for version in ("1", "2", "3"):
                sync.push(version)
        assert fleet.differences(weights) == []
    for name, tensor in module.named_parameters():
        assert torch.equal(tensor.view(torch.int32), before[name].view(torch.int32))
