"""Whether strided writes cover a parameter exactly once.

This module knows shapes, strides and element counts. It must not know names of tensors other than for a message, nor
torch. Writes that are boxes, nearly all, are judged as boxes; others (every second row) element by element, or rather
by the largest run of elements that all writes take whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcast.errors import UnsupportedError
from rankcast.geometry import Box, box_of_view, contiguous_strides, uncovered, whole

#: The most runs that are looked at one by one, at two bytes each.
RUN_LIMIT = 2**26


class View(NamedTuple):
    """A strided region of storage, in elements from a parameter's first."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Gap(NamedTuple):
    """Elements that nothing writes: how many of how many, and a box of some of them."""

    elements: int
    total: int
    box: Box


class Double(NamedTuple):
    """Two writes of one element: a box of such elements, and the positions of two writes that share it."""

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


def gap_in(name: str, shape: Sequence[int], layout: Sequence[int], views: Sequence[View]) -> Gap | None:
    """What ``views`` leave unwritten of a parameter of ``shape`` and strides ``layout``; ``None`` when nothing."""
    total = math.prod(shape)
    if total == 0:
        return None
    order = _order(name, shape, layout)
    stored = [shape[d] for d in order]
    boxes = _boxes(stored, views)
    if boxes is not None:
        if any(box.volume == total for box in boxes):
            return None
        elements, box, _ = uncovered(stored, boxes)
        return None if box is None else Gap(elements, total, _logical(box, order))
    run, counts = _counts(name, total, views)
    empty = np.flatnonzero(counts == 0)
    if not len(empty):
        return None
    return Gap(len(empty) * run, total, _logical(_run_box(stored, int(empty[0]) * run, run), order))


def doubled(name: str, shape: Sequence[int], layout: Sequence[int], views: Sequence[View]) -> Double | None:
    """Elements that two of ``views`` write, or ``None`` when no two share any."""
    total = math.prod(shape)
    if total == 0 or len(views) < 2:
        return None
    order = _order(name, shape, layout)
    stored = [shape[d] for d in order]
    boxes = _boxes(stored, views)
    if boxes is None:
        run, counts = _counts(name, total, views)
        twice = np.flatnonzero(counts > 1)
        if not len(twice):
            return None
        where = _run_box(stored, int(twice[0]) * run, run)
        single = View(int(twice[0]) * run, (run,), (1,))
        owners = [i for i, view in enumerate(views) if _counts(name, total, [view, single])[1].max() > 1]
        return Double(_logical(where, order), owners[0], owners[1])
    _, _, box = (0, None, boxes[0].intersect(boxes[1])) if len(boxes) == 2 else uncovered(stored, boxes)
    if box is None:
        return None
    owners = [i for i, other in enumerate(boxes) if other.volume and other.intersect(box) is not None]
    return Double(_logical(box, order), owners[0], owners[1])


def _order(name: str, shape: Sequence[int], layout: Sequence[int]) -> tuple[int, ...]:
    order = storage_order(shape, layout)
    if order is None:
        raise UnsupportedError(
            f"{name} has shape {list(shape)} but strides {list(layout)}: it is not dense", tensor=name
        )
    return order


def _boxes(stored: Sequence[int], views: Sequence[View]) -> list[Box] | None:
    boxes = []
    for view in views:
        if math.prod(view.sizes) == 0:
            boxes.append(Box((0,) * len(stored), (0,) * len(stored)))
            continue
        box = box_of_view(stored, view.offset, view.sizes, view.strides)
        if box is None:
            return None
        boxes.append(box)
    return boxes


def _logical(box: Box, order: Sequence[int]) -> Box:
    """A box in storage order as a box of the parameter's own dimensions."""
    places = [order.index(d) for d in range(len(order))]
    return Box(tuple(box.offsets[p] for p in places), tuple(box.sizes[p] for p in places))


def _run_box(stored: Sequence[int], start: int, run: int) -> Box:
    """The largest box among the ``run`` elements of a dense tensor that begin at element ``start``."""
    for axis in range(len(stored)):
        step = math.prod(stored[axis + 1 :])
        if run >= step and start % step == 0:
            at = start // step % stored[axis]
            sizes = (1,) * axis + (min(run // step, stored[axis] - at),) + tuple(stored[axis + 1 :])
            return Box(_index(stored, start), sizes)
    return whole(stored)


def _index(stored: Sequence[int], start: int) -> tuple[int, ...]:
    return tuple(start // step % size for size, step in zip(stored, contiguous_strides(stored), strict=True))


def _counts(name: str, total: int, views: Sequence[View]) -> tuple[int, npt.NDArray[np.uint16]]:
    """The length of a run that every view takes whole or not at all, and how often each run is written."""
    run = total
    plain = []
    for view in views:
        if math.prod(view.sizes) == 0:
            continue
        # Dimensions joined where one goes on where the next one ends: what is left last is the run.
        dims: list[tuple[int, int]] = []
        for size, stride in sorted(zip(view.sizes, view.strides, strict=True), key=lambda pair: -pair[1]):
            if size == 1:
                continue
            if dims and dims[-1][1] == stride * size:
                size, stride = size * dims.pop()[0], stride
            dims.append((size, stride))
        inner = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
        run = math.gcd(run, view.offset, inner, *(stride for _, stride in dims))
        plain.append((view.offset, [*dims, (inner, 1)]))
    if total // run > RUN_LIMIT:
        raise UnsupportedError(
            f"{name} is written in more than {RUN_LIMIT:,} scattered pieces: its coverage cannot be proved", tensor=name
        )
    counts = np.zeros(total // run, dtype=np.uint16)
    for offset, dims in plain:
        sizes = [*(size for size, _ in dims[:-1]), dims[-1][0] // run]
        steps = [*(stride // run for _, stride in dims[:-1]), 1]
        at = np.lib.stride_tricks.as_strided(counts[offset // run :], sizes, [2 * step for step in steps])
        at += 1
    return run, counts
