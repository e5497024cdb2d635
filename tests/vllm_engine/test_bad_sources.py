"""A trainer whose weights do not fit is refused by name before anything moves; one that breaks its word, afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

import rankcast
from vllm_engine.conftest import Bench
from vllm_engine.models import weights_of
from vllm_engine.servers import TP1, TP2
from vllm_engine.test_faults import EXPERT, IDLE, KEYS, flags, refused
from vllm_engine.test_servers import push

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("bench", [TP1, TP2], indirect=True, ids=lambda layout: layout.name, scope="session"),
]

Weights = Mapping[str, torch.Tensor]


def without_an_expert(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != EXPERT}


def without_keys(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != KEYS}


def keys_in_float16(weights: Weights) -> Weights:
    return {**weights, KEYS: weights[KEYS].to(torch.float16)}


def keys_of_another_shape(weights: Weights) -> Weights:
    return {**weights, KEYS: weights[KEYS][:-8].contiguous()}


def keys_turned_round(weights: Weights) -> Weights:
    return {**weights, EXPERT: weights[EXPERT].t().contiguous()}


def one_expert_more(weights: Weights) -> Weights:
    return {**weights, EXPERT.replace("experts.5", "experts.8"): weights[EXPERT]}


def a_name_nobody_knows(weights: Weights) -> Weights:
    return {**weights, "model.layers.0.self_attn.k_proj.wieght": weights[KEYS]}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_an_expert, "experts"),
        (without_keys, "qkv_proj"),
        (keys_in_float16, KEYS),
        (keys_of_another_shape, KEYS),
        (keys_turned_round, EXPERT),
        (one_expert_more, "experts.8"),
        (a_name_nobody_knows, "wieght"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
def test_weights_that_do_not_fit_are_refused_at_connect(
    bench: Bench, mode: str, damage: Callable[[Weights], Weights], says: str
) -> None:
    weights = damage(weights_of("moe", "b"))
    with pytest.raises(rankcast.RankcastError, match="connect") as refusal:
        rankcast.connect(bench.server.url, lambda: iter(weights.items()), mode=mode, timeout=60)
    assert says in str(refusal.value)
    assert bench.server.digests() == bench.at_a.digests
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert flags(bench.server) == [IDLE] * bench.layout.tp


def test_a_stream_that_names_a_tensor_twice_is_refused(bench: Bench) -> None:
    weights = list(weights_of("moe", "b").items())
    with pytest.raises(rankcast.RankcastError, match="twice"):
        rankcast.connect(bench.server.url, lambda: iter([*weights, weights[3]]), timeout=60)
    assert bench.server.digests() == bench.at_a.digests


def test_a_stream_that_ends_early_leaves_a_paused_server_and_a_way_on(bench: Bench) -> None:
    passes: list[int] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        passes.append(len(passes))
        weights = list(weights_of("moe", "b").items())
        yield from weights if len(passes) == 1 else weights[:-3]

    with rankcast.connect(bench.server.url, stream, mode="ranklocal", bucket_bytes=150_000, timeout=60) as sync:
        with pytest.raises(rankcast.RankcastError) as failure:
            sync.push(weight_version="half")
    assert "push again" in str(failure.value)
    assert bench.server.get("/is_paused") == {"is_paused": True}
    states = flags(bench.server)
    assert all(one == {**IDLE, "state": "unusable", "servable": False} for one in states), states
    assert "push again" in refused(bench.server, "/resume")
    push(bench, bench.b)
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert bench.server.probe() == bench.at_b.said
