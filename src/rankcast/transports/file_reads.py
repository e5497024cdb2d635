"""Boxes in what is opened: views of memory, and reads of files, which go straight into a tensor where both lie in one
run and through a bounded buffer otherwise.

This module knows offsets and strides inside one segment or file. It must not know whose it is, or what a tensor is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rankcast.errors import LocationError
from rankcast.geometry import contiguous_strides, extent
from rankcast.manifest import DTYPES
from rankcast.transports.file import OpenedFile
from rankcast.transports.opening import Opened
from rankcast.transports.segment import torch_dtype

#: The most bytes that are read at once into a buffer of our own.
BUFFER_BYTES = 16 * 2**20


def box_in(
    opened: Opened, dtype: str, sizes: Sequence[int], strides: Sequence[int], address: int, name: str
) -> torch.Tensor | FileRead:
    """The box of ``sizes`` elements of ``dtype`` with ``strides`` from byte ``address`` on: a view, or what reads it.

    ``name`` is the parameter that it is for, in messages. Raises ``LocationError`` when it lies outside of ``opened``.
    """
    if isinstance(opened, OpenedFile):
        return FileRead(opened, dtype, sizes, strides, address, name)
    try:
        flat = opened.tensor(dtype, (extent(sizes, strides),), address, name=f"a box for {name}")
    except LocationError as fault:
        raise LocationError(fault.message, tensor=name) from None
    return torch.as_strided(flat, tuple(sizes), tuple(strides))


class FileRead:
    """One box of a tensor in a file: ``sizes`` elements of ``dtype`` with ``strides``, from byte ``address`` on.

    Raises as ``box_in`` does.
    """

    def __init__(
        self, file: OpenedFile, dtype: str, sizes: Sequence[int], strides: Sequence[int], address: int, name: str
    ) -> None:
        self._file = file
        self._dtype = torch_dtype(dtype)
        self._itemsize = DTYPES[dtype]
        self._sizes = tuple(sizes)
        self._strides = tuple(strides)
        self._address = address
        self._name = name
        end = address + extent(sizes, strides) * self._itemsize
        if end > file.size:
            raise LocationError(
                f"a box for {name} would end at byte {end} of {file.label}, which has {file.size}: the plan and the "
                "file do not belong together",
                tensor=name,
            )

    def into(self, view: torch.Tensor) -> None:
        """Read the box into ``view``, of the same sizes and any strides; a view of another dtype rounds.

        Raises ``LocationError`` when the file ends before the box does.
        """
        dense = all(
            size == 1 or stride == step
            for size, stride, step in zip(self._sizes, self._strides, contiguous_strides(self._sizes), strict=True)
        )
        if dense and view.dtype == self._dtype and view.is_contiguous():
            self._file.read_into(self._address, view, name=self._name)
            return
        self._through_buffer(view, self._sizes, self._strides, self._address)

    def _through_buffer(self, view: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], address: int) -> None:
        span = extent(sizes, strides)
        if span * self._itemsize <= BUFFER_BYTES or not any(size > 1 for size in sizes):
            flat = torch.empty(span, dtype=self._dtype)
            self._file.read_into(address, flat, name=self._name)
            view.copy_(torch.as_strided(flat, tuple(sizes), tuple(strides)))
            return
        # Halved along the dimension that steps farthest, so that each half spans about half of the file's bytes.
        at = max((d for d, size in enumerate(sizes) if size > 1), key=lambda d: strides[d])
        half = sizes[at] // 2
        for start, count in ((0, half), (half, sizes[at] - half)):
            part = (*sizes[:at], count, *sizes[at + 1 :])
            offset = address + start * strides[at] * self._itemsize
            self._through_buffer(view.narrow(at, start, count), part, strides, offset)
