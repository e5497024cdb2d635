"""Raw bits to torch tensors and back, without touching a bit. It knows dtypes; it knows no names and no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from oracle import as_bits

Bits = np.ndarray[Any, Any]

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def as_torch(weights: Mapping[str, Bits], dtype: str | torch.dtype = "float32") -> dict[str, torch.Tensor]:
    """Tensors of ``dtype`` that share no memory with ``weights``, bit for bit.

    Raises ValueError when the dtype's width is not the bits'.
    """
    target = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    tensors = {}
    for name, bits in weights.items():
        if bits.dtype.itemsize != target.itemsize:
            raise ValueError(f"{name} has {bits.dtype.itemsize} bytes an element, {target} has {target.itemsize}")
        tensors[name] = torch.from_numpy(as_bits(bits).copy()).view(target)
    return tensors


def bits_of(tensor: torch.Tensor) -> Bits:
    """The tensor's bits in its logical order, as a fresh array of its shape; any device, strides and grad flag."""
    detached = tensor.detach().to("cpu").contiguous()
    return np.array(detached.view(_UNSIGNED[detached.element_size()]).numpy())
