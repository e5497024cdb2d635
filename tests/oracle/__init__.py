"""The oracle: what each worker must hold, bit for bit, for a checkpoint, a config and a layout.

It knows architectures' slicing by hand-written formulas (one file each) and bits, nothing else: it imports only numpy
and the standard library, and nothing of the library under test, so that a fault there cannot hide here. Weights are
dicts ``checkpoint name -> array of raw bits`` (uint8, uint16, uint32 for elements of 1, 2, 4 bytes) in full shape.

The same files are importable as ``oracle`` (tests) and ``rankcast_oracle`` (shipped, for ``rankcast demo``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# ruff: noqa: TID252 - relative, because the package has two names.
from . import qwen3_moe
from .bits import as_bits, compare, digest
from .files import element_type, read_checkpoint, read_config, read_weights
from .layouts import Layout, LayoutLike, Place, expert_range, layer_range, padded_vocabulary, place, workers
from .unique import unique_bits

Bits = np.ndarray[Any, Any]

# One module per architecture, each with checkpoint_shapes, worker_parameters and touched.
ARCHITECTURES = {"qwen3_moe": qwen3_moe}

__all__ = [
    "ARCHITECTURES",
    "Layout",
    "LayoutLike",
    "Place",
    "as_bits",
    "checkpoint_shapes",
    "compare",
    "digest",
    "element_type",
    "expert_range",
    "layer_range",
    "padded_vocabulary",
    "place",
    "read_checkpoint",
    "read_config",
    "read_weights",
    "touched",
    "unique_weights",
    "worker_digests",
    "worker_parameters",
    "workers",
]


def _architecture(config: Mapping[str, Any]) -> Any:
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"the oracle knows {sorted(ARCHITECTURES)}, not model_type {kind!r}")
    return ARCHITECTURES[kind]


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor of the architecture with its full shape, in checkpoint order."""
    shapes: dict[str, tuple[int, ...]] = _architecture(config).checkpoint_shapes(config)
    return shapes


def worker_parameters(
    weights: Mapping[str, Bits], config: Mapping[str, Any], layout: LayoutLike, rank: int
) -> dict[str, Bits]:
    """What the worker of engine rank ``rank`` must hold: parameter name -> bits, in model order.

    Raises ValueError when ``weights`` has a name that the architecture does not have, a wrong shape, or lacks a tensor
    that this worker touches, and when the layout cannot cut the architecture.
    """
    check_weights(weights, config, needed=touched(config, layout, rank))
    held: dict[str, Bits] = _architecture(config).worker_parameters(weights, config, layout, rank)
    return held


def touched(config: Mapping[str, Any], layout: LayoutLike, rank: int) -> set[str]:
    """The checkpoint names of which this worker holds at least one element."""
    names: set[str] = _architecture(config).touched(config, layout, rank)
    return names


def worker_digests(
    weights: Mapping[str, Bits], config: Mapping[str, Any], layout: LayoutLike, rank: int
) -> dict[str, str]:
    """Like worker_parameters, with each parameter's digest in place of its bits."""
    return {name: digest(held) for name, held in worker_parameters(weights, config, layout, rank).items()}


def unique_weights(config: Mapping[str, Any], step: int = 0) -> dict[str, Bits]:
    """A whole checkpoint in which no two elements share their bits, as far as the dtype allows (see ``unique``).

    ``step`` tells one training step's weights from another's: every element differs from itself in any other step.
    """
    return unique_bits(checkpoint_shapes(config), element_type(config), step)


def check_weights(weights: Mapping[str, Bits], config: Mapping[str, Any], needed: set[str]) -> None:
    """Refuse unknown names, wrong shapes and missing tensors: the oracle answers for its own checkpoint only."""
    shapes = checkpoint_shapes(config)
    if config.get("tie_word_embeddings", False):
        # Checkpoints of tied models may carry the head all the same; nobody reads it.
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    if unknown := sorted(set(weights) - set(shapes)):
        raise ValueError(f"{len(unknown)} names that {config['model_type']} does not have: {unknown[:10]}")
    if missing := sorted(needed - set(weights)):
        raise ValueError(f"{len(missing)} tensors are missing: {missing[:10]}")
    for name, bits in weights.items():
        if bits.shape != shapes[name]:
            raise ValueError(f"{name} has shape {bits.shape}, must be {shapes[name]}")
        if bits.dtype.kind != "u":
            raise ValueError(f"{name} is {bits.dtype}, must be raw bits (use as_bits)")
