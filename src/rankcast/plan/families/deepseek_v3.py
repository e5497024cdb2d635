"""``deepseek_v3`` (DeepSeek-V3 and R1, Kimi-K2): latent attention, shared experts, the first layers dense.

This module knows this architecture's checkpoint names and shapes, unquantised. It must not know grids. Layers that
predict further tokens (``num_nextn_predict_layers``) are left out: rollout without speculation does not load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankcast.plan.families import settings
from rankcast.plan.families.dense import layer_norms, output
from rankcast.plan.families.kinds import Family, Kind, embeddings, experts, feed_forward, heads, whole


def family(config: Mapping[str, Any]) -> Family:
    """The tensors of a ``deepseek_v3`` checkpoint in 16-bit form, one for each expert."""
    dtype, hidden = settings.dtype(config), settings.number(config, "hidden_size")
    layers = settings.number(config, "num_hidden_layers")
    count = settings.number(config, "n_routed_experts", "num_local_experts", default=0, least=0)
    first = settings.number(config, "first_k_dense_replace", default=0, least=0)
    step = settings.number(config, "moe_layer_freq", default=1)
    tied = settings.flag(config, "tie_word_embeddings")
    before, after = embeddings(settings.number(config, "vocab_size"), hidden, dtype, tied)
    attend = (*_latent_attention(config, hidden, dtype), *layer_norms(hidden, dtype))
    types = [int(count > 0 and layer >= first and layer % step == 0) for layer in range(layers)]
    dense = sparse = attend
    if 0 in types:
        width = settings.number(config, "intermediate_size")
        dense = (*attend, *feed_forward("mlp", width, hidden, dtype, "intermediate_size"))
    if 1 in types:
        sparse = (*attend, *_mixture(config, count, hidden, dtype))
    ahead = settings.number(config, "num_nextn_predict_layers", default=0, least=0)
    left_out = f"{ahead} layer(s) that predict further tokens (num_nextn_predict_layers)" if ahead else ""
    used = count if 1 in types else 0
    return Family("deepseek_v3", before, (dense, sparse), tuple(types), after, used, tied, left_out)


def _latent_attention(config: Mapping[str, Any], hidden: int, dtype: str) -> tuple[Kind, ...]:
    """Down-projections whole on every rank and fused in rollout; up-projections cut by heads."""
    count, what = settings.number(config, "num_attention_heads"), "num_attention_heads"
    latent = settings.number(config, "kv_lora_rank")
    plain, rotary = settings.number(config, "qk_nope_head_dim"), settings.number(config, "qk_rope_head_dim")
    value = settings.number(config, "v_head_dim")
    query_latent = settings.number(config, "q_lora_rank", default=0, least=0)
    prefix, fused = "self_attn", "self_attn.fused_qkv_a_proj.weight"
    queries = count * (plain + rotary)
    down, up = f"{prefix}.kv_a_proj_with_mqa.weight", f"{prefix}.kv_b_proj.weight"
    kinds: list[Kind] = []
    if query_latent:
        name = f"{prefix}.q_b_proj.weight"
        kinds += [
            whole(f"{prefix}.q_a_proj.weight", (query_latent, hidden), dtype, fused),
            whole(down, (latent + rotary, hidden), dtype, fused),
            whole(f"{prefix}.q_a_layernorm.weight", (query_latent,), dtype),
            heads(name, (queries, query_latent), dtype, name, count, what),
        ]
    else:
        name = f"{prefix}.q_proj.weight"
        kinds += [
            heads(name, (queries, hidden), dtype, name, count, what),
            whole(down, (latent + rotary, hidden), dtype),
        ]
    return (
        *kinds,
        whole(f"{prefix}.kv_a_layernorm.weight", (latent,), dtype),
        heads(up, (count * (plain + value), latent), dtype, up, count, what),
        output(hidden, count, value, dtype),
    )


def _mixture(config: Mapping[str, Any], count: int, hidden: int, dtype: str) -> tuple[Kind, ...]:
    width = settings.number(config, "moe_intermediate_size")
    shared = settings.number(config, "n_shared_experts", default=0, least=0) * width
    kinds = [
        whole("mlp.gate.weight", (count, hidden), dtype),
        # Kept in fp32 on both sides: rounding it would move the routing.
        whole("mlp.gate.e_score_correction_bias", (count,), "float32"),
    ]
    if shared:
        what = "n_shared_experts x moe_intermediate_size"
        kinds += feed_forward("mlp.shared_experts", shared, hidden, dtype, what)
    return (*kinds, *experts("mlp", width, hidden, dtype, "moe_intermediate_size"))
