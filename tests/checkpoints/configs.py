"""Small config.json dicts. It knows what Hugging Face writes for an architecture; it knows no weights and no files."""

from __future__ import annotations

from typing import Any

_TINY_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 100,
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A qwen3_moe config of about 0.1 MiB in fp32, with ``overrides`` put over it.

    Raises TypeError for a key that the config does not have: a misspelt override would test nothing.
    """
    if unknown := sorted(set(overrides) - set(_TINY_QWEN3_MOE)):
        raise TypeError(f"tiny_config has no {unknown}")
    config = {**_TINY_QWEN3_MOE, **overrides}
    config["mlp_only_layers"] = list(config["mlp_only_layers"])
    return config
