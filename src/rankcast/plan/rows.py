"""One worker's routes as compact columns, and their hash, which the trainer and the worker compute alike.

This module knows what a copy needs: where the bytes are, where they go, and how many. It must not know how routes are
found. Half of the columns say where things go, which all workers of one trace share, and half where they come from;
the hash is made of one digest for each half, so that the shared half is digested once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rankcast.plan.columns import Codes, Ints, Ints32

_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Targets:
    """Where routes go. ``tensor``, ``parameter`` int32 [n]; ``offset`` int64 elements from the parameter's first;
    ``strides`` int64 [n, D] elements of the parameter, 0 where the size is 1; ``dtype`` int16 the parameter's;
    ``sizes`` int64 [n, D] the box that moves."""

    tensor: Ints32
    parameter: Ints32
    offset: Ints
    strides: Ints
    dtype: Codes
    sizes: Ints

    @property
    def digest(self) -> bytes:
        return digest_columns((self.tensor, self.parameter, self.offset, self.strides, self.dtype, self.sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class Origins:
    """Where routes come from. ``rank`` int32 [n] a trainer rank, ``segment`` int32 one of that rank's segments;
    ``offset`` int64 the first element's bytes from the segment's start; ``strides`` int64 [n, D] elements of storage, 0
    where the size is 1; ``dtype`` int16 the shard's."""

    rank: Ints32
    segment: Ints32
    offset: Ints
    strides: Ints
    dtype: Codes

    @property
    def digest(self) -> bytes:
        return digest_columns((self.rank, self.segment, self.offset, self.strides, self.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerRoutes:
    """All routes of one worker, one row each, in the order of its trace; columns are contiguous.

    Row i copies ``targets.sizes[i]`` elements, as a view with ``origins.strides[i]`` at ``origins.offset[i]`` of the
    segment, into a view with ``targets.strides[i]`` at ``targets.offset[i]`` of the parameter, and casts if the dtypes
    differ. Within a row both views have the checkpoint's order of dimensions.
    """

    targets: Targets
    origins: Origins

    def __len__(self) -> int:
        return len(self.targets.tensor)

    @property
    def hash(self) -> str:
        """32 hex digits, the same for equal rows on any machine, and for no others."""
        return rows_digest(self.targets.digest, self.origins.digest).hex()


def rows_digest(targets: bytes, origins: bytes) -> bytes:
    """The digest of a worker's rows from those of their halves."""
    return hashlib.blake2b(targets + origins, digest_size=_DIGEST_BYTES).digest()


def digest_columns(columns: Iterable[npt.NDArray[np.integer]]) -> bytes:
    """A digest of columns, of their shapes and of their types, on little-endian bytes."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for column in columns:
        plain = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<"))
        state.update(f"{plain.dtype.str}{list(plain.shape)}".encode())
        state.update(plain.data)
    return state.digest()
