"""Packed experts: names and values are those under which transformers itself saves the same model.

It knows transformers' models and files; it must not know meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from rankcast.errors import ManifestError, UnsupportedError
from rankcast.geometry import Box
from rankcast.trainer.sources import ModuleSource, export_shards
from rankcast.trainer.sources.packed import RULES, pieces
from trainer.shard_reading import assembled, bits

transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("experts are packed since transformers 5", allow_module_level=True)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Gate and up are of one shape, and rows and columns of one size where it can be: nothing could be told from sizes.
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], object]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **MOE, head_dim=8),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SMALL, **MOE, shared_expert_intermediate_size=16),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SMALL,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}


def model_of(architecture: str) -> nn.Module:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[architecture]())
    with torch.no_grad():
        for parameter in model.parameters():
            # Every kind of bits, NaNs and -0.0 among them.
            parameter.view(torch.int32).random_(-(2**31), 2**31 - 1)
    return model


def read(source: ModuleSource) -> dict[str, bytes]:
    found = {}
    for weight in source.read():
        buffer = torch.full((weight.meta.nbytes,), 0xA5, dtype=torch.uint8)
        weight.write(buffer)
        found[weight.meta.name] = buffer.numpy().tobytes()
    return found


def test_each_rule_is_proved_by_a_model() -> None:
    assert CONFIGS.keys() == RULES.keys()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_model_is_handed_over_as_transformers_saves_it(architecture: str, tmp_path: Path) -> None:
    model = model_of(architecture)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    source = ModuleSource(model)
    assert set(source.manifest().names) == set(saved)
    assert any(".experts.3." in name for name in saved)
    shapes = dict(zip(source.manifest().names, source.manifest().shapes, strict=True))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert read(source) == {name: bits(tensor).tobytes() for name, tensor in saved.items()}
    export = export_shards(source)
    assert export is not None
    assert export.rows.staged == {}
    found = assembled([(source.manifest(), export.rows)])
    assert found.keys() == saved.keys()
    assert all(np.array_equal(found[name], bits(tensor)) for name, tensor in saved.items())


def test_a_loaded_model_goes_direct_too(tmp_path: Path) -> None:
    model = model_of("qwen3_moe")
    model.save_pretrained(tmp_path)
    source = ModuleSource(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    export = export_shards(source)
    assert export is not None
    assert export.rows.staged == {}
    found = assembled([(source.manifest(), export.rows)])
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert np.array_equal(found[name], bits(tensor)), name


class _Packed(nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, model_type: str | None = None) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.gate_up_proj = nn.Parameter(gate_up)
        self.mlp.experts.down_proj = nn.Parameter(down)
        if model_type is not None:
            self.config = type("Config", (), {"model_type": model_type})()


GATE_UP, DOWN = torch.arange(3 * 8 * 4.0).view(3, 8, 4), torch.arange(3 * 4 * 4.0).view(3, 4, 4)


@pytest.mark.parametrize("model_type", [None, "something_new"])
def test_a_packed_tensor_without_a_rule_is_refused_by_name(model_type: str | None) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ModuleSource(_Packed(GATE_UP, DOWN, model_type)).manifest()
    assert all(part in str(caught.value) for part in ("mlp.experts.gate_up_proj", "experts=", "qwen3_moe"))
    assert caught.value.tensor == "mlp.experts.gate_up_proj"
    assert model_type is None or model_type in str(caught.value)


def test_a_rule_that_is_named_counts_over_the_configuration() -> None:
    source = ModuleSource(_Packed(GATE_UP, DOWN, "something_new"), experts="qwen3_moe")
    assert read(source)["mlp.experts.2.up_proj.weight"] == bits(GATE_UP[2, 4:]).tobytes()
    assert read(source)["mlp.experts.1.down_proj.weight"] == bits(DOWN[1]).tobytes()
    assert len(source.manifest()) == 9


def test_packed_tensors_stay_packed_on_demand() -> None:
    source = ModuleSource(_Packed(GATE_UP, DOWN, "qwen3_moe"), experts="packed")
    assert source.manifest().names == ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    assert read(source)["mlp.experts.down_proj"] == bits(DOWN).tobytes()


def test_an_unknown_rule_and_a_shape_that_does_not_fit_are_refused() -> None:
    with pytest.raises(ManifestError, match="qwen9_moe"):
        ModuleSource(_Packed(GATE_UP, DOWN), experts="qwen9_moe").manifest()
    with pytest.raises(UnsupportedError) as caught:
        ModuleSource(_Packed(torch.zeros(3, 7, 4), DOWN), experts="qwen3_moe").manifest()
    assert all(part in str(caught.value) for part in ("gate_up_proj", "[3, 7, 4]"))


def test_rename_sees_the_names_of_single_experts() -> None:
    source = ModuleSource(_Packed(GATE_UP, DOWN), experts="qwen3_moe", rename=lambda name: f"layer.{name}")
    assert "layer.mlp.experts.0.gate_proj.weight" in source.manifest().names


def test_a_dtype_is_declared_expert_by_expert() -> None:
    source = ModuleSource(
        _Packed(GATE_UP, DOWN), experts="qwen3_moe", dtype=lambda name: torch.bfloat16 if ".1.up" in name else None
    )
    dtypes = dict(zip(source.manifest().names, source.manifest().dtypes, strict=True))
    assert [name for name, dtype in dtypes.items() if dtype == "bfloat16"] == ["mlp.experts.1.up_proj.weight"]
    assert read(source)["mlp.experts.1.up_proj.weight"] == bits(GATE_UP[1, 4:].to(torch.bfloat16)).tobytes()


@given(st.data())
def test_the_boxes_of_pieces_cover_a_box_of_the_packed_tensor_exactly(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 4)), 2 * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True))
    box = Box(starts, sizes)
    packed = np.arange(np.prod(shape)).reshape(shape)
    found = pieces(RULES["qwen3_moe"], "mlp.experts.gate_up_proj", shape)
    assert found is not None
    seen = np.zeros(shape, dtype=np.int64)
    for piece in found:
        if (mine := piece.of(box)) is None:
            continue
        inner, outer = mine
        assert outer.sizes[0] == 1
        own = packed[piece.expert, piece.start : piece.stop]
        there = packed[tuple(slice(o, o + n) for o, n in zip(outer.offsets, outer.sizes, strict=True))]
        here = own[tuple(slice(o, o + n) for o, n in zip(inner.offsets, inner.sizes, strict=True))]
        assert np.array_equal(there[0], here)
        seen[tuple(slice(o, o + n) for o, n in zip(outer.offsets, outer.sizes, strict=True))] += 1
    expected = np.zeros(shape, dtype=np.int64)
    expected[tuple(slice(o, o + n) for o, n in zip(starts, sizes, strict=True))] = 1
    assert np.array_equal(seen, expected)
