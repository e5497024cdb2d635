"""Boxes and strides against counting every element by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcast.geometry import Box, box_of_view, contiguous_strides, extent, uncovered, whole

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
solid_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True)))


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(solid_shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(draw(st.integers(0, count)))]


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))))


def elements(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """The storage index of every element of a view, in its own order."""
    return [
        offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*(range(n) for n in sizes))
    ]


@given(shape_and_boxes(2))
def test_an_intersection_has_exactly_the_common_elements(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    _, boxes = given_
    if len(boxes) == 2:
        common = boxes[0].intersect(boxes[1])
        assert cells(boxes[0]) & cells(boxes[1]) == (cells(common) if common is not None else set())
        assert common == boxes[1].intersect(boxes[0])


@given(solid_shapes, st.data())
def test_a_box_is_inside_exactly_when_all_its_bounds_are(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes_in(tuple(size + 1 for size in shape)))
    bounds = zip(box.offsets, box.sizes, shape, strict=True)
    assert box.inside(shape) == all(o + n <= size for o, n, size in bounds)
    assert not box.inside((*shape, 1))


@given(shapes)
def test_strides_and_extent_of_a_dense_tensor_are_numpys(shape: tuple[int, ...]) -> None:
    dense = np.zeros(shape, dtype=np.int8)
    if dense.size:
        assert contiguous_strides(shape) == dense.strides
    assert extent(shape, contiguous_strides(shape)) == dense.size
    assert whole(shape).volume == dense.size


@given(solid_shapes, st.lists(st.integers(0, 7), max_size=4))
def test_extent_reaches_from_the_first_to_the_last_element(shape: tuple[int, ...], strides: list[int]) -> None:
    steps = tuple((strides + [1] * 4)[: len(shape)])
    assert extent(shape, steps) == 1 + max(elements(0, shape, steps))


@given(solid_shapes, st.data())
def test_every_view_that_narrows_selects_and_permutes_is_its_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes_in(shape).filter(lambda box: box.volume > 0))
    index = np.arange(math.prod(shape)).reshape(shape)
    view = index[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    kept = [d for d in range(view.ndim) if view.shape[d] > 1 or data.draw(st.booleans(), label="keep")]
    view = view[tuple(slice(None) if d in kept else 0 for d in range(view.ndim))]
    view = view.transpose(data.draw(st.permutations(range(view.ndim))))
    for _ in range(data.draw(st.integers(0, 2), label="unsqueezed")):
        view = np.expand_dims(view, data.draw(st.integers(0, view.ndim)))
    strides = tuple(step // index.itemsize for step in view.strides)
    found = box_of_view(shape, int(view.flat[0]), view.shape, strides)
    assert found == box


@given(solid_shapes.filter(lambda shape: len(shape) > 1), st.data())
def test_a_view_that_merges_whole_dimensions_is_its_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(shape) - 2))
    merged = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    assert box_of_view(shape, 0, merged, contiguous_strides(merged)) == whole(shape)


@given(
    solid_shapes,
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4),
)
def test_whatever_is_called_a_box_holds_exactly_the_views_elements(
    shape: tuple[int, ...], offset: int, dims: list[tuple[int, int]]
) -> None:
    sizes, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    found = box_of_view(shape, offset, sizes, strides)
    dense = contiguous_strides(shape)
    touched = elements(offset, sizes, strides)
    if found is None:
        return
    assert found.inside(shape)
    inside = {sum(i * s for i, s in zip(cell, dense, strict=True)) for cell in cells(found)}
    assert sorted(touched) == sorted(inside)


@pytest.mark.parametrize(
    ("offset", "sizes", "strides"),
    [
        (0, (2, 6), (12, 1)),  # every second row
        (0, (4, 3), (6, 2)),  # every second column
        (0, (4, 6), (0, 1)),  # one row again and again
        (3, (6,), (1,)),  # half of one row and half of the next
        (0, (9,), (1,)),  # one row and a half, merged
        (6, (4, 6), (6, 1)),  # beyond the end
    ],
)
def test_a_view_that_skips_repeats_or_straddles_is_no_box(
    offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    assert box_of_view((4, 6), offset, sizes, strides) is None


@given(shape_and_boxes(6))
def test_gaps_and_doubles_are_counted_like_by_hand(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = given_
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    missing, gap, double = uncovered(shape, boxes)
    assert missing == (counts == 0).sum()
    assert (gap is None) == (missing == 0)
    assert (double is None) == (not (counts > 1).any())
    for found, wanted in ((gap, counts == 0), (double, counts > 1)):
        if found is not None:
            assert found.volume > 0
            assert all(wanted[cell] for cell in cells(found))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)])
def test_an_empty_tensor_is_covered_by_nothing_at_all(shape: tuple[int, ...]) -> None:
    assert uncovered(shape, []) == (0, None, None)
    assert uncovered(shape, [whole(shape)]) == (0, None, None)


def test_a_scalar_is_covered_by_one_box_and_doubled_by_two() -> None:
    one = Box((), ())
    assert uncovered((), []) == (1, one, None)
    assert uncovered((), [one]) == (0, None, None)
    assert uncovered((), [one, one]) == (0, None, one)


@pytest.mark.parametrize(("offsets", "sizes"), [((0,), ()), ((-1,), (1,)), ((0,), (-1,))])
def test_a_box_that_makes_no_sense_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a box has"):
        Box(offsets, sizes)


def test_a_box_reads_like_a_slice() -> None:
    assert str(Box((0, 128), (4, 64))) == "[0:4, 128:192]"
