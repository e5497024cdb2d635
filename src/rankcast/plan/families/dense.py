"""``llama`` and ``qwen3``: dense decoders with grouped-query attention.

This module knows these architectures' checkpoint names and shapes. It must not know grids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankcast.plan.families import settings
from rankcast.plan.families.kinds import Cut, Family, Kind, embeddings, feed_forward, heads, whole


def family(config: Mapping[str, Any]) -> Family:
    """The tensors of a ``llama`` or ``qwen3`` checkpoint."""
    dtype, hidden = settings.dtype(config), settings.number(config, "hidden_size")
    tied = settings.flag(config, "tie_word_embeddings")
    normed = config.get("model_type") == "qwen3"
    before, after = embeddings(settings.number(config, "vocab_size"), hidden, dtype, tied)
    layer = (*attention(config, dtype, normed=normed), *_feed_forward(config, hidden, dtype))
    layers = settings.number(config, "num_hidden_layers")
    return Family(str(config["model_type"]), before, (layer,), (0,) * layers, after, tied=tied)


def attention(config: Mapping[str, Any], dtype: str, *, normed: bool) -> tuple[Kind, ...]:
    """Grouped-query attention with fused q, k and v, and the two norms of a layer; ``normed``: q and k have norms."""
    hidden, head = settings.number(config, "hidden_size"), settings.head_dim(config)
    queries = settings.number(config, "num_attention_heads")
    groups = settings.number(config, "num_key_value_heads", default=queries)
    counts = (
        ("q", queries, "num_attention_heads"),
        ("k", groups, "num_key_value_heads"),
        ("v", groups, "num_key_value_heads"),
    )
    fused = "self_attn.qkv_proj"
    kinds = []
    for part, units, what in counts:
        name = f"self_attn.{part}_proj"
        kinds.append(heads(f"{name}.weight", (units * head, hidden), dtype, f"{fused}.weight", units, what))
        if settings.flag(config, "attention_bias"):
            kinds.append(heads(f"{name}.bias", (units * head,), dtype, f"{fused}.bias", units, what))
    kinds.append(output(hidden, queries, head, dtype))
    if settings.flag(config, "attention_bias"):
        kinds.append(whole("self_attn.o_proj.bias", (hidden,), dtype))
    if normed:
        kinds += [whole(f"self_attn.{part}_norm.weight", (head,), dtype) for part in "qk"]
    return (*kinds, *layer_norms(hidden, dtype))


def output(hidden: int, queries: int, head: int, dtype: str) -> Kind:
    """The output projection, cut by columns in whole heads."""
    name = "self_attn.o_proj.weight"
    return Kind(name, (hidden, queries * head), dtype, Cut.HEAD_COLUMNS, name, queries, "num_attention_heads")


def layer_norms(hidden: int, dtype: str) -> tuple[Kind, ...]:
    """The two norms that every layer has."""
    return tuple(whole(f"{name}.weight", (hidden,), dtype) for name in ("input_layernorm", "post_attention_layernorm"))


def _feed_forward(config: Mapping[str, Any], hidden: int, dtype: str) -> tuple[Kind, ...]:
    width = settings.number(config, "intermediate_size")
    kinds = feed_forward("mlp", width, hidden, dtype, "intermediate_size")
    if not settings.flag(config, "mlp_bias"):
        return kinds
    gate, up, down = kinds
    biases = [
        Kind(kind.name.replace("weight", "bias"), (width,), dtype, kind.cut, "mlp.gate_up_proj.bias", width, kind.what)
        for kind in (gate, up)
    ]
    return (gate, up, *biases, down, whole("mlp.down_proj.bias", (hidden,), dtype))
