"""Coverage by strided writes against counting every element by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcast.errors import UnsupportedError
from rankcast.geometry import Box, contiguous_strides
from rankcast.trace import cells
from rankcast.trace.cells import View
from rankcast.trace.coverage import Coverage, storage_order


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape, and the strides of a tensor of it that is dense in some order of its dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    for dim, step in zip(order, contiguous_strides([shape[d] for d in order]), strict=True):
        strides[dim] = step
    return shape, tuple(strides)


@st.composite
def views_in(draw: st.DrawFn, shape: tuple[int, ...], strides: tuple[int, ...]) -> View:
    """A slice with steps: in bounds, and no element twice."""
    offset, sizes, steps = 0, [], []
    for size, stride in zip(shape, strides, strict=True):
        start, step = draw(st.integers(0, size)), draw(st.sampled_from([1, 1, 1, 2, 3]))
        sizes.append(draw(st.integers(0, max(0, math.ceil((size - start) / step)))))
        offset += min(start, size - 1) * stride
        steps.append(stride * step)
        if start == size:
            sizes[-1] = 0
    order = draw(st.permutations(range(len(shape))))
    return View(offset, tuple(sizes[d] for d in order), tuple(steps[d] for d in order))


def count(shape: tuple[int, ...], strides: tuple[int, ...], views: list[View]) -> np.ndarray:
    storage = np.zeros(math.prod(shape), dtype=int)
    for view in views:
        for index in itertools.product(*(range(n) for n in view.sizes)):
            storage[view.offset + sum(i * s for i, s in zip(index, view.strides, strict=True))] += 1
    counts = np.zeros(shape, dtype=int)
    for index in itertools.product(*(range(n) for n in shape)):
        counts[index] = storage[sum(i * s for i, s in zip(index, strides, strict=True))]
    return counts


def part(counts: np.ndarray, box: Box) -> np.ndarray:
    return counts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@given(layouts(), st.data())
def test_gaps_and_doubles_are_found_like_by_hand(
    layout: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    shape, strides = layout
    views = [data.draw(views_in(shape, strides)) for _ in range(data.draw(st.integers(0, 4)))]
    counts = count(shape, strides, views)
    coverage = Coverage("w", shape, strides, views)
    gap = coverage.gap
    assert (gap.elements if gap is not None else 0) == (counts == 0).sum()
    if gap is not None:
        assert gap.total == counts.size
        assert gap.box.volume
        assert gap.box.inside(shape)
        assert (part(counts, gap.box) == 0).all()
    double = coverage.doubled
    assert (double is not None) == bool((counts > 1).any())
    if double is not None:
        assert double.box.volume
        assert (part(counts, double.box) > 1).all()
        assert double.first < double.second
        both = count(shape, strides, [views[double.first], views[double.second]])
        assert (part(both, double.box) > 1).any()


@given(layouts(), st.data())
def test_fills_that_copies_touch_are_found_like_by_hand(
    layout: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    shape, strides = layout
    copies, fills = (
        [data.draw(views_in(shape, strides)) for _ in range(data.draw(st.integers(0, 3)))] for _ in range(2)
    )
    order = data.draw(st.permutations(range(len(copies) + len(fills))))
    copy_steps, fill_steps = order[: len(copies)], order[len(copies) :]
    coverage = Coverage("w", shape, strides, copies, fills)
    both = {
        (i, j): (count(shape, strides, [copy]) & count(shape, strides, [fill])) > 0
        for i, copy in enumerate(copies)
        for j, fill in enumerate(fills)
    }
    touched = {j for (_, j), common in both.items() if common.any()}
    assert coverage.cleared == touched
    counts = count(shape, strides, [*copies, *(fill for j, fill in enumerate(fills) if j not in touched)])
    assert (coverage.gap.elements if coverage.gap is not None else 0) == (counts == 0).sum()
    late = coverage.late(copy_steps, fill_steps)
    # Named with the first copy that came there; of a fill nobody came before, nothing is said.
    assert {one.second for one in late} == {
        j for (i, j), common in both.items() if common.any() and copy_steps[i] < fill_steps[j]
    }
    for one in late:
        assert copy_steps[one.first] < fill_steps[one.second]
        assert part(both[one.first, one.second], one.box).all()


@given(layouts())
def test_a_dense_layout_is_recognised_in_any_order_of_dimensions(
    layout: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, strides = layout
    order = storage_order(shape, strides)
    assert order is not None
    assert sorted(order) == list(range(len(shape)))
    dense = contiguous_strides([shape[d] for d in order])
    assert all(strides[d] == step or shape[d] == 1 for d, step in zip(order, dense, strict=True))


@pytest.mark.parametrize(("shape", "strides"), [((4,), (2,)), ((2, 3), (4, 1)), ((3, 2), (0, 1)), ((2, 2), (1, 1))])
def test_a_layout_with_holes_or_repeats_is_not_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert storage_order(shape, strides) is None
    with pytest.raises(UnsupportedError, match="not dense"):
        assert Coverage("w", shape, strides, []).gap


def test_interleaved_rows_of_a_large_stack_are_judged_by_rows_and_not_by_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (64, 512, 1024)
    even, odd = (View(at * 1024, (64, 256, 1024), (512 * 1024, 2048, 1)) for at in (0, 1))
    strides = contiguous_strides(shape)
    monkeypatch.setattr(cells, "RUN_LIMIT", 64 * 512)
    assert Coverage("w", shape, strides, [even, odd]).gap is None
    gap = Coverage("w", shape, strides, [odd]).gap
    assert gap is not None
    assert (gap.elements, gap.box) == (64 * 256 * 1024, Box((0, 0, 0), (1, 1, 1024)))
    monkeypatch.setattr(cells, "RUN_LIMIT", 64 * 512 - 1)
    with pytest.raises(UnsupportedError, match="w is written in more than 32,767 scattered pieces"):
        assert Coverage("w", shape, strides, [even, odd]).gap


def test_an_empty_parameter_needs_nothing() -> None:
    assert Coverage("w", (0, 3), (3, 1), []).gap is None
    assert Coverage("w", (0, 3), (3, 1), [View(0, (0, 3), (3, 1))] * 2).doubled is None


def test_the_work_for_a_stack_of_experts_grows_with_the_experts_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visited = 0
    plain = cells._Grid.region

    def counting(self: cells._Grid, array: cells.Array, write: int) -> cells.Array:
        nonlocal visited
        part = plain(self, array, write)
        visited += 1 + part.size
        return part

    monkeypatch.setattr(cells._Grid, "region", counting)

    def work(experts: int) -> int:
        """Cells looked at for a stack of experts in two halves, each of 24 rows and 8 rows of padding."""
        nonlocal visited
        visited = 0
        shape = (experts, 64, 16)
        starts = [row * 16 for row in range(0, experts * 64, 32)]
        copies = [View(start, (24, 16), (16, 1)) for start in starts]
        fills = [View(start + 24 * 16, (8, 16), (16, 1)) for start in starts]
        coverage = Coverage("w13", shape, contiguous_strides(shape), copies, fills)
        assert (coverage.gap, coverage.doubled, coverage.cleared) == (None, None, frozenset())
        steps = range(2 * len(starts))
        assert coverage.late(steps[::2], steps[1::2]) == []
        return visited

    assert work(64) == 2 * work(32)
