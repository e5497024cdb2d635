"""Where tensors lie and how often they were written, as numbers that are cheap to take and to compare.

This module knows storages, addresses, layouts and version counters. It must not know names or where tensors come from.
It is called at every push for every tensor of a model, so it goes over columns and makes no object for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rankcast.trainer.sources.dtensor import local_tensors

# The same number as untyped_storage()._cdata, without a Python object for each storage.
_storage: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]  # torch's stubs lack it


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Equal for equal numbers of tensors that lie in the same storages, at the same addresses, in the same layouts.

    Of a DTensor its local tensor counts. A storage is told by where torch keeps its record: the number is given out
    again when the storage is gone, unless somebody remembers it. A tensor without memory counts as being nowhere.
    """
    local = local_tensors(tensors)
    try:
        storages = list(map(_storage, local))
        addresses = list(map(torch.Tensor.data_ptr, local))
        dtypes = [tensor.dtype for tensor in local]
        layouts = list(
            map(hash, zip(map(torch.Tensor.size, local), map(torch.Tensor.stride, local), dtypes, strict=True))
        )
    except (RuntimeError, ValueError):
        # A sparse one, a lazy one: rare enough to ask one by one.
        return tuple(number for tensor in local for number in _place(tensor))
    return (*storages, *addresses, *layouts)


def _place(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return _storage(tensor), tensor.data_ptr(), hash((tensor.shape, tensor.stride(), tensor.dtype))
    except (RuntimeError, ValueError):
        return (0, 0, 0)


def versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """One value for each tensor, which is another when it was written, as far as torch counts it, or lies elsewhere."""
    local = local_tensors(tensors)
    counts = _counts(tensors)
    if local is not tensors:
        counts = [count + inner for count, inner in zip(counts, _counts(local), strict=True)]
    try:
        storages = list(map(_storage, local))
    except (RuntimeError, ValueError):
        storages = [_place(tensor)[0] for tensor in local]
    return tuple(map(hash, zip(counts, storages, strict=True)))


def _counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        # One that was made in inference mode has no counter.
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
