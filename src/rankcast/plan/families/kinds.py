"""Kinds of tensors: one checkpoint tensor of a layer (or of an expert), how it is cut, and where rollout puts it.

This module knows the forms in which tensor parallelism cuts a tensor. It must not know any architecture's names, grids
of ranks, or numpy.
"""

from __future__ import annotations

import enum

import msgspec


class Cut(enum.Enum):
    """How tensor parallelism divides a tensor."""

    WHOLE = "whole"
    """Every rank holds all of it."""
    VOCABULARY = "vocabulary"
    """Rows of a padded vocabulary."""
    HEADS = "heads"
    """Rows, whole heads of them."""
    KEY_VALUE_HEADS = "key_value_heads"
    """Rows, whole heads of them; with fewer heads than ranks, neighbours hold the same one."""
    ROWS = "rows"
    """Rows, in equal parts."""
    HEAD_COLUMNS = "head_columns"
    """Columns, whole heads of them."""
    COLUMNS = "columns"
    """Columns, in equal parts."""


class Kind(msgspec.Struct, frozen=True):
    """One checkpoint tensor of a layer, or of each expert of a layer.

    ``name`` is the checkpoint name within its layer, with ``{expert}`` in an expert's; ``units`` into how many units
    the cut dimension is divided (heads, or indices) and ``what`` the setting of config.json that says so. ``parameter``
    is rollout's, within the layer; kinds with the same one lie in it one after another, by rows, in their order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: Cut
    parameter: str
    units: int = 0
    what: str = ""
    expert: bool = False

    @property
    def dimension(self) -> int:
        """The dimension that is cut; 0 where none is."""
        return 1 if self.cut in (Cut.COLUMNS, Cut.HEAD_COLUMNS) else 0


class Family(msgspec.Struct, frozen=True):
    """All tensors of one model, by layer, with what rollout and trainer need to cut them.

    ``before`` and ``after`` are the kinds outside the layers, at the first and at the last pipeline stage.
    ``layer_types`` are lists of kinds and ``type_of_layer`` says which list each layer has. ``tied`` means that the
    last stage holds ``before`` too, in place of a head. ``left_out`` says what a checkpoint may have that is not here.
    """

    model_type: str
    before: tuple[Kind, ...]
    layer_types: tuple[tuple[Kind, ...], ...]
    type_of_layer: tuple[int, ...]
    after: tuple[Kind, ...]
    experts: int = 0
    tied: bool = False
    left_out: str = ""

    @property
    def layers(self) -> int:
        return len(self.type_of_layer)

    def kinds(self) -> tuple[Kind, ...]:
        """Every kind once, in a fixed order: before, the layer types one after another, after."""
        return (*self.before, *(kind for kinds in self.layer_types for kind in kinds), *self.after)


def heads(name: str, shape: tuple[int, ...], dtype: str, parameter: str, units: int, what: str) -> Kind:
    """A kind that is cut by rows, in whole heads."""
    cut = Cut.KEY_VALUE_HEADS if what == "num_key_value_heads" else Cut.HEADS
    return Kind(name, shape, dtype, cut, parameter, units, what)


def whole(name: str, shape: tuple[int, ...], dtype: str, parameter: str | None = None) -> Kind:
    """A kind that every rank holds all of."""
    return Kind(name, shape, dtype, Cut.WHOLE, name if parameter is None else parameter)


def feed_forward(prefix: str, intermediate: int, hidden: int, dtype: str, what: str) -> tuple[Kind, ...]:
    """A dense MLP's three kinds: gate and up fused by rows, down cut by columns."""
    fused, down = f"{prefix}.gate_up_proj.weight", f"{prefix}.down_proj.weight"
    rows = (intermediate, hidden)
    return (
        Kind(f"{prefix}.gate_proj.weight", rows, dtype, Cut.ROWS, fused, intermediate, what),
        Kind(f"{prefix}.up_proj.weight", rows, dtype, Cut.ROWS, fused, intermediate, what),
        Kind(down, (hidden, intermediate), dtype, Cut.COLUMNS, down, intermediate, what),
    )


def experts(prefix: str, intermediate: int, hidden: int, dtype: str, what: str) -> tuple[Kind, ...]:
    """An expert's three kinds, which rollout stacks: gate and up in ``w13_weight``, down in ``w2_weight``."""
    each, w13, w2 = f"{prefix}.experts.{{expert}}", f"{prefix}.experts.w13_weight", f"{prefix}.experts.w2_weight"
    rows = (intermediate, hidden)
    return (
        Kind(f"{each}.gate_proj.weight", rows, dtype, Cut.ROWS, w13, intermediate, what, True),
        Kind(f"{each}.up_proj.weight", rows, dtype, Cut.ROWS, w13, intermediate, what, True),
        Kind(f"{each}.down_proj.weight", (hidden, intermediate), dtype, Cut.COLUMNS, w2, intermediate, what, True),
    )


def embeddings(vocabulary: int, hidden: int, dtype: str, tied: bool) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """The kinds before and after the layers: embedding; final norm and, unless tied, the head."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    embed, head = (
        Kind(name, (vocabulary, hidden), dtype, Cut.VOCABULARY, name, vocabulary, "vocab_size") for name in names
    )
    norm = whole("model.norm.weight", (hidden,), dtype)
    return (embed,), (norm,) if tied else (norm, head)
