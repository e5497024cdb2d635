"""A family's tensors as columns: the manifest, and of each tensor its kind, layer and expert.

This module joins kinds and layers into names. It must not know grids.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rankcast.manifest import Manifest
from rankcast.plan.columns import Ints, Ints32
from rankcast.plan.families.kinds import Family, Kind


@dataclasses.dataclass(frozen=True, eq=False)
class Tensors:
    """Every tensor of a model. ``kind`` int32 [tensors] indexes ``kinds``; ``layer`` int32 is -1 before the layers and
    the number of layers after them; ``expert`` int32 is -1 where there is none. Shapes of kinds, padded to D dimensions
    with 1, are ``shapes`` int64 [kinds, D]."""

    family: Family
    manifest: Manifest
    kinds: tuple[Kind, ...]
    shapes: Ints
    kind: Ints32
    layer: Ints32
    expert: Ints32


def tensors_of(family: Family) -> Tensors:
    """All tensors of ``family`` in the order of a checkpoint: layer by layer, experts one after another."""
    kinds = family.kinds()
    names: list[str] = []
    rows: list[tuple[int, int, int, int]] = []  # first kind, how many, layer, expert
    at = 0
    _list(family.before, "", at, -1, names, rows)
    first_of_type = []
    at += len(family.before)
    for types in family.layer_types:
        first_of_type.append(at)
        at += len(types)
    for layer, kind_list in enumerate(family.type_of_layer):
        _layer(family, layer, family.layer_types[kind_list], first_of_type[kind_list], names, rows)
    _list(family.after, "", at, family.layers, names, rows)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    lengths = columns[:, 1]
    within = np.arange(len(names)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kind = (np.repeat(columns[:, 0], lengths) + within).astype(np.int32)
    picked = kind.tolist()
    manifest = Manifest(tuple(names), tuple(kinds[k].dtype for k in picked), tuple(kinds[k].shape for k in picked))
    dims = max(len(k.shape) for k in kinds)
    shapes = np.array([(*k.shape, *(1,) * (dims - len(k.shape))) for k in kinds], dtype=np.int64)
    layer_column = np.repeat(columns[:, 2], lengths).astype(np.int32)
    return Tensors(
        family, manifest, kinds, shapes, kind, layer_column, np.repeat(columns[:, 3], lengths).astype(np.int32)
    )


def _list(
    kinds: tuple[Kind, ...],
    prefix: str,
    first: int,
    layer: int,
    names: list[str],
    rows: list[tuple[int, int, int, int]],
) -> None:
    names += [prefix + kind.name for kind in kinds]
    if kinds:
        rows.append((first, len(kinds), layer, -1))


def _layer(
    family: Family,
    layer: int,
    kinds: tuple[Kind, ...],
    first: int,
    names: list[str],
    rows: list[tuple[int, int, int, int]],
) -> None:
    prefix = f"model.layers.{layer}."
    plain = tuple(kind for kind in kinds if not kind.expert)
    own = kinds[len(plain) :]
    assert all(kind.expert for kind in own), "a layer's experts come last"
    _list(plain, prefix, first, layer, names, rows)
    if not own:
        return
    halves = [(prefix + kind.name).split("{expert}") for kind in own]
    for expert in range(family.experts):
        names += [f"{before}{expert}{after}" for before, after in halves]
        rows.append((first + len(plain), len(own), layer, expert))
