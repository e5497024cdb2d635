"""load_weights puts every bit of full checkpoint tensors where the oracle says, and nothing anywhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from checkpoints import as_torch, bits_of, tiny_config
from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout
from rankcast.errors import ManifestError


def made(raw, layout=None, rank=0):
    return ReferenceModel(parse_config(raw), (layout or Layout()).place(rank))


def unlike(raw, weights, layout, rank, model):
    """Every difference between what ``model`` holds and what the oracle says."""
    expected = oracle.worker_parameters(weights, raw, layout, rank)
    return oracle.compare(expected, {name: bits_of(p) for name, p in model.named_parameters()})


@settings(max_examples=25)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 3),
    dp=st.integers(1, 2),
    expert_parallel=st.booleans(),
    tied=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    experts=st.integers(3, 9),
    dense=st.lists(st.integers(0, 2), max_size=2),
    vocab=st.sampled_from([7, 64, 100]),
    order=st.randoms(use_true_random=False),
)
def test_every_worker_holds_bit_for_bit_what_the_oracle_says(
    tp, pp, dp, expert_parallel, tied, bias, dtype, experts, dense, vocab, order
):
    raw = tiny_config(
        tie_word_embeddings=tied,
        attention_bias=bias,
        dtype=dtype,
        num_experts=experts,
        mlp_only_layers=dense,
        vocab_size=vocab,
        hidden_size=16,
        max_position_embeddings=16,
    )
    layout = Layout(tp, pp, dp, expert_parallel)
    steps = [oracle.unique_weights(raw, step) for step in (0, 1)]
    streams = [list(as_torch(weights, dtype).items()) for weights in steps]
    for rank in range(layout.workers):
        model = made(raw, layout, rank)
        for weights, stream in zip(steps, streams, strict=True):
            order.shuffle(stream)
            written = model.load_weights(stream)
            held = {name for name, parameter in model.named_parameters() if parameter.numel()}
            assert written == held - all_padding(raw, layout, rank)
            assert not unlike(raw, weights, layout, rank, model)


def all_padding(raw, layout, rank):
    """Vocabulary-sharded parameters of which this worker has padding rows only: nothing is ever written there."""
    rows = oracle.padded_vocabulary(raw["vocab_size"], layout.tp) // layout.tp
    if oracle.place(layout, rank).tp_index * rows < raw["vocab_size"]:
        return set()
    return {"model.embed_tokens.weight", "lm_head.weight"}


def test_fused_rows_lie_as_written_out_by_hand():
    raw = tiny_config(num_hidden_layers=1)
    full = as_torch(oracle.unique_weights(raw), "float32")
    layout = Layout(tp=2, dp=2, expert_parallel=True)
    model = made(raw, layout, rank=3)  # dp 1, tp 1: ep rank 3 of 4, experts 6 and 7
    model.load_weights(full.items())
    held = {name: bits_of(p) for name, p in model.named_parameters()}
    full = {name: bits_of(t) for name, t in full.items()}
    attention = "model.layers.0.self_attn"
    qkv = held[f"{attention}.qkv_proj.weight"]
    assert qkv.shape == (32, 32)
    assert (qkv[:16] == full[f"{attention}.q_proj.weight"][16:32]).all()
    assert (qkv[16:24] == full[f"{attention}.k_proj.weight"][8:16]).all()
    assert (qkv[24:] == full[f"{attention}.v_proj.weight"][8:16]).all()
    assert (held[f"{attention}.o_proj.weight"] == full[f"{attention}.o_proj.weight"][:, 16:32]).all()
    w13, w2 = (held[f"model.layers.0.mlp.experts.{name}"] for name in ("w13_weight", "w2_weight"))
    assert (w13.shape, w2.shape) == ((2, 32, 32), (2, 32, 16))
    for index, expert in enumerate((6, 7)):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        assert (w13[index, :16] == full[f"{prefix}.gate_proj.weight"]).all()
        assert (w13[index, 16:] == full[f"{prefix}.up_proj.weight"]).all()
        assert (w2[index] == full[f"{prefix}.down_proj.weight"]).all()
    assert (held["lm_head.weight"][:36] == full["lm_head.weight"][64:]).all()
    assert not held["lm_head.weight"][36:].any()


def test_without_expert_parallel_every_expert_is_cut_by_tp():
    raw = tiny_config(num_hidden_layers=1)
    full = as_torch(oracle.unique_weights(raw), "float32")
    model = made(raw, Layout(tp=2, dp=2), rank=3)
    model.load_weights(full.items())
    w13 = bits_of(model.get_parameter("model.layers.0.mlp.experts.w13_weight"))
    w2 = bits_of(model.get_parameter("model.layers.0.mlp.experts.w2_weight"))
    assert (w13.shape, w2.shape) == ((8, 16, 32), (8, 32, 8))
    for expert in range(8):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        assert (w13[expert, :8] == bits_of(full[f"{prefix}.gate_proj.weight"])[8:]).all()
        assert (w13[expert, 8:] == bits_of(full[f"{prefix}.up_proj.weight"])[8:]).all()
        assert (w2[expert] == bits_of(full[f"{prefix}.down_proj.weight"])[:, 8:]).all()


@pytest.mark.parametrize("mistake", ["gate and up", "expert shifted", "k and v", "q heads", "tp ranks"])
def test_a_source_with_two_parts_exchanged_is_seen(mistake):
    raw = tiny_config(num_hidden_layers=1)
    weights = oracle.unique_weights(raw)
    layout = Layout(tp=2)
    full = as_torch(weights, "float32")
    mlp, attention = "model.layers.0.mlp.experts", "model.layers.0.self_attn"
    if mistake == "gate and up":
        one, other = f"{mlp}.3.gate_proj.weight", f"{mlp}.3.up_proj.weight"
        full[one], full[other] = full[other], full[one]
    elif mistake == "expert shifted":
        downs = [full[f"{mlp}.{e}.down_proj.weight"] for e in range(8)]
        full |= {f"{mlp}.{e}.down_proj.weight": downs[(e + 1) % 8] for e in range(8)}
    elif mistake == "k and v":
        one, other = f"{attention}.k_proj.weight", f"{attention}.v_proj.weight"
        full[one], full[other] = full[other], full[one]
    elif mistake == "q heads":
        full[f"{attention}.q_proj.weight"] = full[f"{attention}.q_proj.weight"].roll(8, 0)
    model = made(raw, layout, rank=0)
    model.load_weights(full.items())
    assert unlike(raw, weights, layout, 1 if mistake == "tp ranks" else 0, model)


def test_a_subset_writes_only_its_own_boxes():
    raw = tiny_config()
    old, new = oracle.unique_weights(raw, 0), oracle.unique_weights(raw, 1)
    model = made(raw, Layout(tp=2), 1)
    model.load_weights(as_torch(old, "float32").items())
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert model.load_weights([(name, as_torch(new, "float32")[name])]) == {"model.layers.1.mlp.experts.w13_weight"}
    assert not unlike(raw, old | {name: new[name]}, Layout(tp=2), 1, model)


class Untouchable(torch.Tensor):
    """A tensor of which not even the shape may be asked."""

    @property
    def shape(self):
        raise AssertionError("touched")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"touched by {func}")


def test_tensors_of_other_stages_experts_and_the_tied_head_are_not_touched():
    raw = tiny_config(tie_word_embeddings=True)
    layout = Layout(tp=2, pp=3, expert_parallel=True)
    model = made(raw, layout, 2)  # stage 1 of 3, experts 0 to 3
    bomb = torch.Tensor._make_subclass(Untouchable, torch.zeros(1))
    skipped = set(oracle.checkpoint_shapes(raw)) - oracle.touched(raw, layout, 2) | {"lm_head.weight"}
    assert {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.4.up_proj.weight"} <= skipped
    assert model.load_weights((name, bomb) for name in sorted(skipped)) == set()


def test_tied_embeddings_are_one_parameter_and_on_the_last_stage_too():
    raw = tiny_config(tie_word_embeddings=True)
    names = [set(dict(made(raw, Layout(pp=2), rank).named_parameters())) for rank in (0, 1)]
    assert all("model.embed_tokens.weight" in held and "lm_head.weight" not in held for held in names)
    untied = [set(dict(made(tiny_config(), Layout(pp=2), rank).named_parameters())) for rank in (0, 1)]
    assert ["model.embed_tokens.weight" in held for held in untied] == [True, False]
    assert ["lm_head.weight" in held for held in untied] == [False, True]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.gate.weight",
        "model.layers.0.mlp.experts.8.up_proj.weight",
        "model.layers.0.mlp.experts.w13_weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.up_proj.weight",
        "module.model.norm.weight",
        "",
    ],
)
def test_a_name_that_the_architecture_does_not_have_is_refused_and_named(name):
    model = made(tiny_config(), Layout(tp=2), 1)
    with pytest.raises(ManifestError, match="worker 1 of 2") as caught:
        model.load_weights([(name, torch.zeros(1))])
    assert caught.value.tensor == name
    assert str(caught.value).startswith(name)
    assert not any(p.any() for p in model.parameters())


@pytest.mark.parametrize("shape", [(128, 32), (32, 100), (50, 32), (3200,), (1, 100, 32)])
def test_a_wrong_shape_is_refused_with_both_shapes(shape):
    model = made(tiny_config())
    with pytest.raises(ManifestError) as caught:
        model.load_weights([("lm_head.weight", torch.ones(shape))])
    assert caught.value.tensor == "lm_head.weight"
    assert str(list(shape)) in str(caught.value)
    assert "[100, 32]" in str(caught.value)
    assert not model.get_parameter("lm_head.weight").any()


class Operations(TorchDispatchMode):
    """Records what is done and keeps ``copy_`` from moving anything."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.copies = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            assert target.shape == source.shape
            self.copies.append((target.untyped_storage().data_ptr(), target.storage_offset(), source))
            return target
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", range(4))
def test_loading_storageless_tensors_makes_only_views_and_one_copy_per_touched_tensor(rank):
    raw = tiny_config(mlp_only_layers=[1], attention_bias=True)
    layout = Layout(tp=2, dp=2, expert_parallel=True)
    model = made(raw, layout, rank)
    empty = {
        name: torch.empty(shape, dtype=torch.float32, device="meta")
        for name, shape in oracle.checkpoint_shapes(raw).items()
    }
    with Operations() as operations:
        written = model.load_weights(empty.items())
    copied = torch.ops.aten.copy_.default
    # Padding rows are written too, as zeros, so that a trace sees what they are.
    padded = torch.ops.aten.zero_.default
    assert all(func in (copied, padded) or func.is_view for func in operations.seen)
    touched = oracle.touched(raw, layout, rank)
    assert len(operations.copies) == len(touched)
    assert {id(source._base if source._base is not None else source) for _, _, source in operations.copies} == {
        id(empty[name]) for name in touched
    }
    assert written == set(dict(model.named_parameters()))
    assert not any(p.any() for p in model.parameters())


def test_parameters_take_the_dtype_asked_for_and_need_no_gradient():
    raw = tiny_config()
    model = ReferenceModel(parse_config(raw), Layout().place(0), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_a_parameter_that_was_replaced_is_written_where_it_is_now():
    raw = tiny_config()
    model = made(raw)
    old = model.get_parameter("model.norm.weight")
    model.get_submodule("model.norm").weight = torch.nn.Parameter(torch.zeros(32), requires_grad=False)
    model.load_weights([("model.norm.weight", torch.arange(32.0))])
    assert model.get_parameter("model.norm.weight")[31] == 31
    assert not old.any()
