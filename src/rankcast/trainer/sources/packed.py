"""Experts that a module keeps packed in one 3-D tensor, under the names that a checkpoint has for each of them.

This module knows, for each architecture, which rows of a packed tensor are whose. It must not know modules, values or
devices. A rule is chosen by name and never inferred from shapes, which are equal where the order of gate and up, or of
rows and columns, is not. The rules are those by which transformers itself saves and loads these models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rankcast.errors import ManifestError, UnsupportedError
from rankcast.geometry import Box

#: What ``experts=`` takes for a module whose engine wants the packed tensors as they are.
AS_PACKED = "packed"


class Piece(NamedTuple):
    """One checkpoint tensor inside a packed one: ``packed[expert, start:stop]``, a matrix of ``shape``."""

    name: str
    expert: int
    start: int
    stop: int
    shape: tuple[int, int]

    def of(self, box: Box) -> tuple[Box, Box] | None:
        """What a box of the packed tensor holds of this piece.

        Returns the box in this piece's coordinates, and the box of the packed tensor that it is (of one expert), or
        ``None`` when there is nothing.
        """
        mine = box.intersect(Box((self.expert, self.start, 0), (1, *self.shape)))
        if mine is None:
            return None
        return Box((mine.offsets[1] - self.start, mine.offsets[2]), mine.sizes[1:]), mine


class Rule(NamedTuple):
    """How an architecture packs: for each packed tensor, the experts' own names for equal parts of its rows.

    ``packed`` maps the last segments of a packed tensor's name to them; ``{}`` stands for the expert's number.
    ``renames`` are segments that the module calls otherwise than its checkpoints do.
    """

    packed: Mapping[str, tuple[str, ...]]
    renames: Mapping[str, str] = {}


_GATE_UP_DOWN = Rule(
    {
        "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
    }
)
#: By the ``model_type`` of a transformers configuration.
RULES: dict[str, Rule] = {
    "qwen2_moe": _GATE_UP_DOWN,
    "qwen3_moe": _GATE_UP_DOWN,
    "deepseek_v3": _GATE_UP_DOWN,
    "mixtral": Rule(
        {
            "mlp.experts.gate_up_proj": ("mlp.experts.{}.w1.weight", "mlp.experts.{}.w3.weight"),
            "mlp.experts.down_proj": ("mlp.experts.{}.w2.weight",),
        },
        {".mlp.": ".block_sparse_moe."},
    ),
}


def rule_named(experts: str | None) -> Rule | None:
    """The rule that a caller names; ``None`` for packed tensors that stay so. Raises ``ManifestError`` if unknown."""
    if experts == AS_PACKED:
        return None
    if experts not in RULES:
        raise ManifestError(
            f"experts={experts!r} names no rule: known are {', '.join(sorted(RULES))}, and {AS_PACKED!r} for packed "
            "tensors that go as they are"
        )
    return RULES[experts]


def checkpoint_name(rule: Rule | None, name: str) -> str:
    """What a checkpoint calls the tensor ``name`` of a module, packed or not."""
    for ours, theirs in (rule.renames if rule is not None else {}).items():
        name = name.replace(ours, theirs)
    return name


def pieces(rule: Rule | None, name: str, shape: Sequence[int]) -> list[Piece] | None:
    """The checkpoint tensors inside the tensor ``name``, in the order of their bytes; ``None`` when it packs none.

    Raises ``UnsupportedError`` when it is one of the rule's but its rows cannot be divided as the rule says.
    """
    for tail, parts in (rule.packed if rule is not None else {}).items():
        if name == tail or name.endswith(f".{tail}"):
            if len(shape) != 3 or shape[1] % len(parts):
                raise UnsupportedError(
                    f"{name} has the shape {list(shape)}, but packed experts are [experts, rows, columns] with "
                    f"{len(parts)} equal parts of rows: name the right rule with experts=",
                    tensor=name,
                )
            prefix = name[: len(name) - len(tail)]
            return [
                Piece(checkpoint_name(rule, prefix + part.format(number)), number, *rows)
                for number in range(shape[0])
                for part, rows in zip(parts, _rows(shape, len(parts)), strict=True)
            ]
    return None


def _rows(shape: Sequence[int], count: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    each = shape[1] // count
    for at in range(count):
        yield at * each, (at + 1) * each, (each, shape[2])


def looks_packed(name: str, shape: Sequence[int]) -> bool:
    """Whether ``name`` is a stack of experts, so that nobody knows its checkpoint names without a rule."""
    segments = name.split(".")
    return len(shape) == 3 and len(segments) > 1 and segments[-2] == "experts"


def refuse_packed(name: str, shape: Sequence[int], architecture: str | None) -> UnsupportedError:
    """The error for a packed tensor without a rule."""
    of = f"of a {architecture} model" if architecture else "of a module whose config names no model_type"
    return UnsupportedError(
        f"{name} {list(shape)} {of} packs experts in one tensor, and no rule says which rows are whose: name one with "
        f"ModuleSource(module, experts=...), of {', '.join(sorted(RULES))}, or {AS_PACKED!r} if the engine takes it as "
        "it is",
        tensor=name,
    )
