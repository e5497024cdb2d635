"""The checkpoint with which the demo begins: a small ``qwen3_moe`` in Hugging Face's form.

This module knows the demo's sizes and how weights are drawn. It must not know torch, trainers or fleets.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.parts import checkpoint_shapes

#: About 27 MiB in float32, nearly all of it experts, as in the models that this is about.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 1000,
}


def write_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into ``directory`` (made if absent); returns it.

    Matrices have sigma 1/sqrt(fan_in), so that log-probabilities are far from flat and a wrong tensor shows in them.
    """
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in checkpoint_shapes(parse_config(CONFIG)).items():
        drawn = generator.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            weights[name] = 1 + np.float32(0.1) * drawn
        else:
            weights[name] = np.float32(1 / math.sqrt(shape[-1])) * drawn
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
