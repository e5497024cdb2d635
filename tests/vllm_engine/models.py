"""Checkpoints of small models that vLLM's CPU backend runs, by family; each exists in an A and a B.

It knows configs, checkpoint names and shapes of the families; it must not know vLLM, layouts or rankcast. Matrices are
scaled by 1/sqrt(fan_in): with flat outputs a wrong weight would not show in the log-probs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import oracle
from checkpoints import bits_of, write_checkpoint

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

_SHARED: Config = {
    "attention_bias": False,
    "bos_token_id": 511,
    "dtype": "bfloat16",
    "eos_token_id": 511,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}
_MOE: Config = {
    **_SHARED,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "use_sliding_window": False,
}
_CONFIGS: dict[str, Config] = {
    "moe": _MOE,
    # 48 is padded to 64 by one rank or where experts are spread, and 24 to 32 by each of two.
    "padded": {**_MOE, "moe_intermediate_size": 48},
    "tied": {
        **_SHARED,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "llama": {**_SHARED, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 32},
    "latent": {
        **_SHARED,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": False,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 64,
    },
    # vLLM's reload leaves biases where they are, and writes them there.
    "biased": {**_SHARED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 32},
    # Its activation has buffers that belong to its state, and that checkpoints need not have.
    "buffered": {
        **_SHARED,
        "architectures": ["ApertusForCausalLM"],
        "model_type": "apertus",
        "head_dim": 32,
        "hidden_act": "xielu",
    },
}
FAMILIES = tuple(_CONFIGS)


def config_of(family: str) -> Config:
    """A fresh config.json of ``family``."""
    found: Config = json.loads(json.dumps(_CONFIGS[family]))
    return found


def shapes_of(family: str) -> Shapes:
    """Name and full shape of every tensor in a checkpoint of ``family``."""
    config = _CONFIGS[family]
    kinds: dict[str, Callable[[Config], Shapes]] = {
        "qwen3_moe": oracle.checkpoint_shapes,
        "qwen3": _dense,
        "llama": _dense,
        "deepseek_v2": _latent,
        "qwen2": _dense,
        "apertus": _apertus,
    }
    return dict(kinds[config["model_type"]](config))


def weights_of(family: str, which: str) -> dict[str, torch.Tensor]:
    """The bfloat16 tensors of checkpoint ``which`` of ``family``, the same at every call."""
    generator = torch.Generator().manual_seed(1000 * FAMILIES.index(family) + sum(which.encode()))
    return {name: _drawn(name, shape, generator) for name, shape in shapes_of(family).items()}


def write_model(root: Path, family: str, which: str, shards: int = 1) -> Path:
    """Write checkpoint ``which`` of ``family`` below ``root``, once; returns its directory."""
    directory = root / f"{family}-{which}"
    if not (directory / "config.json").exists():
        weights = {name: bits_of(tensor) for name, tensor in weights_of(family, which).items()}
        write_checkpoint(directory, config_of(family), weights, shards)
    return directory


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    if name.endswith(".bias") or ".act_fn." in name:
        values = normal
    elif "norm" in name:
        values = 1 + 0.2 * normal
    elif name.endswith("embed_tokens.weight"):
        values = normal
    else:
        sharp = name == "lm_head.weight" or name.endswith("mlp.gate.weight")
        values = normal * ((2 if sharp else 1) / math.sqrt(shape[-1]))
    return values.to(torch.bfloat16)


def _ends(config: Config) -> Shapes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    ends: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = (vocabulary, hidden)
    return ends


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _norms(prefix: str, hidden: int) -> Shapes:
    return {f"{prefix}.input_layernorm.weight": (hidden,), f"{prefix}.post_attention_layernorm.weight": (hidden,)}


def _dense(config: Config) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = _ends(config)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes.update(_norms(layer, hidden))
        shapes[f"{layer}.self_attn.q_proj.weight"] = (queries, hidden)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (keys, hidden)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (keys, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, queries)
        if config["model_type"] == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
        if config["model_type"] == "qwen2":
            shapes[f"{layer}.self_attn.q_proj.bias"] = (queries,)
            shapes[f"{layer}.self_attn.k_proj.bias"] = (keys,)
            shapes[f"{layer}.self_attn.v_proj.bias"] = (keys,)
        shapes.update(_mlp(f"{layer}.mlp", hidden, config["intermediate_size"]))
    return shapes


def _apertus(config: Config) -> Shapes:
    shapes = _dense({**config, "model_type": "qwen3"})
    renamed = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for old, new in renamed.items():
            shapes[f"{layer}.{new}.weight"] = shapes.pop(f"{layer}.{old}.weight")
        del shapes[f"{layer}.mlp.gate_proj.weight"]
        shapes[f"{layer}.mlp.act_fn.alpha_p"] = shapes[f"{layer}.mlp.act_fn.alpha_n"] = (1,)
    return shapes


def _latent(config: Config) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes = _ends(config)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes.update(_norms(layer, hidden))
        shapes[f"{layer}.self_attn.q_proj.weight"] = (heads * (plain + rotary), hidden)
        shapes[f"{layer}.self_attn.kv_a_proj_with_mqa.weight"] = (rank + rotary, hidden)
        shapes[f"{layer}.self_attn.kv_a_layernorm.weight"] = (rank,)
        shapes[f"{layer}.self_attn.kv_b_proj.weight"] = (heads * (plain + value), rank)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, heads * value)
        if number < config["first_k_dense_replace"]:
            shapes.update(_mlp(f"{layer}.mlp", hidden, config["intermediate_size"]))
            continue
        inner = config["moe_intermediate_size"]
        shapes[f"{layer}.mlp.gate.weight"] = (config["n_routed_experts"], hidden)
        for expert in range(config["n_routed_experts"]):
            shapes.update(_mlp(f"{layer}.mlp.experts.{expert}", hidden, inner))
        shapes.update(_mlp(f"{layer}.mlp.shared_experts", hidden, inner * config["n_shared_experts"]))
    return shapes
