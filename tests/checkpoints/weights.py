"""Random weights under which a wrong tensor shows in the log-probs. It knows roles by name; it knows no layouts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from oracle import as_bits, checkpoint_shapes

Bits = np.ndarray[Any, Any]


def scaled_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Bits]:
    """Raw bits in the config's dtype (float32, bfloat16 or float16) for every checkpoint tensor, fixed by the seed.

    Matrices are normal with sigma 1/sqrt(fan_in) (twice that for the head and the routers, so that outputs and routing
    are far from flat), embeddings have sigma 1, norms lie around 1, biases have sigma 0.1.
    """
    generator = np.random.default_rng(seed)
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    return {name: _rounded(_drawn(name, shape, generator), dtype) for name, shape in checkpoint_shapes(config).items()}


def _drawn(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> Bits:
    normal = generator.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.2) * normal
    if name.endswith(".bias"):
        return np.float32(0.1) * normal
    if name.endswith("embed_tokens.weight"):
        return normal
    sharpened = name == "lm_head.weight" or name.endswith("mlp.gate.weight")
    return np.float32((2 if sharpened else 1) / math.sqrt(shape[-1])) * normal


def _rounded(values: Bits, dtype: str) -> Bits:
    if dtype == "float32":
        return as_bits(values)
    if dtype == "float16":
        return as_bits(values.astype(np.float16))
    if dtype == "bfloat16":
        # Round half to even on the upper sixteen bits; the values are finite and small.
        bits = as_bits(values)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    raise ValueError(f"scaled weights exist in float32, bfloat16 and float16, not {dtype!r}")
