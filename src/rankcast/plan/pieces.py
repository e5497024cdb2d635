"""Shards sorted into pieces: boxes that share no element, each with all the trainer ranks that hold it.

This module knows boxes and who holds them. It must not know workers, nor which replica anybody reads. Replicas are
shards of one tensor with the same box. Boxes that overlap without being equal are cut where the others begin and end,
until they are equal or apart; a tensor that would fall into too many pieces is refused by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import numpy.typing as npt

from rankcast.errors import ManifestError, UnsupportedError
from rankcast.manifest import Manifest, listed
from rankcast.plan.columns import DTYPE_NAMES, ITEM_BYTES, Flags, Ints, Ints32, Shards, outside, solid, steps

#: The most boxes of one tensor that are compared pair by pair.
IRREGULAR_LIMIT = 4096
#: The most shards that those of one tensor may be cut into.
CUT_LIMIT = 65_536


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """Disjoint boxes, sorted by tensor; the shards that hold piece p are rows ``first[p]`` to ``first[p]+count[p]``.

    ``shards`` are sorted by piece and, within one, by trainer rank, each rank once. ``starts``, ``sizes`` int64 [n, D].
    ``lead`` int64 [tensors] is the dimension by whose starts a tensor's pieces are sorted, where intervals are equal
    or apart; -1 where there is none.
    """

    tensor: Ints32
    starts: Ints
    sizes: Ints
    first: Ints
    count: Ints
    shards: Shards
    lead: Ints

    def same_boxes(self, other: Pieces) -> bool:
        """Whether the same ranks hold the same boxes, in the same dtypes and on the same hosts, wherever they lie."""
        pairs = [
            (getattr(self, name), getattr(other, name)) for name in ("tensor", "starts", "sizes", "first", "count")
        ]
        pairs += [(getattr(self.shards, name), getattr(other.shards, name)) for name in ("rank", "host", "dtype")]
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def pieces_of(manifest: Manifest, shapes: Ints, shards: Shards) -> Pieces:
    """The pieces of ``shards``; ``shapes`` are the manifest's (``shape_columns``).

    Raises ``ManifestError`` for a shard of no tensor of the manifest, outside its tensor, or of another dtype than
    other shards of it, and ``UnsupportedError`` for a tensor whose shards overlap in too many ways.
    """
    _check_shards(manifest, shapes, shards)
    some = solid(shards.sizes)
    kept, starts = _grouped(shards if bool(some.all()) else shards.take(some))
    lead, odd = _regular(kept, starts, len(manifest))
    overlapping = [int(t) for t in odd if _overlap(manifest, kept, int(t))]
    if overlapping:
        torn = np.isin(kept.tensor, overlapping)
        parts = [kept.take(~torn), *(_cut(manifest, kept.take(kept.tensor == t)) for t in overlapping)]
        kept, starts = _grouped(Shards.joined(parts))
        lead, odd = _regular(kept, starts, len(manifest))
    lead[odd] = -1
    if lead.any():  # otherwise sorted by the first dimension, as they are
        kept, starts = _by_lead(kept, starts, lead)
    first = np.flatnonzero(starts)
    count = np.diff(first, append=len(kept))
    return Pieces(kept.tensor[first], kept.starts[first], kept.sizes[first], first, count, kept, lead)


def _check_shards(manifest: Manifest, shapes: Ints, shards: Shards) -> None:
    if not len(shards):
        return
    if int(shards.tensor.min()) < 0 or int(shards.tensor.max()) >= len(manifest):
        raise ManifestError(f"a shard is of tensor {int(shards.tensor.max())}, the manifest has {len(manifest)}")
    if shards.starts.shape[1] != shapes.shape[1]:
        raise ManifestError(f"shards have {shards.starts.shape[1]} dimensions, the manifest {shapes.shape[1]}")
    bad = outside(shards.starts, shards.sizes, shapes[shards.tensor])
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        meta = manifest.row(int(shards.tensor[row]))
        box = _words(shards.starts[row], shards.sizes[row], len(meta.shape))
        raise ManifestError(
            f"trainer rank {int(shards.rank[row])} says that it holds {box} of {meta}: a shard's box is stated in the "
            "coordinates of the full tensor",
            tensor=meta.name,
        )
    low = np.full(len(manifest), len(DTYPE_NAMES), dtype=np.int16)
    high = np.full(len(manifest), -1, dtype=np.int16)
    np.minimum.at(low, shards.tensor, shards.dtype)
    np.maximum.at(high, shards.tensor, shards.dtype)
    mixed = np.flatnonzero((high >= 0) & (low != high))
    if len(mixed):
        tensor = int(mixed[0])
        ours = shards.tensor == tensor
        ranks = [int(shards.rank[ours & (shards.dtype == d)][0]) for d in (low[tensor], high[tensor])]
        raise ManifestError(
            f"{manifest.names[tensor]} is {DTYPE_NAMES[low[tensor]]} on trainer rank {ranks[0]} but "
            f"{DTYPE_NAMES[high[tensor]]} on trainer rank {ranks[1]}: every shard of a tensor must have one dtype "
            f"(so it is with {listed(manifest.names[t] for t in mixed)})",
            tensor=manifest.names[tensor],
        )


def _words(starts: Ints, sizes: Ints, dims: int) -> str:
    pairs = list(zip(starts.tolist(), sizes.tolist(), strict=True))[:dims]
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in pairs) + "]"


def _grouped(shards: Shards) -> tuple[Shards, Flags]:
    """Shards sorted by box and rank, each rank once for a box, with a flag on the first of each box."""
    dims = range(shards.starts.shape[1])
    boxes: list[npt.NDArray[np.integer]] = [*(shards.starts[:, d] for d in dims), *(shards.sizes[:, d] for d in dims)]
    # Columns that say the same everywhere sort nothing, and sorting is most of the work.
    every: list[npt.NDArray[np.integer]] = [shards.tensor, *boxes, shards.rank, shards.segment, shards.offset]
    keys = [column for column in every if _varies(column)]
    ordered = shards.take(np.lexsort(keys[::-1])) if keys else shards
    new = _changes([ordered.tensor, *(ordered.starts[:, d] for d in dims), *(ordered.sizes[:, d] for d in dims)])
    single = new | _changes([ordered.rank])
    return (ordered, new) if single.all() else (ordered.take(single), new[single])


def _varies(column: npt.NDArray[np.integer]) -> bool:
    return bool(len(column)) and bool((column != column[0]).any())


def _changes(columns: list[npt.NDArray[np.integer]]) -> Flags:
    """Where any of ``columns`` differs from the row before; true for the first row."""
    new = np.zeros(len(columns[0]), dtype=np.bool_)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def _regular(shards: Shards, new: Flags, tensors: int) -> tuple[Ints, Ints]:
    """Per tensor the dimension with the most intervals, and the tensors with intervals that overlap unequally.

    When all intervals of each dimension are equal or apart, then so are any two boxes: there is one dimension at least
    in which they are apart.
    """
    lead = np.zeros(tensors, dtype=np.int64)
    odd = np.zeros(tensors, dtype=np.bool_)
    rows = np.flatnonzero(new)
    rows = rows[np.bincount(shards.tensor[rows], minlength=tensors)[shards.tensor[rows]] > 1]
    most = np.ones(tensors, dtype=np.int64)
    for d in range(shards.starts.shape[1] if len(rows) else 0):
        tensor, begin = shards.tensor[rows], shards.starts[rows, d]
        end = begin + shards.sizes[rows, d]
        order = np.lexsort((end, begin, tensor))
        tensor, begin, end = tensor[order], begin[order], end[order]
        distinct = _changes([tensor, begin, end])
        tensor, begin, end = tensor[distinct], begin[distinct], end[distinct]
        odd[tensor[1:][(tensor[1:] == tensor[:-1]) & (begin[1:] < end[:-1])]] = True
        intervals = np.bincount(tensor, minlength=tensors)
        lead[intervals > most] = d
        most = np.maximum(most, intervals)
    return lead, np.flatnonzero(odd)


def _overlap(manifest: Manifest, shards: Shards, tensor: int) -> bool:
    """Whether any two different boxes of ``tensor`` share an element, found by comparing all of them."""
    own = shards.tensor == tensor
    boxes = np.unique(np.concatenate([shards.starts[own], shards.sizes[own]], axis=1), axis=0)
    if len(boxes) > IRREGULAR_LIMIT:
        raise _too_many(manifest, tensor, len(boxes), IRREGULAR_LIMIT)
    starts, sizes = np.split(boxes, 2, axis=1)
    ends = starts + sizes
    return any(
        bool(((starts[i + 1 :] < ends[i]) & (ends[i + 1 :] > starts[i])).all(axis=1).any()) for i in range(len(boxes))
    )


def _cut(manifest: Manifest, shards: Shards) -> Shards:
    """The shards of one tensor, cut at every start and end of any of them."""
    cuts = [np.unique([shards.starts[:, d], shards.starts[:, d] + shards.sizes[:, d]]) for d in _dims(shards)]
    rows: list[int] = []
    boxes: list[tuple[tuple[int, int], ...]] = []
    for row in range(len(shards)):
        spans = []
        for d, cut in enumerate(cuts):
            begin, end = int(shards.starts[row, d]), int(shards.starts[row, d] + shards.sizes[row, d])
            inner = cut[(cut >= begin) & (cut <= end)].tolist()
            spans.append(list(itertools.pairwise(inner)))
        more = len(rows) + math.prod(map(len, spans))
        if more > CUT_LIMIT:
            raise _too_many(manifest, int(shards.tensor[0]), more, CUT_LIMIT)
        for box in itertools.product(*spans):
            rows.append(row)
            boxes.append(box)
    whole = shards.take(np.array(rows, dtype=np.int64))
    bounds = np.array(boxes, dtype=np.int64)
    moved = steps(bounds[:, :, 0] - whole.starts, whole.strides) * ITEM_BYTES[whole.dtype]
    return dataclasses.replace(
        whole, starts=bounds[:, :, 0], sizes=bounds[:, :, 1] - bounds[:, :, 0], offset=whole.offset + moved
    )


def _dims(shards: Shards) -> range:
    return range(shards.starts.shape[1])


def _by_lead(shards: Shards, new: Flags, lead: Ints) -> tuple[Shards, Flags]:
    """The same pieces, each tensor's sorted by their starts in its own leading dimension."""
    piece = np.cumsum(new) - 1
    along = np.take_along_axis(shards.starts, np.maximum(lead[shards.tensor], 0)[:, None], axis=1)[:, 0]
    order = np.lexsort((piece, along, shards.tensor))
    return shards.take(order), _changes([piece[order]])


def _too_many(manifest: Manifest, tensor: int, count: int, limit: int) -> UnsupportedError:
    name = manifest.names[tensor]
    return UnsupportedError(
        f"the shards of {name} overlap without being equal, and are, or would be cut into, at least {count:,} boxes: "
        f"the limit is {limit:,}. Declare one partition of the tensor, or several equal ones",
        tensor=name,
    )
