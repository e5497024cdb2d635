"""From one torch tensor to its logical values, dense and row-major, in a buffer.

This module knows strides, devices, casts and which tensors have no plain values to send. It must not know names'
meaning, modules or manifests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankcast.errors import ManifestError, SourceError, UnsupportedError
from rankcast.geometry import extent
from rankcast.trainer.sources.dtensor import is_sharded, local_tensor
from rankcast.transports.segment import dtype_name, torch_dtype

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def whole_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as an ordinary tensor of full shape, detached: a DTensor that is replicated gives its local tensor.

    Raises ``UnsupportedError`` for a tensor that has no full set of plain values on this rank: a sharded DTensor, and
    what ``plain_tensor`` refuses.
    """
    if is_sharded(tensor):
        placements = tensor.placements  # type: ignore[attr-defined]  # a DTensor's
        raise UnsupportedError(
            f"{name} is a DTensor with placements {list(map(str, placements))}, of which this rank holds a part: "
            "gather it (full_tensor()) before it is yielded, or pass the module itself",
            tensor=name,
        )
    return plain_tensor(name, local_tensor(tensor))


def plain_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, which is no DTensor, detached.

    Raises ``UnsupportedError`` for a tensor without plain values: one without data (meta, lazy), a sparse or quantised
    one; and ``SourceError`` for one whose storage was freed.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError(f"{name} is not initialised yet: run the module once first", tensor=name)
    if tensor.is_meta:
        raise UnsupportedError(f"{name} is on the meta device and has no values: load the weights first", tensor=name)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(
            f"{name} is a {tensor.layout} or quantised tensor: convert it to a dense one", tensor=name
        )
    if tensor.numel():
        there = tensor.untyped_storage().nbytes()
        needed = (int(tensor.storage_offset()) + extent(tensor.shape, tensor.stride())) * tensor.element_size()
        if there < needed:
            raise SourceError(
                f"{name} needs {needed} bytes and its storage has {there}: it was freed or offloaded; bring it back "
                "before it is pushed",
                tensor=name,
            )
    return tensor.detach()


def wire_dtype(name: str, dtype: torch.dtype) -> str:
    """The canonical name of ``dtype``; raises ``UnsupportedError`` naming the tensor when the wire lacks it."""
    try:
        return dtype_name(dtype)
    except ManifestError as unknown:
        raise UnsupportedError(f"{name} has a dtype that cannot travel: {unknown.message}", tensor=name) from None


def filler(tensor: torch.Tensor, dtype: str) -> Callable[[torch.Tensor], None]:
    """A function that writes ``tensor`` into a uint8 buffer as dense ``dtype`` values, rounding as ``Tensor.to`` does.

    No intermediate copy of the tensor is made, except by torch itself where it moves from another device.
    """

    def fill(buffer: torch.Tensor) -> None:
        with torch.no_grad():
            buffer.view(torch_dtype(dtype)).view(tensor.shape).copy_(tensor)

    return fill


def lies_ready(tensor: torch.Tensor, dtype: str) -> bool:
    """Whether the bytes of ``tensor`` are what the wire needs: plain, on CPU, dense, row-major, of ``dtype``."""
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == "cpu"
        and tensor.dtype == torch_dtype(dtype)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
