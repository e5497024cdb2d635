"""A trace's copies as destinations: transposed, selected and sliced views are boxes, and what is none says why."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_by_hand import box_of, view
from rankcast.manifest import Manifest
from rankcast.plan.views import Routable, destinations_of


def converted(manifest: Manifest, copies: list[dict[str, Any]], dtypes: tuple[str, ...] = ("int32",)) -> Routable:
    columns = ("sources", "source_offsets", "source_strides", "sizes", "destinations", "offsets", "strides", "throughs")
    return destinations_of(manifest, dtypes=dtypes, **{name: [copy[name] for copy in copies] for name in columns})


def copy_of(source: Any, base: Any, **other: Any) -> dict[str, Any]:
    """A copy of the numpy view ``source`` of ``base`` into a dense place of its shape."""
    item = base.itemsize
    offset = (source.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // item
    strides = [math.prod(source.shape[d + 1 :]) for d in range(source.ndim)]
    return {
        "sources": (0,),
        "source_offsets": offset,
        "source_strides": [stride // item for stride in source.strides],
        "sizes": source.shape,
        "destinations": 0,
        "offsets": 0,
        "strides": strides,
        "throughs": "",
        **other,
    }


@st.composite
def views(draw: st.DrawFn) -> tuple[Any, Any]:
    """A tensor and a view of it by slices, selects, permutations and dimensions of size 1."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    base = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    source = base
    for d, size in enumerate(shape):
        begin = draw(st.integers(0, size - 1))
        source = source[(slice(None),) * d + (slice(begin, draw(st.integers(begin + 1, size))),)]
    dims = list(draw(st.permutations(range(source.ndim))))
    source = source.transpose(dims)
    for d in reversed(range(source.ndim)):
        if source.shape[d] == 1 and draw(st.booleans()):
            source = source.squeeze(d) if draw(st.booleans()) else source[(slice(None),) * d + (None,)]
    return base, source


@settings(max_examples=300, deadline=None)
@given(views())
def test_a_view_by_slices_selects_and_permutations_becomes_a_box_with_its_order_of_dimensions(
    case: tuple[Any, Any],
) -> None:
    base, source = case
    manifest = Manifest(("t",), ("int32",), (base.shape,))
    found = converted(manifest, [copy_of(source, base, offsets=3)])
    assert found.reasons == {}
    rows = found.destinations
    held = np.zeros(3 + source.size, dtype=np.int32)
    view(held.view(np.uint8)[int(rows.offset[0]) * 4 :], held.dtype, rows.sizes[0].tolist(), rows.strides[0])[...] = (
        box_of(base, rows.starts[0], rows.sizes[0])
    )
    assert held[3:].tolist() == source.reshape(-1).tolist()
    assert (rows.strides[rows.sizes == 1] == 0).all()


BASE = np.arange(24, dtype=np.int32).reshape(4, 6)
FORM = Manifest(("t", "u"), ("int32", "int32"), ((4, 6), (4, 6)))


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (BASE[::2], "steps over"),
        (BASE[:, 1::2], "steps over"),
        (BASE.reshape(-1), "merges"),
        (BASE.reshape(-1)[3:9], "merges"),
        (BASE.reshape(2, 12), "steps over elements, or folds"),
        (np.broadcast_to(BASE[:, :1], (4, 5)), "more than once"),
        (np.lib.stride_tricks.as_strided(BASE, (4, 4), (4, 4)), "steps over elements, or folds"),
    ],
)
def test_a_view_that_is_no_box_goes_through_the_loader_and_says_why(source: Any, word: str) -> None:
    found = converted(FORM, [copy_of(source, BASE), copy_of(BASE, BASE, sources=(1,))])
    assert list(found.reasons) == [0]
    assert word in found.reasons[0]
    assert found.reasons[0].startswith("through the loader")
    assert found.destinations.tensor.tolist() == [1]


def test_what_an_operator_computed_goes_through_the_loader_with_the_operators_name() -> None:
    good = copy_of(BASE, BASE)
    found = converted(FORM, [good, {**good, "sources": (0, 1), "throughs": "cat"}])
    assert "cat" in found.reasons[0]
    assert "cat" in found.reasons[1]
    assert len(found.destinations) == 0
    found = converted(FORM, [{**good, "sources": (1,), "throughs": "_to_copy"}, good])
    assert list(found.reasons) == [1]
    assert found.destinations.tensor.tolist() == [0]


def test_one_copy_that_is_no_box_keeps_the_whole_tensor_off_the_routes() -> None:
    found = converted(FORM, [copy_of(BASE[:2], BASE), copy_of(BASE[2::2], BASE), copy_of(BASE[1:, ::2], BASE)])
    assert list(found.reasons) == [0]
    assert len(found.destinations) == 0


def test_an_empty_copy_is_no_destination_and_a_scalar_is_one_element() -> None:
    scalars = Manifest(("s",), ("float32",), ((),))
    one = np.zeros((), dtype=np.float32)
    found = converted(scalars, [copy_of(one, one), copy_of(one.reshape(1)[:0], one)], dtypes=("float32",))
    assert found.destinations.sizes.tolist() == [[1]]
    assert found.reasons == {}
    assert len(converted(scalars, []).destinations) == 0


def test_a_parameters_dtype_goes_with_each_of_its_destinations() -> None:
    copies = [copy_of(BASE, BASE, destinations=1), copy_of(BASE, BASE, sources=(1,))]
    found = converted(FORM, copies, dtypes=("bfloat16", "float32"))
    from rankcast.plan.columns import dtype_codes

    assert found.destinations.dtype.tolist() == dtype_codes(["float32", "bfloat16"]).tolist()
    assert found.destinations.parameter.tolist() == [1, 0]
