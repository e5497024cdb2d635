"""The model of a bench: a mixture of experts of a wanted size, and bits for it that any process can make again.

It knows a configuration and names. It must not know processes, modes or times.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import torch

from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout

#: One engine of four workers: two data-parallel replicas of two, experts spread over all four.
LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
WORKERS = LAYOUT.workers
TRAINER_RANKS = 2

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
#: Least bytes of all destinations -> hidden size and layers; experts make up the rest.
_SHAPES = ((2**31, 2048, 4), (2**29, 1024, 4), (2**27, 512, 4), (0, 256, 2))


def config_of(size: int) -> dict[str, Any]:
    """A ``qwen3_moe`` configuration of which four workers together hold about ``size`` bytes, in bfloat16."""
    hidden, layers = next((h, n) for least, h, n in _SHAPES if size >= least)
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 128,
        "mlp_only_layers": [],
        "moe_intermediate_size": 3 * hidden // 8,
        "norm_topk_prob": True,
        "num_attention_heads": hidden // 64,
        "num_experts": WORKERS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": max(2, hidden // 256),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 16 * hidden,
    }
    least = destination_bytes(config)
    config["num_experts"] = 2 * WORKERS
    step = destination_bytes(config) - least
    config["num_experts"] = WORKERS * max(1, 1 + round((size - least) / step))
    return config


def destination_bytes(config: dict[str, Any]) -> int:
    """What the parameters of all workers together weigh."""
    return sum(
        parameter.nbytes
        for rank in range(WORKERS)
        for parameter in ReferenceModel(parse_config(config), LAYOUT.place(rank), device="meta").parameters()
    )


def held_by(names: list[str], config: dict[str, Any], rank: int) -> list[str]:
    """What a trainer rank holds: what is no expert's, and its half of the experts."""
    half = config["num_experts"] // TRAINER_RANKS
    mine = range(rank * half, config["num_experts"] if rank == TRAINER_RANKS - 1 else (rank + 1) * half)
    return [name for name in names if (found := _EXPERT.search(name)) is None or int(found[1]) in mine]


def fill(tensor: torch.Tensor, name: str, step: int) -> None:
    """Make ``tensor`` what ``name`` is in ``step``: bits at random, the same in every process. Any strides."""
    seed = int.from_bytes(hashlib.blake2b(f"{name} {step}".encode(), digest_size=8).digest(), "little")
    words = -(-tensor.nbytes // 8)
    bits = np.random.default_rng(seed).integers(0, 2**64, size=words, dtype=np.uint64).view(np.int16)
    with torch.no_grad():
        tensor.view(torch.int16).copy_(torch.from_numpy(bits[: tensor.numel()]).view(tensor.shape))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """One digest of all, by name; tensors are contiguous."""
    state = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        state.update(name.encode())
        state.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
