"""Tiny models and layouts at random, of the kinds that the embedded fleet serves. It must not know any mode."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from checkpoints import tiny_config
from rankcast.engines.reference.layout import Layout


@st.composite
def models(draw: st.DrawFn, *, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> tuple[dict[str, Any], Layout]:
    """A tiny model and a layout that can divide it."""
    tp = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 2))
    pp = draw(st.integers(1, layers))
    dp = draw(st.integers(1, 3 if tp * pp <= 2 else 2))
    experts = draw(st.integers(2, 7))
    config = tiny_config(
        attention_bias=draw(st.booleans()),
        decoder_sparse_step=draw(st.sampled_from([1, 2])),
        dtype=draw(st.sampled_from(dtypes)),
        head_dim=draw(st.sampled_from([2, 4])),
        hidden_size=draw(st.sampled_from([4, 12])),
        intermediate_size=4 * draw(st.integers(1, 3)),
        mlp_only_layers=draw(st.sampled_from([[], [0]])),
        moe_intermediate_size=4 * draw(st.integers(1, 2)),
        num_attention_heads=draw(st.sampled_from([4, 8])),
        num_experts=experts,
        num_experts_per_tok=min(2, experts),
        num_hidden_layers=layers,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        tie_word_embeddings=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([5, 64, 100, 130])),
    )
    return config, Layout(tp=tp, pp=pp, dp=dp, expert_parallel=draw(st.booleans()))
