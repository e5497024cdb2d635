"""Whether strided writes cover a parameter exactly once.

This module knows shapes, strides and element counts. It must not know names of tensors other than for a message, nor
torch. All writes of a parameter are painted into one array of cells (``cells``), once each, and every question is asked
of the array: comparing writes with each other would be quadratic, and a stack of experts has hundreds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcast.errors import UnsupportedError
from rankcast.geometry import Box, contiguous_strides
from rankcast.trace.cells import Cells, View, cells_of


class Gap(NamedTuple):
    """Elements that nothing writes: how many of how many, and a box of some of them."""

    elements: int
    total: int
    box: Box


class Double(NamedTuple):
    """Two writes of one element: a box of such elements, and the positions of two writes that share it.

    ``second`` is a fill's position where a fill came after a copy, else both are copies.
    """

    box: Box
    first: int
    second: int


def storage_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is dense and row-major in storage, or ``None`` when it is not dense."""
    order = tuple(sorted(range(len(sizes)), key=lambda d: (-strides[d], sizes[d] != 1)))
    dense = contiguous_strides([sizes[d] for d in order])
    if 0 in sizes or all(sizes[d] == 1 or strides[d] == step for d, step in zip(order, dense, strict=True)):
        return order
    return None


class Coverage:
    """What the writes of one parameter, of ``shape`` and strides ``layout``, leave out and what they write twice.

    ``name`` is for messages. Every answer raises ``UnsupportedError`` when the parameter is not dense or its writes are
    too finely scattered.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        layout: Sequence[int],
        copies: Sequence[View],
        fills: Sequence[View] = (),
    ) -> None:
        self._name = name
        self._shape = tuple(shape)
        self._layout = tuple(layout)
        self._copies = copies
        self._fills = fills
        self._total = math.prod(shape)
        # Most parameters are one tensor, whole, and need no painting.
        self._plain = len(copies) == 1 and not fills and copies[0] == (0, self._shape, self._layout)

    @functools.cached_property
    def cleared(self) -> frozenset[int]:
        """Positions of the fills of which some copy takes an element."""
        if not (self._total and self._copies and self._fills):
            return frozenset()
        base = len(self._copies)
        return frozenset(i for i in range(len(self._fills)) if self._cells.region(self._painted, base + i).any())

    @functools.cached_property
    def gap(self) -> Gap | None:
        """What copies, and fills that no copy touches, leave unwritten; ``None`` when nothing."""
        order = self._order
        if not self._total or self._plain:
            return None
        empty = self._painted == 0
        for i in range(len(self._fills)):
            if i not in self.cleared:
                self._cells.region(empty, len(self._copies) + i)[...] = False
        if not empty.any():
            return None
        return Gap(self._cells.elements(empty), self._total, _logical(self._cells.first_box(empty), order))

    @functools.cached_property
    def doubled(self) -> Double | None:
        """Elements that two copies write, or ``None`` when no two share any."""
        if not self._total or len(self._copies) < 2:
            return None
        twice = self._painted > 1
        if not twice.any():
            return None
        first, *_ = np.argwhere(twice)
        alone = np.zeros_like(twice)
        alone[tuple(first)] = True
        owners = (i for i in range(len(self._copies)) if self._cells.region(alone, i).any())
        return Double(_logical(self._cells.first_box(alone), self._order), next(owners), next(owners))

    def late(self, copy_steps: Sequence[int], fill_steps: Sequence[int]) -> list[Double]:
        """The fills that came after a copy of the same elements, by the steps at which each was made."""
        touching = sorted(self.cleared)
        if not touching:
            return []
        owner = self._cells.array(np.int64, -1)
        # The earliest copy of each element last, so that it is the one that stays.
        for i in sorted(range(len(self._copies)), key=lambda i: -copy_steps[i]):
            self._cells.region(owner, i)[...] = i
        found = []
        for fill in touching:
            base = len(self._copies)
            for copy in np.unique(self._cells.region(owner, base + fill)).tolist():
                if copy >= 0 and copy_steps[copy] < fill_steps[fill]:
                    both = self._cells.array(np.bool_, False)
                    self._cells.region(both, base + fill)[...] = True
                    box = self._cells.first_box(both & (owner == copy))
                    found.append(Double(_logical(box, self._order), copy, fill))
        return sorted(found, key=lambda one: (one.first, one.second))

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        order = storage_order(self._shape, self._layout)
        if order is None:
            raise UnsupportedError(
                f"{self._name} has shape {list(self._shape)} but strides {list(self._layout)}: it is not dense",
                tensor=self._name,
            )
        return order

    @functools.cached_property
    def _cells(self) -> Cells:
        return cells_of(self._name, [self._shape[d] for d in self._order], [*self._copies, *self._fills])

    @functools.cached_property
    def _painted(self) -> npt.NDArray[np.int32]:
        """How many copies write each cell."""
        counts = self._cells.array(np.int32, 0)
        for i in range(len(self._copies)):
            self._cells.region(counts, i)[...] += 1
        return counts


def _logical(box: Box, order: Sequence[int]) -> Box:
    """A box in storage order as a box of the parameter's own dimensions."""
    places = [order.index(d) for d in range(len(order))]
    return Box(tuple(box.offsets[p] for p in places), tuple(box.sizes[p] for p in places))
