"""Which part of each checkpoint tensor goes where in one worker's parameters.

This module knows the Hugging Face names and full shapes of a ``qwen3_moe`` checkpoint, the fused parameters that vLLM
makes of them, and the boxes that connect the two. It must not know torch, nor where weights come from.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rankcast.engines.reference.config import DecoderConfig
from rankcast.engines.reference.layout import WorkerPlace, check_layout
from rankcast.geometry import Box, whole
from rankcast.manifest import Manifest, TensorMeta

Shape = tuple[int, ...]


class Part(msgspec.Struct, frozen=True):
    """One box of a checkpoint tensor and the box of a parameter that takes it.

    ``target`` has the sizes of ``source``, behind one more dimension of size 1 when the parameter is a stack of
    experts. ``padding`` is the box of the parameter that belongs to no checkpoint tensor and is zero.
    """

    parameter: str
    source: Box
    target: Box
    padding: Box | None = None


class WorkerParts(msgspec.Struct, frozen=True):
    """All that one worker holds.

    ``parameters``: name -> shape, in the model's order. ``parts``: checkpoint name -> what the worker takes of it, for
    the tensors that it touches. ``elsewhere``: checkpoint names of the architecture that it does not touch.
    """

    parameters: dict[str, Shape]
    parts: dict[str, Part]
    shapes: dict[str, Shape]
    elsewhere: frozenset[str]


def checkpoint_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every checkpoint tensor of the architecture with its full shape, in Hugging Face names and order.

    A checkpoint with tied embeddings has no ``lm_head.weight``.
    """
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in _layer_shapes(config, layer))
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def checkpoint_names(config: DecoderConfig) -> Manifest:
    """The manifest of a complete checkpoint: names, full shapes and the config's dtype for each."""
    return Manifest.of(TensorMeta(name, config.dtype, shape) for name, shape in checkpoint_shapes(config).items())


def worker_parts(config: DecoderConfig, place: WorkerPlace) -> WorkerParts:
    """What the worker at ``place`` holds; raises ``UnsupportedError`` when the layout cannot divide this model."""
    check_layout(config, place.layout)
    table = _Table(config, place)
    table.vocabulary_and_norm()
    for layer in place.layers(config):
        table.attention(layer)
        if config.is_sparse(layer):
            table.experts(layer)
        else:
            table.dense_mlp(layer)
    shapes = checkpoint_shapes(config)
    # A tied checkpoint may repeat the embedding under the head's name: it belongs to the architecture, to no parameter.
    elsewhere = frozenset([*shapes, "lm_head.weight"]) - table.parts.keys()
    return WorkerParts(table.parameters, table.parts, {name: shapes[name] for name in table.parts}, elsewhere)


