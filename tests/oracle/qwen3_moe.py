"""What a worker holds of a Qwen3-MoE checkpoint, by formula.

It knows this architecture's checkpoint names, vLLM's fused parameter names and which rows and columns of which tensor
go where. It knows nothing of loaders, files or transports. ``touched`` is written from the layout alone and does not
call ``worker_parameters``: the two check one another.

This is the embedded fleet's rule. vLLM 0.32 differs in four points, the last two read in its source and not run: its
names say ``experts.routed_experts.w13_weight``; every pipeline stage holds the final norm (by its source also the
embedding and the head); it has no ``o_proj.bias`` (transformers has one when ``attention_bias`` is set, whole on every
worker here); without expert parallelism it cuts experts over all replicas' tp workers, not over each replica's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# ruff: noqa: TID252 - relative, because the package has two names.
from .layouts import LayoutLike, Place, expert_range, layer_range, padded_vocabulary, place, share

Bits = np.ndarray[Any, Any]
Config = Mapping[str, Any]


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its full shape."""
    hidden, vocabulary, head = config["hidden_size"], config["vocab_size"], _head_dim(config)
    q_rows, kv_rows = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (rows, hidden)
            if _attention_bias(config):
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_rows)
        if _attention_bias(config):
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        shapes[prefix + "self_attn.q_norm.weight"] = (head,)
        shapes[prefix + "self_attn.k_norm.weight"] = (head,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if _sparse(config, layer):
            shapes[prefix + "mlp.gate.weight"] = (_experts(config), hidden)
            for expert in range(_experts(config)):
                _feed_forward(shapes, f"{prefix}mlp.experts.{expert}.", config["moe_intermediate_size"], hidden)
        else:
            _feed_forward(shapes, prefix + "mlp.", config["intermediate_size"], hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not _tied(config):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def worker_parameters(weights: Mapping[str, Bits], config: Config, layout: LayoutLike, rank: int) -> dict[str, Bits]:
    """Parameter name -> bits that the worker of engine rank ``rank`` holds, in model order."""
    here, tp = place(layout, rank), layout.tp
    held: dict[str, Bits] = {}
    if here.first_stage or (here.last_stage and _tied(config)):
        held["model.embed_tokens.weight"] = _vocabulary_rows(weights["model.embed_tokens.weight"], tp, here.tp_index)
    for layer in layer_range(config["num_hidden_layers"], layout.pp, here.pp_index):
        prefix = f"model.layers.{layer}."
        _attention(held, weights, config, prefix, tp, here.tp_index)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            held[prefix + name] = weights[prefix + name].copy()
        if _sparse(config, layer):
            _mixture(held, weights, config, prefix + "mlp.", layout, here)
        else:
            width = share(config["intermediate_size"], tp, "intermediate_size")
            gate_up, down = _cut_feed_forward(weights, prefix + "mlp.", here.tp_index * width, width)
            held[prefix + "mlp.gate_up_proj.weight"] = gate_up
            held[prefix + "mlp.down_proj.weight"] = down
    if here.last_stage:
        held["model.norm.weight"] = weights["model.norm.weight"].copy()
        if not _tied(config):
            held["lm_head.weight"] = _vocabulary_rows(weights["lm_head.weight"], tp, here.tp_index)
    return held


def touched(config: Config, layout: LayoutLike, rank: int) -> set[str]:
    """Checkpoint names of which this worker holds at least one element."""
    replica_size = layout.tp * layout.pp
    tp_index, stage, replica = rank % layout.tp, rank % replica_size // layout.tp, rank // replica_size
    last = layout.pp - 1
    layers, experts = config["num_hidden_layers"], _experts(config)

    names: set[str] = set()
    # A tp worker whose vocabulary rows are all padding reads nothing of the embedding or the head.
    rows_before_mine = padded_vocabulary(config["vocab_size"], layout.tp) // layout.tp * tp_index
    has_vocabulary = rows_before_mine < config["vocab_size"]
    if has_vocabulary and (stage == 0 or (stage == last and _tied(config))):
        names.add("model.embed_tokens.weight")
    if has_vocabulary and stage == last and not _tied(config):
        names.add("lm_head.weight")
    if stage == last:
        names.add("model.norm.weight")

    stage_of_layer = [0] * layers
    sizes = [layers // layout.pp] * layout.pp
    for back in range(2, layers % layout.pp + 2):
        sizes[-back] += 1
    for layer in range(layers):
        stage_of_layer[layer] = next(s for s in range(layout.pp) if layer < sum(sizes[: s + 1]))

    group = layout.dp * layout.tp
    me = replica * layout.tp + tp_index
    owners: list[int] = []
    for member in range(group):
        owners += [member] * (experts // group + (member < experts % group))

    kinds = ["weight", "bias"] if _attention_bias(config) else ["weight"]
    for layer in range(layers):
        if stage_of_layer[layer] != stage:
            continue
        prefix = f"model.layers.{layer}."
        names.update(f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in kinds)
        names.update(f"{prefix}self_attn.{part}_norm.weight" for part in "qk")
        names.update({prefix + "input_layernorm.weight", prefix + "post_attention_layernorm.weight"})
        dense = layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % config.get("decoder_sparse_step", 1)
        if dense or not experts:
            names.update(f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
            continue
        names.add(prefix + "mlp.gate.weight")
        for expert in range(experts):
            if not layout.expert_parallel or owners[expert] == me:
                names.update(f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return names


def _attention(
    held: dict[str, Bits], weights: Mapping[str, Bits], config: Config, prefix: str, tp: int, tp_index: int
) -> None:
    head = _head_dim(config)
    q_heads = share(config["num_attention_heads"], tp, "num_attention_heads")
    kv_total = config["num_key_value_heads"]
    if kv_total % tp and tp % kv_total:
        raise ValueError(f"num_key_value_heads = {kv_total} neither divides tp = {tp} nor is divided by it")
    # With more workers than kv heads, neighbours hold the same head.
    first_kv, kv_heads = tp_index * kv_total // tp, max(1, kv_total // tp)
    q_rows = slice(tp_index * q_heads * head, (tp_index + 1) * q_heads * head)
    kv_rows = slice(first_kv * head, (first_kv + kv_heads) * head)
    for kind in ("weight", "bias") if _attention_bias(config) else ("weight",):
        held[f"{prefix}self_attn.qkv_proj.{kind}"] = _stack(
            [
                weights[f"{prefix}self_attn.q_proj.{kind}"][q_rows],
                weights[f"{prefix}self_attn.k_proj.{kind}"][kv_rows],
                weights[f"{prefix}self_attn.v_proj.{kind}"][kv_rows],
            ]
        )
    held[prefix + "self_attn.o_proj.weight"] = weights[prefix + "self_attn.o_proj.weight"][:, q_rows].copy()
    whole = ["q_norm.weight", "k_norm.weight"] + (["o_proj.bias"] if _attention_bias(config) else [])
    for name in whole:
        held[f"{prefix}self_attn.{name}"] = weights[f"{prefix}self_attn.{name}"].copy()


def _mixture(
    held: dict[str, Bits], weights: Mapping[str, Bits], config: Config, prefix: str, layout: LayoutLike, here: Place
) -> None:
    router = weights[prefix + "gate.weight"]
    width = config["moe_intermediate_size"]
    offset = 0
    if not layout.expert_parallel:
        width = share(width, layout.tp, "moe_intermediate_size")
        offset = here.tp_index * width
    mine = expert_range(_experts(config), here.ep_size, here.ep_rank)
    hidden = config["hidden_size"]
    cut = [_cut_feed_forward(weights, f"{prefix}experts.{expert}.", offset, width) for expert in mine]
    element = cut[0][0].dtype if cut else router.dtype
    w13 = np.zeros((len(mine), 2 * width, hidden), dtype=element)
    w2 = np.zeros((len(mine), hidden, width), dtype=element)
    for slot, (gate_up, down) in enumerate(cut):
        _same_element([w13, gate_up, down])
        w13[slot], w2[slot] = gate_up, down
    held[prefix + "gate.weight"] = router.copy()
    held[prefix + "experts.w13_weight"] = w13
    held[prefix + "experts.w2_weight"] = w2


def _cut_feed_forward(weights: Mapping[str, Bits], prefix: str, offset: int, width: int) -> tuple[Bits, Bits]:
    """``(2 * width, hidden)`` gate rows over up rows, and ``(hidden, width)`` down columns."""
    rows = slice(offset, offset + width)
    gate_up = _stack([weights[prefix + "gate_proj.weight"][rows], weights[prefix + "up_proj.weight"][rows]])
    return gate_up, weights[prefix + "down_proj.weight"][:, rows].copy()


def _vocabulary_rows(full: Bits, tp: int, tp_index: int) -> Bits:
    rows = padded_vocabulary(full.shape[0], tp) // tp
    mine = np.zeros((rows, full.shape[1]), dtype=full.dtype)
    true_rows = full[tp_index * rows : (tp_index + 1) * rows]
    mine[: len(true_rows)] = true_rows
    return mine


def _feed_forward(shapes: dict[str, tuple[int, ...]], prefix: str, width: int, hidden: int) -> None:
    shapes[prefix + "gate_proj.weight"] = (width, hidden)
    shapes[prefix + "up_proj.weight"] = (width, hidden)
    shapes[prefix + "down_proj.weight"] = (hidden, width)


def _stack(parts: list[Bits]) -> Bits:
    _same_element(parts)
    return np.concatenate(parts, axis=0)


def _same_element(parts: list[Bits]) -> None:
    # numpy would widen the narrower bits without a word.
    if len({part.dtype for part in parts}) != 1:
        raise ValueError(f"parts of one fused parameter differ in width: {[str(part.dtype) for part in parts]}")


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _attention_bias(config: Config) -> bool:
    return bool(config.get("attention_bias", False))


def _tied(config: Config) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _experts(config: Config) -> int:
    # transformers 5 writes num_local_experts.
    return int(config.get("num_experts", config.get("num_local_experts", 0)))


def _sparse(config: Config, layer: int) -> bool:
    if layer in (config.get("mlp_only_layers") or []):
        return False
    return _experts(config) > 0 and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
