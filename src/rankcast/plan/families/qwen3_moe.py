"""``qwen3_moe``: grouped-query attention with normed heads, and a mixture of experts in most layers.

This module knows this architecture's checkpoint names and shapes. It must not know grids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankcast.plan.families import settings
from rankcast.plan.families.dense import attention
from rankcast.plan.families.kinds import Family, embeddings, experts, feed_forward, whole


def family(config: Mapping[str, Any]) -> Family:
    """The tensors of a ``qwen3_moe`` checkpoint, one for each expert."""
    dtype, hidden = settings.dtype(config), settings.number(config, "hidden_size")
    count = settings.number(config, "num_experts", "num_local_experts", least=0)
    layers, step = (
        settings.number(config, "num_hidden_layers"),
        settings.number(config, "decoder_sparse_step", default=1),
    )
    dense_only = settings.numbers(config, "mlp_only_layers")
    tied = settings.flag(config, "tie_word_embeddings")
    before, after = embeddings(settings.number(config, "vocab_size"), hidden, dtype, tied)
    attend = attention(config, dtype, normed=True)
    types = [int(layer not in dense_only and count > 0 and (layer + 1) % step == 0) for layer in range(layers)]
    dense = sparse = attend
    if 0 in types:
        width = settings.number(config, "intermediate_size")
        dense = (*attend, *feed_forward("mlp", width, hidden, dtype, "intermediate_size"))
    if 1 in types:
        width = settings.number(config, "moe_intermediate_size")
        router = whole("mlp.gate.weight", (count, hidden), dtype)
        sparse = (*attend, router, *experts("mlp", width, hidden, dtype, "moe_intermediate_size"))
    return Family("qwen3_moe", before, (dense, sparse), tuple(types), after, count if 1 in types else 0, tied)
