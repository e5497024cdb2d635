"""Views of an opened segment: every dtype and shape at its place, everything outside refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankcast.errors import LocationError
from rankcast.manifest import DTYPES, nbytes
from rankcast.trace.dtypes import TORCH_DTYPES
from rankcast.transports.segment import OpenedSegment
from rankcast.transports.shm import create_segment, open_handle

SIZE = 4096


@pytest.fixture(scope="module")
def opened() -> Iterator[OpenedSegment]:
    with create_segment(SIZE) as made:
        made.memory.copy_(torch.arange(SIZE) % 253)
        with open_handle(made.handle) as segment:
            yield segment


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (3, 5), (2, 3, 4)])
def test_a_view_has_the_bytes_of_its_place(opened: OpenedSegment, dtype: str, shape: tuple[int, ...]) -> None:
    view = opened.tensor(dtype, shape, 64)
    assert view.dtype == TORCH_DTYPES[dtype]
    assert tuple(view.shape) == shape
    assert view.is_contiguous()
    raw = view.contiguous().view(-1).view(torch.uint8) if view.numel() else torch.empty(0, dtype=torch.uint8)
    assert raw.tolist() == [(64 + i) % 253 for i in range(nbytes(dtype, shape))]


def test_a_view_copies_nothing(opened: OpenedSegment) -> None:
    base = opened.tensor("uint8", (SIZE,), 0).data_ptr()
    assert opened.tensor("float32", (3,), 128).data_ptr() == base + 128


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    offset=st.integers(0, SIZE + 64),
)
def test_a_view_is_given_exactly_when_it_lies_inside_and_is_aligned(
    opened: OpenedSegment, dtype: str, shape: tuple[int, ...], offset: int
) -> None:
    fits = dtype in TORCH_DTYPES and offset % DTYPES[dtype] == 0 and offset + nbytes(dtype, shape) <= SIZE
    if fits:
        assert tuple(opened.tensor(dtype, shape, offset).shape) == shape
    else:
        with pytest.raises(LocationError):
            opened.tensor(dtype, shape, offset)


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "message"),
    [
        ("float33", (1,), 0, "unknown dtype 'float33'"),
        ("float32", (-1,), 0, r"shape \[-1\]"),
        ("float32", (1,), -4, "offset -4"),
        ("float32", (1025,), 0, r"bytes 0\.\.4100 of .* has 4096"),
        ("float32", (1,), 4096, r"bytes 4096\.\.4100"),
        ("float32", (1,), 2, "byte 2 .* 4 bytes of float32"),
        ("uint8", (2**62, 4), 0, "which has 4096"),
    ],
)
def test_a_refusal_names_the_tensor_and_what_is_wrong(
    opened: OpenedSegment, dtype: str, shape: tuple[int, ...], offset: int, message: str
) -> None:
    with pytest.raises(LocationError, match=message) as refused:
        opened.tensor(dtype, shape, offset, name="model.norm.weight")
    assert refused.value.tensor == "model.norm.weight"
    assert "model.norm.weight" in refused.value.message
