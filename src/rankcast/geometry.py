"""Boxes and strides: the arithmetic of parts of tensors.

This module knows offsets, sizes and strides, counted in elements, and how boxes cover a shape. It must not know names,
dtypes, processes, or torch. Boxes as offsets and sizes, and resharding as their intersection, are an idea shared with
``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box inside a tensor: per dimension the first index and the number of indices."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"a box has {len(self.offsets)} offsets but {len(self.sizes)} sizes")
        if any(value < 0 for value in (*self.offsets, *self.sizes)):
            raise ValueError(f"a box has a negative offset or size: {self.offsets}, {self.sizes}")

    @property
    def volume(self) -> int:
        """The number of elements; 1 for a box of no dimensions."""
        return math.prod(self.sizes)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of ``shape``."""
        return len(shape) == len(self.sizes) and all(
            offset + size <= extent for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of the same tensor, or ``None`` when they share no element."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a dense tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of storage a strided view spans, from its first element to its last; 0 when it is empty."""
    if any(size == 0 for size in sizes):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def box_of_view(shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Box | None:
    """The box that a strided view occupies in a dense tensor of ``shape``, or ``None`` when it is not one.

    ``offset`` counts elements from the tensor's first; ``sizes`` and ``strides`` are the view's. The view's dimensions
    may come in another order than the tensor's (a transpose), may leave out dimensions of which it takes one index (a
    select), and may have dimensions of size 1 of its own. A view that repeats elements, steps over some, or merges
    two dimensions it does not take whole is no box.
    """
    dense = contiguous_strides(shape)
    starts: list[int] = []
    rest = offset
    for size, step in zip(shape, dense, strict=True):
        start = min(rest // step, max(size - 1, 0))
        starts.append(start)
        rest -= start * step
    if rest != 0:
        return None
    taken = [1] * len(shape)
    for size, stride in sorted(zip(sizes, strides, strict=True), key=lambda pair: -pair[1]):
        if size == 1:
            continue
        if not _spread(size, stride, shape, dense, starts, taken):
            return None
    box = Box(tuple(starts), tuple(taken))
    return box if box.inside(shape) and box.volume == math.prod(sizes) else None


def _spread(
    size: int, stride: int, shape: Sequence[int], dense: Sequence[int], starts: Sequence[int], taken: list[int]
) -> bool:
    """Account one dimension of a view to the tensor's dimensions; a merged one goes to several, inner ones whole."""
    remaining = size
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1 or dense[axis] < stride:
            continue
        if dense[axis] != stride or taken[axis] != 1:
            return False
        if remaining <= shape[axis] - starts[axis]:
            taken[axis] = remaining
            return True
        if starts[axis] != 0 or remaining % shape[axis]:
            return False
        taken[axis] = shape[axis]
        remaining //= shape[axis]
        stride *= shape[axis]
    return False


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[int, Box | None, Box | None]:
    """How far ``boxes`` are from covering a tensor of ``shape`` exactly once.

    Returns the number of elements that no box covers, a box of such elements (the first gap found, ``None`` when there
    is none), and a box of elements covered more than once (``None`` when there is none).
    """
    total = math.prod(shape)
    solid = [box for box in boxes if box.volume]
    if not solid:
        return total, (whole(shape) if total else None), None
    # Cutting each dimension at every start and end gives a small grid in which each cell is covered or not as a whole.
    cuts = [
        np.unique(np.array([0, size, *(b.offsets[d] for b in solid), *(b.offsets[d] + b.sizes[d] for b in solid)]))
        for d, size in enumerate(shape)
    ]
    counts = np.zeros([len(cut) - 1 for cut in cuts], dtype=np.int64)
    for box in solid:
        where = tuple(
            slice(int(np.searchsorted(cut, o)), int(np.searchsorted(cut, o + n)))
            for cut, o, n in zip(cuts, box.offsets, box.sizes, strict=True)
        )
        counts[where] += 1
    volumes = np.ones((), dtype=np.int64)
    for cut in cuts:
        volumes = np.multiply.outer(volumes, np.diff(cut))
    missing = int(volumes[counts == 0].sum())
    return missing, _first_cell(counts == 0, cuts), _first_cell(counts > 1, cuts)


def _first_cell(mask: npt.NDArray[np.bool_], cuts: Sequence[Ints]) -> Box | None:
    hits = np.argwhere(mask)
    if not len(hits):
        return None
    cell = hits[0]
    starts = tuple(int(cut[i]) for cut, i in zip(cuts, cell, strict=True))
    return Box(starts, tuple(int(cut[i + 1]) - s for cut, i, s in zip(cuts, cell, starts, strict=True)))
