"""The contract of a data plane: a segment that one process exports, and the same segment opened by another.

This module knows bytes, offsets and dtypes. It must not know how any kind of memory is made, mapped or found: each
transport subclasses the two classes here, and a new transport changes no other file.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from rankcast.errors import LocationError, ManifestError
from rankcast.trace.dtypes import dtype_name, torch_dtype
from rankcast.wire.handles import Handle

__all__ = ["OpenedSegment", "Segment", "dtype_name", "torch_dtype"]


class Segment(ABC):
    """Memory that this process exports; ``handle`` is the record with which another process opens it.

    ``size`` is in bytes. The segment stays readable through its handle until ``close``.
    """

    handle: Handle
    size: int
    _memory: torch.Tensor | None

    @property
    def memory(self) -> torch.Tensor:
        """The bytes: a writable 1-D uint8 tensor of ``size`` elements. Raises ``LocationError`` after ``close``."""
        if self._memory is None:
            raise LocationError("a segment was used after it was closed")
        return self._memory

    def unlink(self) -> None:
        """Say that every reader has the segment open: nobody can open it by name from here on. Idempotent."""
        return

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory. Idempotent, never raises; a view that somebody still holds stays valid and frees it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OpenedSegment(ABC):
    """Another process's segment, opened to be read; ``label`` says in messages whose it is.

    What a reader writes into a tensor of it never reaches the owner.
    """

    size: int
    label: str
    _memory: torch.Tensor | None

    def tensor(self, dtype: str, shape: Sequence[int], offset: int, *, name: str | None = None) -> torch.Tensor:
        """The dense, row-major tensor that starts ``offset`` bytes into the segment: a view, nothing is copied.

        ``dtype`` is a canonical name, ``name`` the tensor's, for messages. Raises ``LocationError`` when the dtype is
        unknown, a size is negative, the offset is no multiple of the element's size, or a byte lies outside.
        """
        what = name if name is not None else "a tensor"
        try:
            kind = torch_dtype(dtype)
        except ManifestError as unknown:
            raise LocationError(f"{what} in {self.label}: {unknown.message}", tensor=name) from None
        if any(size < 0 for size in shape) or offset < 0:
            raise LocationError(f"{what} in {self.label} has shape {list(shape)} and offset {offset}", tensor=name)
        needed = math.prod(shape) * kind.itemsize
        if offset + needed > self.size:
            raise LocationError(
                f"{what}, {dtype}{list(shape)}, would lie at bytes {offset}..{offset + needed} of {self.label}, which "
                f"has {self.size}: the schedule and the segment do not belong together",
                tensor=name,
            )
        if offset % kind.itemsize:
            raise LocationError(
                f"{what} starts at byte {offset} of {self.label}, which is no multiple of the {kind.itemsize} bytes "
                f"of {dtype}: align what is staged",
                tensor=name,
            )
        if self._memory is None:
            raise LocationError(f"{what} was asked of {self.label} after it was closed", tensor=name)
        if not needed:
            return torch.empty(tuple(shape), dtype=kind, device=self._memory.device)
        return self._memory[offset : offset + needed].view(kind).view(tuple(shape))

    @abstractmethod
    def verify(self) -> None:
        """Compare what its owner has there with the record once more; raises ``LocationError`` when it is another, or
        gone."""

    @abstractmethod
    def verify_size(self) -> None:
        """Raise ``LocationError`` when what is open here has shrunk, so that reading it would kill this process.

        Costs less than ``verify``, and suffices right after it.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Forget what this reader itself wrote into the segment, so that the owner's bytes are read next."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the segment. Idempotent, never raises; a tensor that somebody still holds stays valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
