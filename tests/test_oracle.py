"""The oracle itself: what it may import, that its formulas account for every element, and that its bits are unique."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import oracle
from checkpoints import as_torch, bits_of, scaled_weights, tiny_config, write_checkpoint
from oracle import Layout

ORACLE = Path(oracle.__file__).parent


def workers(layout: Layout) -> range:
    return range(oracle.workers(layout))


def test_the_oracle_imports_only_numpy_safetensors_and_the_standard_library():
    allowed = {"numpy", "safetensors"} | set(sys.stdlib_module_names)
    files = sorted(ORACLE.rglob("*.py"))
    assert len(files) >= 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = {str(node.module).split(".")[0]}
            else:
                continue
            assert roots <= allowed, f"{file.name} imports {roots - allowed}"


def test_the_shipped_name_is_the_same_oracle_and_loads_neither_torch_nor_the_library():
    source = ORACLE.parent.parent / "src"
    code = (
        "import sys, rankcast_oracle as o; assert o.worker_parameters;"
        "print(sorted({'torch', 'transformers', 'rankcast'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# Layouts and how often the formulas say each kind of element is held.

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(pp=3),
    Layout(tp=2, pp=2),
    Layout(dp=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=2, expert_parallel=True),
    Layout(dp=3, expert_parallel=True),
    Layout(tp=2, pp=2, dp=2, expert_parallel=True),
    Layout(tp=4, pp=2, dp=3, expert_parallel=True),
]
CONFIGS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "dense between": {"mlp_only_layers": [1]},
    "every second": {"decoder_sparse_step": 2, "num_hidden_layers": 5},
}


def expected_count(name: str, config: dict[str, Any], layout: Layout) -> int:
    """How many workers hold each element, said without any ranges."""
    everyone_on_a_stage = layout.tp * layout.dp
    if name == "model.embed_tokens.weight":
        return layout.dp * (2 if config["tie_word_embeddings"] and layout.pp > 1 else 1)
    if ".experts." in name:
        return 1 if layout.expert_parallel else layout.dp
    if "k_proj" in name or "v_proj" in name:
        return layout.dp * max(1, layout.tp // config["num_key_value_heads"])
    if name.endswith(("norm.weight", "mlp.gate.weight", "o_proj.bias")):
        return everyone_on_a_stage
    return layout.dp


@pytest.mark.parametrize("variant", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_is_held_by_exactly_as_many_workers_as_the_layout_says(variant: str, layout: Layout):
    config = tiny_config(**CONFIGS[variant])
    weights = oracle.unique_weights(config)
    everything = np.concatenate([bits.ravel() for bits in weights.values()])
    assert not np.any(everything == 0), "a zero would be taken for padding"
    held = [oracle.worker_parameters(weights, config, layout, rank) for rank in workers(layout)]
    patterns, counts = np.unique(np.concatenate([b.ravel() for w in held for b in w.values()]), return_counts=True)

    found = dict(zip(patterns.tolist(), counts.tolist(), strict=True))
    padding = found.pop(0, 0)
    assert set(found) == set(everything.tolist())
    for name, bits in weights.items():
        assert {found[pattern] for pattern in bits.ravel().tolist()} == {expected_count(name, config, layout)}, name
    copies = 0 if config["tie_word_embeddings"] else layout.dp
    copies += expected_count("model.embed_tokens.weight", config, layout)
    assert padding == copies * (128 - 100) * config["hidden_size"]


@pytest.mark.parametrize("variant", CONFIGS)
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(tp=4, pp=5)], ids=str)
def test_touched_names_are_those_whose_elements_a_worker_holds(variant: str, layout: Layout):
    config = tiny_config(**CONFIGS[variant])
    weights = oracle.unique_weights(config)
    owner = {p: name for name, bits in weights.items() for p in bits.ravel().tolist()}
    for rank in workers(layout):
        held = oracle.worker_parameters(weights, config, layout, rank)
        patterns = {p for bits in held.values() for p in bits.ravel().tolist()} - {0}
        assert oracle.touched(config, layout, rank) == {owner[p] for p in patterns}


def test_a_worker_whose_vocabulary_rows_are_all_padding_touches_neither_embedding_nor_head():
    config = tiny_config(vocab_size=90, num_attention_heads=8)
    touched = [oracle.touched(config, Layout(tp=8), rank) for rank in range(8)]
    assert ["model.embed_tokens.weight" in names for names in touched] == [True] * 6 + [False] * 2
    assert ["lm_head.weight" in names for names in touched] == [True] * 6 + [False] * 2


# Places, one by one, against plain rows of the checkpoint.


def test_kv_heads_are_replicated_to_neighbours_when_tp_exceeds_them():
    config = tiny_config(attention_bias=True)
    weights = oracle.unique_weights(config)
    k, v = (weights[f"model.layers.0.self_attn.{part}_proj.weight"].reshape(2, 8, 32) for part in "kv")
    bias = weights["model.layers.0.self_attn.k_proj.bias"].reshape(2, 8)
    for rank, head in enumerate([0, 0, 1, 1]):
        held = oracle.worker_parameters(weights, config, Layout(tp=4), rank)
        qkv = held["model.layers.0.self_attn.qkv_proj.weight"]
        assert qkv.shape == (8 + 8 + 8, 32)
        np.testing.assert_array_equal(qkv[8:16], k[head])
        np.testing.assert_array_equal(qkv[16:], v[head])
        np.testing.assert_array_equal(held["model.layers.0.self_attn.qkv_proj.bias"][8:16], bias[head])


def test_qkv_rows_are_q_then_k_then_v_of_this_worker_and_o_columns_follow_q_heads():
    config = tiny_config()
    weights = oracle.unique_weights(config)
    held = oracle.worker_parameters(weights, config, Layout(tp=2), 1)
    qkv = held["model.layers.2.self_attn.qkv_proj.weight"]
    prefix = "model.layers.2.self_attn."
    np.testing.assert_array_equal(qkv[:16], weights[prefix + "q_proj.weight"][16:32])
    np.testing.assert_array_equal(qkv[16:24], weights[prefix + "k_proj.weight"][8:16])
    np.testing.assert_array_equal(qkv[24:], weights[prefix + "v_proj.weight"][8:16])
    np.testing.assert_array_equal(held[prefix + "o_proj.weight"], weights[prefix + "o_proj.weight"][:, 16:32])


def test_experts_are_stacked_gate_over_up_and_cut_inside_without_expert_parallelism():
    config = tiny_config()
    weights = oracle.unique_weights(config)
    held = oracle.worker_parameters(weights, config, Layout(tp=2), 1)
    w13, w2 = held["model.layers.1.mlp.experts.w13_weight"], held["model.layers.1.mlp.experts.w2_weight"]
    assert w13.shape == (8, 16, 32)
    assert w2.shape == (8, 32, 8)
    for expert in range(8):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        np.testing.assert_array_equal(w13[expert, :8], weights[prefix + "gate_proj.weight"][8:])
        np.testing.assert_array_equal(w13[expert, 8:], weights[prefix + "up_proj.weight"][8:])
        np.testing.assert_array_equal(w2[expert], weights[prefix + "down_proj.weight"][:, 8:])


def test_uneven_expert_parallelism_gives_the_first_workers_one_expert_more():
    config = tiny_config()
    weights = oracle.unique_weights(config)
    layout = Layout(dp=3, expert_parallel=True)
    firsts = {0: 0, 1: 3, 2: 6}
    for rank, count in enumerate([3, 3, 2]):
        held = oracle.worker_parameters(weights, config, layout, rank)
        w13, w2 = held["model.layers.0.mlp.experts.w13_weight"], held["model.layers.0.mlp.experts.w2_weight"]
        assert w13.shape == (count, 32, 32)
        for slot in range(count):
            prefix = f"model.layers.0.mlp.experts.{firsts[rank] + slot}."
            np.testing.assert_array_equal(w13[slot, :16], weights[prefix + "gate_proj.weight"])
            np.testing.assert_array_equal(w13[slot, 16:], weights[prefix + "up_proj.weight"])
            np.testing.assert_array_equal(w2[slot], weights[prefix + "down_proj.weight"])


def test_the_expert_group_spans_replicas_of_one_stage():
    layout = Layout(tp=2, pp=2, dp=2, expert_parallel=True)
    places = [oracle.place(layout, rank) for rank in workers(layout)]
    assert [(p.dp_index, p.pp_index, p.tp_index) for p in places] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert [p.ep_rank for p in places] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert {p.ep_size for p in places} == {4}


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [(61, [15, 15, 16, 15]), (6, [1, 2, 2, 1]), (7, [2, 2, 2, 1]), (8, [2, 2, 2, 2]), (3, [1, 1, 1, 0])],
)
def test_uneven_stages_give_the_remainder_to_the_last_but_one_and_backwards(layers: int, sizes: list[int]):
    ranges = [oracle.layer_range(layers, 4, stage) for stage in range(4)]
    assert [len(r) for r in ranges] == sizes
    assert [layer for r in ranges for layer in r] == list(range(layers))


def test_layers_keep_their_global_number_and_ends_live_on_the_end_stages():
    config = tiny_config(num_hidden_layers=5)
    weights = oracle.unique_weights(config)
    stages = [set(oracle.worker_parameters(weights, config, Layout(pp=3), rank)) for rank in range(3)]
    numbers = [{int(name.split(".")[2]) for name in names if ".layers." in name} for names in stages]
    assert numbers == [{0, 1}, {2, 3}, {4}]
    ends = [{name for name in names if ".layers." not in name} for names in stages]
    assert ends == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", "lm_head.weight"}]


def test_tied_models_hold_the_embedding_on_both_end_stages_and_no_head():
    config = tiny_config(tie_word_embeddings=True)
    weights = oracle.unique_weights(config)
    assert "lm_head.weight" not in weights
    held = [oracle.worker_parameters(weights, config, Layout(pp=3), rank) for rank in range(3)]
    assert ["model.embed_tokens.weight" in h for h in held] == [True, False, True]
    np.testing.assert_array_equal(held[0]["model.embed_tokens.weight"], held[2]["model.embed_tokens.weight"])
    assert all("lm_head.weight" not in h for h in held)
    with_head = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    assert oracle.compare(held[2], oracle.worker_parameters(with_head, config, Layout(pp=3), 2)) == []


@pytest.mark.parametrize(
    ("vocabulary", "tp", "padded"), [(100, 1, 128), (128, 2, 128), (100, 3, 129), (1, 4, 64), (151936, 8, 151936)]
)
def test_vocabularies_are_padded_to_64_and_then_to_tp(vocabulary: int, tp: int, padded: int):
    assert oracle.padded_vocabulary(vocabulary, tp) == padded


def test_padding_rows_are_zero_and_true_rows_lie_in_order():
    config = tiny_config()
    weights = oracle.unique_weights(config)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = [oracle.worker_parameters(weights, config, Layout(tp=4), rank)[name] for rank in range(4)]
        assert {r.shape for r in rows} == {(32, 32)}
        whole = np.concatenate(rows)
        np.testing.assert_array_equal(whole[:100], weights[name])
        assert not whole[100:].any()


def test_dense_layers_have_gate_up_and_down_cut_over_tp():
    config = tiny_config(mlp_only_layers=[1])
    weights = oracle.unique_weights(config)
    held = oracle.worker_parameters(weights, config, Layout(tp=2, dp=2, expert_parallel=True), 3)
    prefix = "model.layers.1.mlp."
    gate_up = held[prefix + "gate_up_proj.weight"]
    np.testing.assert_array_equal(gate_up[:24], weights[prefix + "gate_proj.weight"][24:])
    np.testing.assert_array_equal(gate_up[24:], weights[prefix + "up_proj.weight"][24:])
    np.testing.assert_array_equal(held[prefix + "down_proj.weight"], weights[prefix + "down_proj.weight"][:, 24:])
    assert prefix + "experts.w13_weight" not in held


# Refusals.


@pytest.mark.parametrize(
    ("overrides", "layout", "said"),
    [
        ({}, Layout(tp=3), "num_attention_heads = 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, Layout(tp=3), "num_key_value_heads = 2"),
        ({"num_attention_heads": 32}, Layout(tp=32), "moe_intermediate_size = 16"),
        ({"model_type": "mystery"}, Layout(), "mystery"),
    ],
)
def test_layouts_that_cannot_cut_the_model_are_refused(overrides: dict[str, Any], layout: Layout, said: str):
    config = tiny_config(**{k: v for k, v in overrides.items() if k != "model_type"})
    weights = oracle.unique_weights(config)
    with pytest.raises(ValueError, match=said):
        oracle.worker_parameters(weights, config | overrides, layout, 0)


def test_weights_of_another_checkpoint_are_refused():
    config = tiny_config()
    weights = oracle.unique_weights(config)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(ValueError, match="are missing"):
        oracle.worker_parameters({k: v for k, v in weights.items() if k != name}, config, Layout(), 0)
    with pytest.raises(ValueError, match="does not have"):
        oracle.worker_parameters({**weights, "extra.weight": weights[name]}, config, Layout(), 0)
    with pytest.raises(ValueError, match="has shape"):
        oracle.worker_parameters({**weights, name: weights[name].T}, config, Layout(), 0)
    with pytest.raises(ValueError, match="raw bits"):
        oracle.worker_parameters({**weights, name: weights[name].view(np.float32)}, config, Layout(), 0)
    with pytest.raises(ValueError, match="differ in width"):
        oracle.worker_parameters({**weights, name: weights[name].astype(np.uint16)}, config, Layout(), 0)
    with pytest.raises(ValueError, match="outside an engine"):
        oracle.worker_parameters(weights, config, Layout(tp=2), 2)


# Bits.


def test_every_element_of_a_four_byte_checkpoint_has_bits_of_its_own():
    for step in (0, 1, 17):
        bits = np.concatenate([b.ravel() for b in oracle.unique_weights(tiny_config(), step).values()])
        assert bits.dtype == np.uint32
        assert np.unique(bits).size == bits.size
        values = bits.view(np.float32)
        quiet = np.isnan(values) & ((bits & 0x00400000) != 0)
        assert quiet.any()
        assert (np.isnan(values) & ~quiet).any(), "no signalling NaN"


@pytest.mark.parametrize(("dtype", "window"), [("bfloat16", 65536), ("float16", 65536), ("float8_e4m3fn", 256)])
def test_narrow_elements_are_unique_within_a_window_and_windows_do_not_repeat(dtype: str, window: int):
    config = tiny_config(dtype=dtype, vocab_size=1000, hidden_size=64)
    bits = np.concatenate([b.ravel() for b in oracle.unique_weights(config).values()])
    whole = bits[: bits.size // window * window].reshape(-1, window)
    assert len(whole) >= 2
    for row in whole:
        assert np.unique(row).size == window
    # Neighbouring windows agree in no more places than chance has it.
    for a, b in pairwise(whole):
        assert np.count_nonzero(a == b) < 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_every_element_differs_from_itself_in_any_other_step(dtype: str):
    config = tiny_config(dtype=dtype)
    steps = [oracle.unique_weights(config, step) for step in (0, 1, 2, 5, 255)]
    for i, a in enumerate(steps):
        for b in steps[i + 1 :]:
            for name in a:
                assert np.all(a[name] != b[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_two_tensors_of_equal_shape_and_no_two_rows_have_the_same_bits(dtype: str):
    config = tiny_config(dtype=dtype, vocab_size=4096, hidden_size=64)
    weights = oracle.unique_weights(config)
    rows = [row.tobytes() for bits in weights.values() if bits.ndim == 2 for row in bits]
    assert len(set(rows)) == len(rows)
    whole = [bits.tobytes() for bits in weights.values()]
    assert len(set(whole)) == len(whole)


def test_compare_names_the_first_differing_element_with_both_patterns():
    zero = np.zeros((2, 3), np.float32)
    minus = zero.copy()
    minus[1, 1:] = -0.0
    assert oracle.compare({"w": zero}, {"w": minus}) == [
        "w: 2 of 6 elements differ, the first at (1, 1): holds 0x80000000, must be 0x00000000"
    ]
    nan = np.full(3, np.nan, np.float32)
    assert oracle.compare({"w": nan}, {"w": nan.copy()}) == []
    assert oracle.compare({"w": zero}, {"w": zero.T}) == ["w: shape (3, 2), must be (2, 3)"]
    assert oracle.compare({"w": zero}, {"w": zero.astype(np.float16)}) == ["w: 2 bytes an element, must be 4"]
    assert oracle.compare({"w": zero}, {"v": zero}) == [
        "w: missing, must have shape (2, 3)",
        "v: held, and must not be",
    ]
    assert oracle.compare({"w": zero}, {"w": np.zeros((3, 2), np.float32).T}) == []


def test_digests_follow_logical_order_and_tell_minus_zero_from_zero():
    bits = np.arange(6, dtype=np.uint32).reshape(2, 3)
    assert oracle.digest(bits) == oracle.digest(np.asfortranarray(bits))
    assert oracle.digest(bits) != oracle.digest(bits.T)
    assert oracle.digest(np.float32([0.0])) != oracle.digest(np.float32([-0.0]))
    config = tiny_config()
    weights = oracle.unique_weights(config)
    digests = oracle.worker_digests(weights, config, Layout(tp=2), 1)
    held = oracle.worker_parameters(weights, config, Layout(tp=2), 1)
    assert digests == {name: oracle.digest(bits) for name, bits in held.items()}


def mutations(weights: dict[str, np.ndarray[Any, Any]]) -> Iterator[tuple[str, dict[str, np.ndarray[Any, Any]]]]:
    """Checkpoints with one mistake each: a swap, a shift or a repeat."""
    mlp, attention = "model.layers.1.mlp.experts.", "model.layers.1.self_attn."

    def swapped(a: str, b: str) -> dict[str, np.ndarray[Any, Any]]:
        return {**weights, a: weights[b], b: weights[a]}

    yield "gate and up", swapped(mlp + "2.gate_proj.weight", mlp + "2.up_proj.weight")
    yield "experts", swapped(mlp + "2.down_proj.weight", mlp + "3.down_proj.weight")
    yield "norms", swapped(attention + "q_norm.weight", attention + "k_norm.weight")
    k = attention + "k_proj.weight"
    yield "kv heads", {**weights, k: np.roll(weights[k], 8, axis=0)}
    yield "k for v", {**weights, k: weights[attention + "v_proj.weight"]}
    yield "a repeated row", {**weights, k: np.vstack([weights[k][:1], weights[k][:-1]])}
    yield "transposed", {**weights, attention + "o_proj.weight": weights[attention + "o_proj.weight"].T.copy()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_every_swap_shift_and_repeat_changes_what_some_worker_must_hold(dtype: str):
    config = tiny_config(dtype=dtype)
    weights = oracle.unique_weights(config)
    layout = Layout(tp=2, dp=2, expert_parallel=True)
    right = [oracle.worker_digests(weights, config, layout, rank) for rank in range(4)]
    for what, wrong in mutations(weights):
        assert [oracle.worker_digests(wrong, config, layout, rank) for rank in range(4)] != right, what


# Checkpoint directories.


@given(
    shards=st.integers(1, 7),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
    step=st.integers(0, 200),
)
def test_written_checkpoints_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, shards: int, dtype: str, step: int
):
    config = tiny_config(dtype=dtype, num_hidden_layers=1)
    weights = oracle.unique_weights(config, step)
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), config, weights, shards)
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    assert len(files) == shards
    read_config, read = oracle.read_checkpoint(directory)
    assert read_config == config
    assert list(read) == list(weights)
    assert oracle.compare(weights, read) == []
    # The format's own reader agrees.
    loaded = {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    assert {str(tensor.dtype) for tensor in loaded.values()} == {f"torch.{dtype}"}
    assert oracle.compare(weights, {name: bits_of(tensor) for name, tensor in loaded.items()}) == []


def test_a_checkpoint_written_over_another_leaves_nothing_of_it(tmp_path: Path):
    config = tiny_config()
    write_checkpoint(tmp_path, config, oracle.unique_weights(config, 1), shards=3)
    write_checkpoint(tmp_path, config, oracle.unique_weights(config, 2))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert oracle.compare(oracle.unique_weights(config, 2), oracle.read_weights(tmp_path)) == []


def test_damaged_checkpoints_are_refused(tmp_path: Path):
    config = tiny_config(num_hidden_layers=1)
    weights = oracle.unique_weights(config)
    file = write_checkpoint(tmp_path, config, weights) / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-4], whole + b"\0" * 4, whole[:100]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            oracle.read_weights(tmp_path)
    write_checkpoint(tmp_path, config, weights, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"disagree about \['model\.norm\.weight'\]"):
        oracle.read_weights(tmp_path)


@pytest.mark.parametrize("variant", CONFIGS)
def test_names_shapes_and_bits_are_those_that_transformers_reads_and_writes(variant: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = tiny_config(**CONFIGS[variant])
    weights = scaled_weights(config, seed=3)
    directory = write_checkpoint(tmp_path / "ours", config, weights, shards=2)
    model, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.save_pretrained(tmp_path / "theirs")
    theirs_config, theirs = oracle.read_checkpoint(tmp_path / "theirs")
    assert oracle.compare(weights, theirs) == []
    # Their config.json describes the same checkpoint to the oracle.
    assert oracle.checkpoint_shapes(theirs_config) == oracle.checkpoint_shapes(config)
    assert model.config.rope_parameters["rope_theta"] == config["rope_theta"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scaled_weights_are_rounded_as_torch_rounds_and_repeat_for_the_same_seed(dtype: str):
    full = scaled_weights(tiny_config(), seed=1)
    rounded = {name: bits_of(tensor.to(getattr(torch, dtype))) for name, tensor in as_torch(full, "float32").items()}
    assert oracle.compare(rounded, scaled_weights(tiny_config(dtype=dtype), seed=1)) == []
    assert oracle.compare(full, scaled_weights(tiny_config(), seed=2)) != []
    spread = as_torch(full, torch.float32)
    assert 0.8 < spread["model.embed_tokens.weight"].std() < 1.2
    assert 1.6 < spread["lm_head.weight"].std() * 32**0.5 < 2.4
    assert 0.8 < spread["model.layers.0.mlp.experts.0.down_proj.weight"].std() * 16**0.5 < 1.2


def test_torch_tensors_and_bits_are_exact_both_ways():
    config = tiny_config(dtype="bfloat16")
    weights = oracle.unique_weights(config, 4)
    tensors = as_torch(weights, "bfloat16")
    assert oracle.compare(weights, {name: bits_of(tensor) for name, tensor in tensors.items()}) == []
    turned = tensors["lm_head.weight"].t()
    np.testing.assert_array_equal(bits_of(turned), weights["lm_head.weight"].T)
    with pytest.raises(ValueError, match="bytes an element"):
        as_torch(weights, "float32")
    with pytest.raises(TypeError, match="hiden_size"):
        tiny_config(hiden_size=3)
