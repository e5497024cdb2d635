"""The parameters that a trace watches, found again from any view of them.

This module knows torch storages. It must not know what a loader does or what a trace is for.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

import torch

from rankcast.errors import ManifestError, UnsupportedError
from rankcast.geometry import extent
from rankcast.manifest import Manifest, TensorMeta
from rankcast.trace.coverage import storage_order
from rankcast.trace.dtypes import dtype_name, torch_dtype


def storage_key(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage object: equal for all views of one storage, for as long as it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


class Watch:
    """Says whether a tensor's storage is gone. While there is a watch, no other storage takes the same key."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = tensor.untyped_storage()._weak_ref()

    @property
    def gone(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._reference))

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._reference)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class Targets:
    """Destinations by storage region: tied parameters, which are the same region, count once.

    One that is not dense, or overlaps another without being the same, is refused when something writes to it: engines
    have buffers of that kind which no checkpoint fills.
    """

    def __init__(self, destinations: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(destinations)
        # Detached views keep the storages alive and remember where each parameter was.
        self._before = {name: tensor.detach() for name, tensor in destinations.items()}
        self.aliases: list[tuple[str, str]] = []
        self._kept: list[tuple[str, torch.Tensor]] = []
        self._regions: dict[int, list[tuple[int, int, int]]] = {}
        self._faults: dict[int, str] = {}
        same: dict[tuple[object, ...], str] = {}
        for name, tensor in self._before.items():
            place = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.numel() and place in same:
                self.aliases.append((name, same[place]))
                continue
            same[place] = name
            if storage_order(tensor.shape, tensor.stride()) is None:
                self._faults[len(self._kept)] = (
                    f"has shape {list(tensor.shape)} but strides {list(tensor.stride())}, so it is not dense"
                )
            start, length = int(tensor.storage_offset()), extent(tensor.shape, tensor.stride())
            regions = self._regions.setdefault(storage_key(tensor), [])
            regions.append((start * tensor.itemsize, (start + length) * tensor.itemsize, len(self._kept)))
            self._kept.append((name, tensor))
        for regions in self._regions.values():
            regions.sort()
            self._note_overlaps(regions)
        self._starts = {key: [start for start, _, _ in regions] for key, regions in self._regions.items()}

    def _note_overlaps(self, regions: list[tuple[int, int, int]]) -> None:
        reach, last = -1, -1
        for start, end, index in regions:
            if start < min(reach, end):
                self._faults.setdefault(index, f"shares part of its storage with {self._kept[last][0]}")
                self._faults.setdefault(last, f"shares part of its storage with {self._kept[index][0]}")
            if end > reach:
                reach, last = end, index

    @property
    def manifest(self) -> Manifest:
        """Names, dtypes and shapes, in order."""
        return Manifest.of(TensorMeta(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in self._kept)

    @property
    def layouts(self) -> tuple[tuple[int, ...], ...]:
        """Strides of each, in elements."""
        return tuple(tuple(tensor.stride()) for _, tensor in self._kept)

    def holds(self, key: int) -> bool:
        """Whether the storage with this key belongs to a destination."""
        return key in self._regions

    def locate(self, view: torch.Tensor, operator: str) -> tuple[int, int]:
        """The destination that ``view`` lies in, and its offset there in elements.

        Raises ``UnsupportedError`` when it lies in none whole, repeats an element, or has another size of element.
        """
        key = storage_key(view)
        regions = self._regions[key]
        dense = view.is_contiguous()
        start = view.storage_offset() * view.itemsize
        end = start + (view.numel() if dense else extent(view.shape, view.stride())) * view.itemsize
        at = bisect.bisect_right(self._starts[key], start) - 1
        if at < 0 or end > regions[at][1]:
            near = self._kept[regions[max(at, 0)][2]][0]
            raise UnsupportedError(f"{operator} writes beyond {near} in the storage that it is part of", tensor=near)
        index = regions[at][2]
        name, tensor = self._kept[index]
        if index in self._faults:
            raise UnsupportedError(
                f"{operator} writes to {name}, which {self._faults[index]}: such a write cannot be traced", tensor=name
            )
        if view.itemsize != tensor.itemsize or view.dtype.is_complex != tensor.dtype.is_complex:
            raise UnsupportedError(
                f"{operator} writes into {name} as {dtype_name(view.dtype)}, but it is {dtype_name(tensor.dtype)}: a "
                "write in another element size cannot be traced",
                tensor=name,
            )
        if not dense and _repeats(view):
            raise UnsupportedError(f"{operator} writes elements of {name} more than once in one call", tensor=name)
        return index, int(view.storage_offset()) - int(tensor.storage_offset())

    def name_at(self, view: torch.Tensor) -> str:
        """The name of a destination whose storage ``view`` is part of: the one it lies in, else the first."""
        try:
            return self._kept[self.locate(view, "a write")[0]][0]
        except UnsupportedError as fault:
            return fault.tensor or "a parameter"

    def dtype(self, index: int) -> torch.dtype:
        return self._kept[index][1].dtype

    def restore(self) -> str | None:
        """Put back parameters whose ``data`` was exchanged for another tensor; the name of the first, if any."""
        first = None
        for name, tensor in self._tensors.items():
            before = self._before[name]
            same = storage_key(tensor) == storage_key(before) and tensor.storage_offset() == before.storage_offset()
            if not same or tensor.shape != before.shape or tensor.stride() != before.stride():
                tensor.data = before
                first = first or name
        return first


def _repeats(view: torch.Tensor) -> bool:
    """Whether two indices of ``view`` may be the same element: some stride does not clear the dimensions within it."""
    reach = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


def meta_tensors(manifest: Manifest) -> list[torch.Tensor]:
    """A tensor without storage for each row of ``manifest``; raises ``ManifestError`` naming one torch cannot make."""
    tensors = []
    for row in manifest.rows():
        try:
            tensors.append(torch.empty(row.shape, dtype=torch_dtype(row.dtype), device="meta"))
        except (ManifestError, RuntimeError) as fault:
            raise ManifestError(f"{row} cannot be traced: {fault}", tensor=row.name) from None
    return tensors
