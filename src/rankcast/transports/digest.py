"""Digests of tensors: the same number on both sides for the same bits, however the bits lie in memory.

This module knows a fast library hash, and how digests travel. It must not know whose tensors these are. XXH3 finds
accidents: whoever can write another process's memory could make a digest fit, and is stopped elsewhere or not at all.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from rankcast.errors import PayloadError

Digests = npt.NDArray[np.uint64]


def digest(tensor: torch.Tensor, *, rounded: bool = False) -> int:
    """64 bits of a tensor's bits in row-major order.

    ``rounded`` says that they come from a cast. Which NaN a cast makes of a NaN depends, in torch, on strides: all of
    them are taken for one then.
    """
    tensor = tensor.detach()
    if rounded and tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full((), float("nan"), dtype=tensor.dtype), tensor)
    dense = tensor.contiguous()
    # Of a dimension of one element any stride counts as contiguous, and a view as bytes wants it to be 1.
    flat = dense.as_strided((dense.numel(),), (1,))
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)


def packed(digests: Sequence[int]) -> str:
    """Digests as they travel: base64 of little-endian 64-bit numbers; empty for none."""
    return base64.b64encode(np.array(digests, dtype="<u8").tobytes()).decode()


def unpacked(text: str) -> Digests:
    """The digests of ``packed``; raises ``PayloadError`` for anything else."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype="<u8").astype(np.uint64)
    except (ValueError, binascii.Error):
        raise PayloadError(f"what came is no list of digests: {text[:40]!r}") from None
