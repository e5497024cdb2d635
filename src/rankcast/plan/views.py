"""A trace's copies as destinations: which of them are boxes of a tensor, and why the others are not.

This module knows offsets, sizes and strides of views. It must not know traces as records, torch, or what becomes of a
tensor that cannot go by route. A tensor of which one copy is no box is left out whole: half of it by route and half
through the loader would be two versions in one parameter for as long as the update takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rankcast.manifest import Manifest
from rankcast.plan.columns import Destinations, Ints, dtype_codes, shape_columns

Flags = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class Routable:
    """What of a trace can go by route: its destinations, and the tensors that must go through the loader, and why.

    ``reasons`` maps indices into the manifest to words for people; no destination is of such a tensor.
    """

    destinations: Destinations
    reasons: dict[int, str]


def destinations_of(
    manifest: Manifest,
    *,
    sources: Sequence[Sequence[int]],
    source_offsets: Sequence[int],
    source_strides: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
    destinations: Sequence[int],
    offsets: Sequence[int],
    strides: Sequence[Sequence[int]],
    throughs: Sequence[str],
    dtypes: Sequence[str],
) -> Routable:
    """Destinations of the copies of one trace, given as its columns, one value a copy.

    ``sources`` index ``manifest``; ``source_offsets``, ``offsets`` and all strides count elements; ``sizes`` are the
    copied view's, in its own order of dimensions, which may be any order of the tensor's, may lack dimensions of which
    it takes one index, and may have dimensions of size 1 of its own. ``throughs`` is empty, or names the operator that
    computed what was copied. ``dtypes`` are those of the parameters, which ``destinations`` index.
    """
    shapes = shape_columns(manifest)
    reasons: dict[int, str] = {}
    plain = []
    for row, (whence, through) in enumerate(zip(sources, throughs, strict=True)):
        if through or len(whence) != 1:
            said = through or "several tensors in one copy"
            for index in whence:
                reasons.setdefault(index, f"through the loader: {said} computes what is copied")
        elif 0 not in sizes[row]:
            plain.append(row)
    rows = np.array(plain, dtype=np.int64)
    tensor = np.array([sources[row][0] for row in plain], dtype=np.int32)
    view = _View(
        np.array([source_offsets[row] for row in plain], dtype=np.int64),
        _padded([sizes[row] for row in plain], 1),
        _padded([source_strides[row] for row in plain], 0),
        _padded([strides[row] for row in plain], 0),
    )
    starts, taken, steps, why = _boxes(shapes[tensor], view)
    for reason, bad in why.items():
        for index in np.unique(tensor[bad]).tolist():
            reasons.setdefault(index, f"through the loader: {reason}")
    parameter = np.array(destinations, dtype=np.int32)[rows] if len(rows) else np.zeros(0, dtype=np.int32)
    offset = np.array(offsets, dtype=np.int64)[rows] if len(rows) else np.zeros(0, dtype=np.int64)
    found = Destinations(tensor, parameter, starts, taken, offset, steps, dtype_codes(dtypes)[parameter])
    return Routable(found.take(~np.isin(tensor, list(reasons))) if reasons else found, reasons)


@dataclasses.dataclass(frozen=True, eq=False)
class _View:
    """Copied views: ``offset`` int64 [n] into the tensor; ``sizes``, ``strides`` (the tensor's), ``steps`` (the
    parameter's) int64 [n, V], with size 1 and stride 0 for dimensions that a view lacks."""

    offset: Ints
    sizes: Ints
    strides: Ints
    steps: Ints


def _boxes(shapes: Ints, view: _View) -> tuple[Ints, Ints, Ints, dict[str, Flags]]:
    """Starts, sizes and destination strides [n, D] of the boxes that views are, and which views are none, by reason.

    A view's dimension is a dimension of the tensor when it has its stride: dense strides of dimensions of more than
    one index are all different.
    """
    count, dims = shapes.shape
    dense = np.ones((count, dims), dtype=np.int64)
    dense[:, :-1] = np.cumprod(np.maximum(shapes, 1)[:, :0:-1], axis=1)[:, ::-1]
    starts = np.zeros((count, dims), dtype=np.int64)
    rest = view.offset.copy()
    for d in range(dims):
        starts[:, d] = np.minimum(rest // dense[:, d], np.maximum(shapes[:, d] - 1, 0))
        rest -= starts[:, d] * dense[:, d]
    taken = np.ones((count, dims), dtype=np.int64)
    steps = np.zeros((count, dims), dtype=np.int64)
    repeats = np.zeros(count, dtype=np.bool_)
    skips = rest != 0
    for v in range(view.sizes.shape[1]):
        size, stride = view.sizes[:, v], view.strides[:, v]
        real = size > 1
        repeats |= real & (stride == 0)
        matches = (dense == stride[:, None]) & (shapes > 1) & real[:, None] & (taken == 1)
        known = matches.any(axis=1)
        skips |= real & (stride != 0) & ~known
        at = np.flatnonzero(known)
        axis = matches[at].argmax(axis=1)
        taken[at, axis] = size[at]
        steps[at, axis] = view.steps[at, v]
    merges = (starts + taken > shapes).any(axis=1) & ~skips & ~repeats
    return (
        starts,
        taken,
        steps,
        {
            "it copies some elements more than once": repeats,
            "its view steps over elements, or folds dimensions into one": skips,
            "its view merges several dimensions into one": merges,
        },
    )


def _padded(rows: Sequence[Sequence[int]], padding: int) -> Ints:
    width = max(map(len, rows), default=0)
    flat = [value for row in rows for value in (*row, *(padding,) * (width - len(row)))]
    return np.array(flat, dtype=np.int64).reshape(len(rows), width)
