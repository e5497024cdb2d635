"""The operands of a torch operator: which tensors there are among them, and the same call without values.

This module knows torch's tensors and calls. It must not know what a loader or a trace is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rankcast.trace.coverage import storage_order


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among ``values`` and in lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def only_moves(tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a ``_to_copy`` changes nothing but the device; the result then has the very elements and strides."""
    same = (
        kwargs.get("dtype") in (None, tensor.dtype)
        and kwargs.get("layout") in (None, tensor.layout)
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    )
    return same and storage_order(tensor.shape, tensor.stride()) is not None


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one element, perhaps repeated, whose value is there."""
    repeated = all(size == 1 or stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and repeated and not tensor.is_meta


def without_storage(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The same call on the meta device, where operands without values can meet those that have some."""

    def bare(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)):
            return type(value)(bare(one) for one in value)
        return torch.device("meta") if isinstance(value, torch.device) else value

    return [bare(value) for value in args], {name: bare(value) for name, value in kwargs.items()}
