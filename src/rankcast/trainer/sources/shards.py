"""Shards: which boxes of which tensors a trainer rank holds, and where their bytes are.

This module knows the record that a source makes for each box. It must not know any kind of source, nor how memory is
exported.
"""

from __future__ import annotations

import dataclasses

import torch

from rankcast.geometry import Box
from rankcast.manifest import TensorMeta
from rankcast.transports.file import ExportedFile
from rankcast.transports.segment import dtype_name


@dataclasses.dataclass(frozen=True)
class FileRange:
    """Bytes of an exported file: dense and row-major in the tensor's own dtype, from ``offset`` bytes into it."""

    file: ExportedFile
    offset: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """A box that this trainer rank holds of the tensor ``meta``, and the memory or the file that its bytes are in.

    ``meta`` describes the whole tensor in checkpoint coordinates, with the dtype of the wire. ``memory`` is a detached
    view of the live tensor, of ``box.sizes``, any strides, whose own dtype may be another than ``meta``'s: then the
    copy casts, and does what the wire's dtype says only when the destination has that dtype. Or it is a range of a
    file. Raises ``ValueError`` when box, shape and memory do not fit each other.
    """

    meta: TensorMeta
    box: Box
    memory: torch.Tensor | FileRange

    def __post_init__(self) -> None:
        if not self.box.inside(self.meta.shape):
            raise ValueError(f"{self.meta} has no box {self.box}")
        if isinstance(self.memory, torch.Tensor) and tuple(self.memory.shape) != self.box.sizes:
            raise ValueError(f"box {self.box} of {self.meta} is in memory of shape {list(self.memory.shape)}")

    @property
    def dtype(self) -> str:
        """The canonical dtype of the bytes as they lie."""
        return dtype_name(self.memory.dtype) if isinstance(self.memory, torch.Tensor) else self.meta.dtype
