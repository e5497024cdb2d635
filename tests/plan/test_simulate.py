"""Simulated trainers and fleets: their plans give workers what the oracle says, their counts are those of pushes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rankcast
from checkpoints import as_torch, tiny_config
from fleets_inprocess import Fleet, Stream, WatchedClient
from oracle import unique_weights, worker_parameters
from plan_by_hand import carry_out, filled, numpy_dtype
from rankcast import IterableSource
from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout
from rankcast.engines.reference.parts import checkpoint_shapes, worker_parts
from rankcast.geometry import contiguous_strides
from rankcast.manifest import Manifest
from rankcast.plan.columns import Destinations
from rankcast.plan.cost import MODES, simulate
from rankcast.plan.families import family_of
from rankcast.plan.grids import RolloutGrid, TrainerGrid
from rankcast.plan.requests import request_bytes
from rankcast.plan.routes import make_plan
from rankcast.plan.simulated_rollout import rollout_fleet, rollout_trace
from rankcast.plan.simulated_trainer import trainer_shards
from rankcast.plan.tensors import tensors_of
from rankcast.plan.views import destinations_of
from rankcast.trace.record import trace_loader

KIMI_K2: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "dtype": "bfloat16",
}
SMALL_LATENT = {
    **KIMI_K2,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "vocab_size": 100,
}
SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 100,
    "mlp_bias": True,
    "attention_bias": True,
    "dtype": "float32",
}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    experts = draw(st.integers(2, 8))
    return tiny_config(
        attention_bias=draw(st.booleans()),
        decoder_sparse_step=draw(st.sampled_from([1, 2])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        head_dim=draw(st.sampled_from([2, 4])),
        hidden_size=draw(st.sampled_from([4, 12])),
        intermediate_size=4 * draw(st.integers(1, 3)),
        mlp_only_layers=draw(st.sampled_from([[], [0]])),
        moe_intermediate_size=4 * draw(st.integers(1, 2)),
        num_attention_heads=draw(st.sampled_from([4, 8])),
        num_experts=experts,
        num_hidden_layers=draw(st.integers(1, 4)),
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        tie_word_embeddings=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([5, 64, 100, 130])),
    )


@st.composite
def rollouts(draw: st.DrawFn, config: dict[str, Any]) -> RolloutGrid:
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    pp = draw(st.integers(1, min(config["num_hidden_layers"], 3)))
    spread = draw(st.booleans()) and bool(parse_config(config).sparse_layers)
    return RolloutGrid(tp=tp, dp=dp, pp=pp, ep=tp * dp if spread else 1, engines=draw(st.integers(1, 2)))


@st.composite
def trainers(draw: st.DrawFn, config: dict[str, Any]) -> TrainerGrid:
    if draw(st.integers(0, 3)) == 0:
        return TrainerGrid(fsdp=draw(st.integers(1, 5)), dp=draw(st.integers(1, 2)))
    sparse = bool(parse_config(config).sparse_layers)
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if config["num_experts"] % n == 0])) if sparse else 1
    sizes = {
        "tp": draw(st.sampled_from([1, 2, 4])),
        "cp": draw(st.sampled_from([1, 2])),
        "pp": draw(st.integers(1, min(config["num_hidden_layers"], 2))),
        "ep": ep,
        "etp": draw(st.sampled_from([1, 2])) if sparse else 1,
    }
    return TrainerGrid.parse(",".join(f"{name}={size}" for name, size in sizes.items()))


def layout_of(grid: RolloutGrid) -> Layout:
    return Layout(tp=grid.tp, pp=grid.pp, dp=grid.dp, expert_parallel=grid.spread)


def rows_of(trace: Destinations, manifest: Manifest, parameters: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Tensor -> parameter, box, offset and strides (of dimensions of more than one index)."""
    found = {}
    for i in range(len(trace)):
        sizes, strides = trace.sizes[i].tolist(), trace.strides[i].tolist()
        name = manifest.names[int(trace.tensor[i])]
        box = (trace.starts[i].tolist(), sizes, int(trace.offset[i]), [s for s, n in zip(strides, sizes) if n > 1])  # noqa: B905 - equally long
        assert name not in found, "a tensor goes to one place"
        found[name] = (parameters[int(trace.parameter[i])], *box)
    return found


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_simulated_destinations_are_those_of_the_embedded_fleet(data: st.DataObject) -> None:
    config = data.draw(models())
    grid = data.draw(rollouts(config))
    tensors, parsed = tensors_of(family_of(config)), parse_config(config)
    assert dict(zip(tensors.manifest.names, tensors.manifest.shapes, strict=True)) == checkpoint_shapes(parsed)
    rank = data.draw(st.integers(0, grid.workers - 1))
    held = worker_parts(parsed, layout_of(grid).place(rank))
    expected = {}
    for name, part in held.parts.items():
        if not part.source.volume:
            continue
        strides = contiguous_strides(held.parameters[part.parameter])
        offset = sum(o * s for o, s in zip(part.target.offsets, strides, strict=True))
        own = strides[len(strides) - len(part.source.sizes) :]
        wide = 2 - len(part.source.sizes)
        expected[name] = (
            part.parameter,
            [*part.source.offsets, *[0] * wide],
            [*part.source.sizes, *[1] * wide],
            offset,
            [s for s, n in zip(own, part.source.sizes, strict=True) if n > 1],
        )
    trace = rollout_trace(tensors, grid, rank)
    assert rows_of(trace.destinations, tensors.manifest, trace.parameters) == expected
    assert set(trace.parameters) == set(held.parameters)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_simulated_destinations_are_what_a_trace_of_the_embedded_loader_says(data: st.DataObject) -> None:
    config = data.draw(models())
    grid = data.draw(rollouts(config))
    rank = data.draw(st.integers(0, grid.workers - 1))
    tensors = tensors_of(family_of(config))
    model = ReferenceModel(parse_config(config), layout_of(grid).place(rank))
    trace = trace_loader(model.load_weights, dict(model.named_parameters()), tensors.manifest)
    copies = trace.copies
    found = destinations_of(
        tensors.manifest,
        sources=copies.sources,
        source_offsets=copies.source_offsets,
        source_strides=copies.source_strides,
        sizes=copies.sizes,
        destinations=copies.destinations,
        offsets=copies.offsets,
        strides=copies.strides,
        throughs=copies.throughs,
        dtypes=trace.destinations.dtypes,
    )
    assert found.reasons == {}
    simulated = rollout_trace(tensors, grid, rank)
    assert rows_of(found.destinations, tensors.manifest, trace.destinations.names) == rows_of(
        simulated.destinations, tensors.manifest, simulated.parameters
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_plan_of_any_two_grids_gives_every_worker_what_the_oracle_says(data: st.DataObject) -> None:
    config = data.draw(models())
    rollout, trainer = data.draw(rollouts(config)), data.draw(trainers(config))
    tensors, weights = tensors_of(family_of(config)), unique_weights(config)
    shards = trainer_shards(tensors, trainer)
    fleet = rollout_fleet(tensors, rollout)
    plan = make_plan(tensors.manifest, shards, fleet)
    segments = filled(shards, {i: weights[name] for i, name in enumerate(tensors.manifest.names)})
    worker = data.draw(st.integers(0, len(fleet) - 1))
    rank = worker % rollout.workers
    expected = worker_parameters(weights, config, layout_of(rollout), rank)
    names = rollout_trace(tensors, rollout, rank).parameters
    bits = numpy_dtype(int(shards.dtype[0]))
    held = [np.zeros(expected[name].size, dtype=bits) for name in names]
    written = carry_out(plan.for_worker(worker), segments, held)
    for name, array, times in zip(names, held, written, strict=True):
        assert array.tobytes() == expected[name].tobytes(), name
        # Only padding, which is zero, is written by nothing.
        assert times.max(initial=1) == 1
        assert not expected[name].reshape(-1)[times == 0].any()


@pytest.mark.parametrize("config", [SMALL_LATENT, SMALL_LLAMA, {**SMALL_LATENT, "q_lora_rank": None}])
@pytest.mark.parametrize("rollout", ["tp=1", "tp=4", "tp=2,pp=3", "tp=2,dp=2"])
@pytest.mark.parametrize("trainer", ["tp=2,cp=2", "tp=4,pp=3", "fsdp=7", "fsdp=3,dp=2"])
def test_every_family_has_a_plan_that_covers_every_tensor_on_every_replica(
    config: dict[str, Any], rollout: str, trainer: str
) -> None:
    tensors, grid = tensors_of(family_of(config)), RolloutGrid.parse(rollout)
    plan = make_plan(
        tensors.manifest, trainer_shards(tensors, TrainerGrid.parse(trainer)), rollout_fleet(tensors, grid)
    )
    taken = np.zeros(len(tensors.manifest), dtype=np.int64)
    for worker in range(grid.pp * grid.tp):  # of one replica
        rows = plan.for_worker(worker).targets
        np.add.at(taken, rows.tensor, rows.sizes.prod(axis=1))
    volumes = np.array([math.prod(shape) for shape in tensors.manifest.shapes])
    assert (taken >= volumes).all()
    cut = np.array([kind.cut.value not in ("whole", "key_value_heads") for kind in tensors.kinds])[tensors.kind]
    assert (taken[cut] == volumes[cut]).all()
    whole = np.array([kind.cut.value == "whole" for kind in tensors.kinds])[tensors.kind]
    assert (taken[whole] == volumes[whole] * grid.tp).all()


def test_latent_attention_keeps_down_projections_whole_and_cuts_up_projections_by_heads() -> None:
    tensors, grid = tensors_of(family_of(SMALL_LATENT)), RolloutGrid.parse("tp=2,ep=2")
    trace = rollout_trace(tensors, grid, 1)
    rows = rows_of(trace.destinations, tensors.manifest, trace.parameters)
    prefix = "model.layers.0.self_attn"
    fused = f"{prefix}.fused_qkv_a_proj.weight"
    assert rows[f"{prefix}.q_a_proj.weight"] == (fused, [0, 0], [6, 16], 0, [16, 1])
    assert rows[f"{prefix}.kv_a_proj_with_mqa.weight"] == (fused, [0, 0], [7, 16], 96, [16, 1])
    assert rows[f"{prefix}.q_b_proj.weight"] == (f"{prefix}.q_b_proj.weight", [12, 0], [12, 6], 0, [6, 1])
    assert rows[f"{prefix}.kv_b_proj.weight"] == (f"{prefix}.kv_b_proj.weight", [14, 0], [14, 5], 0, [5, 1])
    assert rows[f"{prefix}.o_proj.weight"] == (f"{prefix}.o_proj.weight", [0, 6], [16, 6], 0, [6, 1])
    assert rows["model.layers.1.mlp.gate.e_score_correction_bias"][2] == [8, 1]
    w13 = "model.layers.2.mlp.experts.w13_weight"
    assert rows["model.layers.2.mlp.experts.5.up_proj.weight"] == (w13, [0, 0], [8, 16], 256 + 128, [16, 1])
    assert "model.layers.2.mlp.experts.3.up_proj.weight" not in rows
    shared = "model.layers.1.mlp.shared_experts.gate_up_proj.weight"
    assert rows["model.layers.1.mlp.shared_experts.up_proj.weight"] == (shared, [4, 0], [4, 16], 64, [16, 1])
    index = tensors.manifest.index["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert tensors.manifest.dtypes[index] == "float32"


@pytest.mark.parametrize(
    ("changes", "tensors", "parameters"),
    [
        ({}, 69_975, 1_026_408_232_448),
        # DeepSeek-V3, without the layer that predicts further tokens.
        (
            {
                "num_attention_heads": 128,
                "n_routed_experts": 256,
                "first_k_dense_replace": 3,
                "vocab_size": 129280,
                "num_nextn_predict_layers": 1,
            },
            45_395,
            671_026_419_200,
        ),
    ],
)
def test_large_models_have_as_many_parameters_as_is_known_of_them(
    changes: dict[str, Any], tensors: int, parameters: int
) -> None:
    family = family_of({**KIMI_K2, **changes})
    manifest = tensors_of(family).manifest
    manifest.check()
    assert len(manifest) == tensors
    assert sum(math.prod(shape) for shape in manifest.shapes) == parameters
    assert ("num_nextn_predict_layers" in family.left_out) == bool(changes)


QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}


def test_the_layout_with_known_counts_has_them() -> None:
    simulation = simulate(
        QWEN3_30B, TrainerGrid.parse("tp=4,cp=2,ep=8"), RolloutGrid.parse("tp=8,ep=8,engines=1"), 512 * 2**20
    )
    calls = simulation.worker_calls()
    assert (calls["broadcast"], calls["per_layer"], calls["direct"]) == (3120, 432, 8)
    assert 8 <= calls["ranklocal"] <= 176
    assert len(simulation.flushes.dense) == 6
    assert [len(layer) for layer in simulation.flushes.layers] == [8] * 48
    sent, taken = simulation.sender_bytes(), simulation.worker_bytes()
    for mode in MODES:
        assert int(sent[mode].sum()) == int(taken[mode].sum())
    assert taken["broadcast"].tolist() == [sum(simulation.tensors.manifest.sizes)] * 8
    assert taken["direct"].max() < taken["ranklocal"].max() <= taken["per_layer"].max() < taken["broadcast"].max()
    messages = request_bytes(simulation)
    assert messages["direct"] < 8 * 1024
    assert messages["direct"] < messages["ranklocal"] < messages["per_layer"]
    assert sent["direct"].max() <= 1.05 * sent["direct"].min()


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_simulated_rank_local_counts_are_those_of_a_push(data: st.DataObject) -> None:
    config = data.draw(models())
    grid = data.draw(rollouts(config))
    assume(grid.engines == 1 and grid.workers <= 8)
    bucket = data.draw(st.sampled_from([1, 2_000, 20_000, 10**6]))
    simulation = simulate(config, TrainerGrid(), grid, bucket)
    weights = as_torch(unique_weights(config), config["dtype"])
    ordered = {name: weights[name] for name in simulation.tensors.manifest.names}
    with (
        Fleet(config, layout_of(grid)) as fleet,
        rankcast.connect(
            WatchedClient(fleet.receivers),
            IterableSource(Stream(ordered)),
            mode="ranklocal",
            bucket_bytes=bucket,
        ) as sync,
    ):
        report = sync.push("1")
    assert report.rounds == simulation.rounds.count
    assert report.worker_calls == simulation.worker_calls()["ranklocal"]
    assert [row.nbytes for row in report.workers] == simulation.worker_bytes()["ranklocal"].tolist()
    assert [row.tensors for row in report.workers] == [
        len(simulation.touched[t]) for t in simulation.plan.fleet.trace_of_worker
    ]


def test_a_trillion_parameters_are_planned_whole_and_replicas_send_alike() -> None:
    tensors = tensors_of(family_of(KIMI_K2))
    trainer = TrainerGrid.parse("pp=16,ep=64")
    fleet = rollout_fleet(tensors, RolloutGrid.parse("dp=32,ep=32,engines=32"), first_host=128)
    plan = make_plan(tensors.manifest, trainer_shards(tensors, trainer), fleet)
    # Each of 32 workers takes all that is no expert's, and an engine all experts once.
    plain = int((tensors.expert < 0).sum())
    assert plan.routes == 32 * (69_120 + 32 * plain)
    sent = plan.sender_bytes.reshape(16, 64)
    assert (sent.max(axis=1) <= 1.05 * sent.min(axis=1)).all()
    assert int(sent.sum()) == int(plan.worker_bytes.sum())
