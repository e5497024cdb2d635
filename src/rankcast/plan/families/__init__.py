"""Which tensors a model has, from its ``config.json``: one module for each family of architectures.

This package knows Hugging Face names, shapes and how tensor parallelism cuts each tensor. It must not know ranks. It is
for planning without processes only: a real sync asks sources and workers, and never assumes an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rankcast.errors import UnsupportedError
from rankcast.plan.families import deepseek_v3, dense, qwen3_moe
from rankcast.plan.families.kinds import Family

#: ``model_type`` in config.json -> the family that it is.
FAMILIES: dict[str, Callable[[Mapping[str, Any]], Family]] = {
    "qwen3_moe": qwen3_moe.family,
    "deepseek_v3": deepseek_v3.family,
    "kimi_k2": deepseek_v3.family,
    "llama": dense.family,
    "qwen3": dense.family,
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The tensors of the model with this decoded ``config.json``.

    Raises ``UnsupportedError`` for an unknown ``model_type``, a quantised checkpoint, and a setting that is missing or
    out of range.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"config.json has model_type {kind!r}: rankcast plan knows {', '.join(FAMILIES)}. A real sync needs no "
            "such rule: it asks the source and the engine"
        )
    if config.get("quantization_config"):
        raise UnsupportedError("config.json has a quantization_config: direct needs unquantised weights on both sides")
    return FAMILIES[kind](config)