def _layer_shapes(config: DecoderConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"self_attn.{name}.weight", (rows, hidden)
        if config.attention_bias:
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if config.attention_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    yield "self_attn.q_norm.weight", (head,)
    yield "self_attn.k_norm.weight", (head,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if not config.is_sparse(layer):
        yield from _mlp_shapes("mlp", config.intermediate_size, hidden)
        return
    yield "mlp.gate.weight", (config.num_experts, hidden)
    for expert in range(config.num_experts):
        yield from _mlp_shapes(f"mlp.experts.{expert}", config.moe_intermediate_size, hidden)


def _mlp_shapes(prefix: str, intermediate: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def _span(part: range, *whole_sizes: int) -> Box:
    """Rows ``part`` of a tensor whose other dimensions are taken whole."""
    return Box((part.start, *(0 for _ in whole_sizes)), (len(part), *whole_sizes))


def _columns(rows: int, part: range) -> Box:
    return Box((0, part.start), (rows, len(part)))


class _Table:
    """Parameters and parts while they are being listed."""

    def __init__(self, config: DecoderConfig, place: WorkerPlace) -> None:
        self.config = config
        self.place = place
        self.parameters: dict[str, Shape] = {}
        self.parts: dict[str, Part] = {}

    def whole(self, name: str, shape: Shape) -> None:
        """A parameter that is a checkpoint tensor, whole and under the same name."""
        self.parameters[name] = shape
        self.parts[name] = Part(name, whole(shape), whole(shape))

    def vocabulary_and_norm(self) -> None:
        config, place = self.config, self.place
        if place.is_first_stage or (place.is_last_stage and config.tie_word_embeddings):
            self.vocabulary_rows("model.embed_tokens.weight")
        if place.is_last_stage:
            self.whole("model.norm.weight", (config.hidden_size,))
            if not config.tie_word_embeddings:
                self.vocabulary_rows("lm_head.weight")

    def vocabulary_rows(self, name: str) -> None:
        rows, hidden = self.place.vocabulary(self.config), self.config.hidden_size
        self.parameters[name] = (len(rows), hidden)
        true = range(rows.start, min(rows.stop, self.config.vocab_size))
        # A rank whose rows are all padding takes nothing of the tensor, and still has rows to keep at zero.
        taken = range(len(true))
        padding = _span(range(len(true), len(rows)), hidden) if len(true) < len(rows) else None
        self.parts[name] = Part(name, _span(true if len(true) else taken, hidden), _span(taken, hidden), padding)

    def attention(self, layer: int) -> None:
        config, place = self.config, self.place
        hidden, head = config.hidden_size, config.head_dim
        prefix = f"model.layers.{layer}"
        queries = _scaled(place.query_heads(config), head)
        keys = _scaled(place.key_value_heads(config), head)
        rows = len(queries) + 2 * len(keys)
        fused = f"{prefix}.self_attn.qkv_proj"
        self.parameters[f"{fused}.weight"] = (rows, hidden)
        if config.attention_bias:
            self.parameters[f"{fused}.bias"] = (rows,)
        start = 0
        for name, part in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            target = range(start, start + len(part))
            start = target.stop
            source_name = f"{prefix}.self_attn.{name}"
            self.parts[f"{source_name}.weight"] = Part(f"{fused}.weight", _span(part, hidden), _span(target, hidden))
            if config.attention_bias:
                self.parts[f"{source_name}.bias"] = Part(f"{fused}.bias", _span(part), _span(target))
        output = f"{prefix}.self_attn.o_proj.weight"
        self.parameters[output] = (hidden, len(queries))
        self.parts[output] = Part(output, _columns(hidden, queries), whole((hidden, len(queries))))
        if config.attention_bias:
            self.whole(f"{prefix}.self_attn.o_proj.bias", (hidden,))
        self.whole(f"{prefix}.self_attn.q_norm.weight", (head,))
        self.whole(f"{prefix}.self_attn.k_norm.weight", (head,))
        self.whole(f"{prefix}.input_layernorm.weight", (hidden,))
        self.whole(f"{prefix}.post_attention_layernorm.weight", (hidden,))

    def dense_mlp(self, layer: int) -> None:
        hidden = self.config.hidden_size
        own = self.place.divided(self.config.intermediate_size)
        prefix = f"model.layers.{layer}.mlp"
        fused, down = f"{prefix}.gate_up_proj.weight", f"{prefix}.down_proj.weight"
        self.parameters[fused] = (2 * len(own), hidden)
        self.parameters[down] = (hidden, len(own))
        for slot, name in enumerate(("gate_proj", "up_proj")):
            target = range(slot * len(own), (slot + 1) * len(own))
            self.parts[f"{prefix}.{name}.weight"] = Part(fused, _span(own, hidden), _span(target, hidden))
        self.parts[down] = Part(down, _columns(hidden, own), whole((hidden, len(own))))

    def experts(self, layer: int) -> None:
        config = self.config
        hidden = config.hidden_size
        experts, own = self.place.experts(config), self.place.expert_intermediate(config)
        prefix = f"model.layers.{layer}.mlp"
        self.whole(f"{prefix}.gate.weight", (config.num_experts, hidden))
        w13, w2 = f"{prefix}.experts.w13_weight", f"{prefix}.experts.w2_weight"
        self.parameters[w13] = (len(experts), 2 * len(own), hidden)
        self.parameters[w2] = (len(experts), hidden, len(own))
        for index, expert in enumerate(experts):
            for slot, name in enumerate(("gate_proj", "up_proj")):
                target = Box((index, slot * len(own), 0), (1, len(own), hidden))
                self.parts[f"{prefix}.experts.{expert}.{name}.weight"] = Part(w13, _span(own, hidden), target)
            target = Box((index, 0, 0), (1, hidden, len(own)))
            self.parts[f"{prefix}.experts.{expert}.down_proj.weight"] = Part(w2, _columns(hidden, own), target)


def _scaled(heads: range, rows: int) -> range:
    """The rows of ``heads`` when each head has ``rows``."""
    return range(heads.start * rows, heads.stop * rows)
