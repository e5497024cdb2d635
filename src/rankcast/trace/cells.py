"""A parameter cut into cells, each of which every write takes whole or not at all.

This module knows strided views and arrays with one value a cell. It must not know what the values mean. Where all
writes are boxes, nearly always, the cells are what is left when each dimension is cut at every start and end; otherwise
(every second row) they are the longest runs of elements in storage that all writes take whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rankcast.errors import UnsupportedError
from rankcast.geometry import Box, Ints, box_of_view, contiguous_strides, whole

#: The most runs that are looked at one by one, at a few bytes each.
RUN_LIMIT = 2**26

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


class View(NamedTuple):
    """A strided region of storage, in elements from a parameter's first."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Cells(Protocol):
    """The cells of one parameter under some writes, which are known by their positions."""

    def array(self, dtype: npt.DTypeLike, value: float) -> Array:
        """A new array with ``value`` in each cell."""

    def region(self, array: Array, write: int) -> Array:
        """The part of ``array`` that write number ``write`` takes: a view, no copy."""

    def elements(self, mask: Mask) -> int:
        """How many elements the cells of ``mask`` have together."""

    def first_box(self, mask: Mask) -> Box:
        """A box of elements in the first cell of ``mask``, in the order of storage."""


def cells_of(name: str, stored: Sequence[int], views: Sequence[View]) -> Cells:
    """The cells of parameter ``name``, of shape ``stored`` in storage order, under the writes ``views``.

    Raises ``UnsupportedError`` when the writes are too finely scattered.
    """
    boxes = _boxes(stored, views) if stored else None
    return _Grid(stored, *boxes) if boxes is not None else _Runs(name, stored, views)


class _Grid:
    """Cells between cuts; ``starts`` and ``ends`` are int64 [writes, dimensions], equal where a write is empty."""

    def __init__(self, stored: Sequence[int], starts: Ints, ends: Ints) -> None:
        self._cuts = [np.unique(np.concatenate([[0, size], starts[:, d], ends[:, d]])) for d, size in enumerate(stored)]
        edges = [
            [np.searchsorted(cut, side[:, d]).tolist() for side in (starts, ends)] for d, cut in enumerate(self._cuts)
        ]
        # With an ellipsis also a parameter of no dimensions gives a view, and not a number.
        self._regions: list[Any] = [(..., *(slice(low[i], high[i]) for low, high in edges)) for i in range(len(starts))]
        self._shape = [len(cut) - 1 for cut in self._cuts]

    def array(self, dtype: npt.DTypeLike, value: float) -> Array:
        return np.full(self._shape, value, dtype=dtype)

    def region(self, array: Array, write: int) -> Array:
        part: Array = array[self._regions[write]]
        return part

    def elements(self, mask: Mask) -> int:
        volumes: Ints = np.ones((), dtype=np.int64)
        for cut in self._cuts:
            volumes = np.multiply.outer(volumes, np.diff(cut))
        return int(volumes[mask].sum())

    def first_box(self, mask: Mask) -> Box:
        cell = np.argwhere(mask)[0].tolist()
        starts = [int(cut[i]) for cut, i in zip(self._cuts, cell, strict=True)]
        ends = [int(cut[i + 1]) for cut, i in zip(self._cuts, cell, strict=True)]
        return Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


class _Runs:
    """Cells that are runs of equally many elements."""

    def __init__(self, name: str, stored: Sequence[int], views: Sequence[View]) -> None:
        total = run = math.prod(stored)
        plain: list[tuple[int, list[tuple[int, int]]]] = []
        for view in views:
            dims = _joined(view)
            inner = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
            if math.prod(view.sizes):
                run = math.gcd(run, view.offset, inner, *(stride for _, stride in dims))
            plain.append((view.offset, [*dims, (inner, 1)]))
        if total // run > RUN_LIMIT:
            raise UnsupportedError(
                f"{name} is written in more than {RUN_LIMIT:,} scattered pieces: its coverage cannot be proved",
                tensor=name,
            )
        self._stored, self._run, self._count = stored, run, total // run
        self._views = [
            View(
                offset // run,
                (*(size for size, _ in dims[:-1]), dims[-1][0] // run),
                (*(stride // run for _, stride in dims[:-1]), 1),
            )
            for offset, dims in plain
        ]

    def array(self, dtype: npt.DTypeLike, value: float) -> Array:
        return np.full(self._count, value, dtype=dtype)

    def region(self, array: Array, write: int) -> Array:
        offset, sizes, strides = self._views[write]
        if not math.prod(sizes):
            return array[:0]
        steps = [step * array.itemsize for step in strides]
        return np.lib.stride_tricks.as_strided(array[offset:], sizes, steps)

    def elements(self, mask: Mask) -> int:
        return int(mask.sum()) * self._run

    def first_box(self, mask: Mask) -> Box:
        """The largest box among the elements of the first run."""
        start, stored = int(mask.argmax()) * self._run, self._stored
        for axis in range(len(stored)):
            step = math.prod(stored[axis + 1 :])
            if self._run >= step and start % step == 0:
                at = start // step % stored[axis]
                sizes = (1,) * axis + (min(self._run // step, stored[axis] - at),) + tuple(stored[axis + 1 :])
                index = (start // each % n for n, each in zip(stored, contiguous_strides(stored), strict=True))
                return Box(tuple(index), sizes)
        return whole(stored)


def _joined(view: View) -> list[tuple[int, int]]:
    """Sizes and strides, outermost first, joined where one dimension goes on where the next one ends."""
    dims: list[tuple[int, int]] = []
    for size, stride in sorted(zip(view.sizes, view.strides, strict=True), key=lambda pair: -pair[1]):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            size, stride = size * dims.pop()[0], stride
        dims.append((size, stride))
    return dims


def _boxes(stored: Sequence[int], views: Sequence[View]) -> tuple[Ints, Ints] | None:
    """Starts and ends of the boxes that ``views`` are, or ``None`` when one of them is no box."""
    # A stack of experts is written by many views that differ in where they start only: each form is solved once, and
    # what is left is arithmetic on columns.
    forms: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, (_, sizes, strides) in enumerate(views):
        forms.setdefault((sizes, strides), []).append(i)
    starts = np.zeros((len(views), len(stored)), dtype=np.int64)
    ends = np.zeros_like(starts)
    for (sizes, strides), members in forms.items():
        if 0 in sizes:
            continue
        at = np.array(members)
        rest = np.array([views[i].offset for i in members], dtype=np.int64)
        first = np.zeros((len(members), len(stored)), dtype=np.int64)
        for d, (size, step) in enumerate(zip(stored, contiguous_strides(stored), strict=True)):
            first[:, d] = np.minimum(rest // step, size - 1)
            rest -= first[:, d] * step
        taken = _taken(stored, sizes, strides)
        if taken is None or (rest != 0).any() or (first + taken > stored).any():
            # Not one dimension for one, as most are.
            for i in members:
                box = box_of_view(stored, *views[i])
                if box is None:
                    return None
                starts[i], ends[i] = box.offsets, np.add(box.offsets, box.sizes)
            continue
        starts[at], ends[at] = first, first + taken
    return starts, ends


def _taken(stored: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> Ints | None:
    """How many indices a view takes of each dimension, where each of its own is one of the parameter's."""
    axes = {step: d for d, (size, step) in enumerate(zip(stored, contiguous_strides(stored), strict=True)) if size > 1}
    taken = np.ones(len(stored), dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        axis = axes.pop(stride, None)
        if axis is None:
            return None
        taken[axis] = size
    return taken
