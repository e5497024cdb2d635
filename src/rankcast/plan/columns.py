"""The columns that a plan is made from: what trainer ranks hold, what workers want, and who the workers are.

This module knows the form of these columns and checks it. It must not know how a source, a loader or a simulation fills
them, nor what a plan makes of them. All columns of one record have one value (or one row of D values) a shard or a
destination; D is the most dimensions of any tensor of the manifest, at least 1, and dimensions that a tensor lacks
stand behind its own with start 0, size 1, stride 0. dtypes are positions in ``DTYPES`` (``dtype_codes``), so entries
may be added to that table only at its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rankcast.manifest import DTYPES, Manifest

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Codes = npt.NDArray[np.int16]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[Any]

#: Canonical dtype names in the order of their codes, and the bytes of an element of each.
DTYPE_NAMES = tuple(DTYPES)
ITEM_BYTES: Ints = np.array(list(DTYPES.values()), dtype=np.int64)

_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}


def dtype_codes(names: Iterable[str]) -> Codes:
    """The codes of canonical dtype names."""
    return np.array([_CODES[name] for name in names], dtype=np.int16)


def dimensions(manifest: Manifest) -> int:
    """D of a manifest: the most dimensions of any of its tensors, at least 1."""
    return max(1, max(map(len, manifest.shapes), default=1))


def shape_columns(manifest: Manifest) -> Ints:
    """int64 [tensors, D]: full shapes, with 1 for dimensions that a tensor lacks."""
    dims = dimensions(manifest)
    # Many tensors, few different shapes.
    rows = {shape: row for row, shape in enumerate(dict.fromkeys(manifest.shapes))}
    table = np.array([(*shape, *(1,) * (dims - len(shape))) for shape in rows], dtype=np.int64).reshape(-1, dims)
    return table[np.fromiter(map(rows.__getitem__, manifest.shapes), dtype=np.int64, count=len(manifest))]


def product(rows: Ints) -> Ints:
    """Products int64 [n] along the last dimension of [n, D], which is short: numpy's own reductions are slow there."""
    result: Ints = rows[:, 0].copy()
    for d in range(1, rows.shape[1]):
        result *= rows[:, d]
    return result


def steps(indices: Ints, strides: Ints) -> Ints:
    """Elements int64 [n] from the first to the one at ``indices`` [n, D] of views with ``strides`` [n, D]."""
    result: Ints = indices[:, 0] * strides[:, 0]
    for d in range(1, indices.shape[1]):
        result += indices[:, d] * strides[:, d]
    return result


def solid(sizes: Ints) -> Flags:
    """Which boxes [n] of ``sizes`` [n, D] have any element."""
    result: Flags = sizes[:, 0] > 0
    for d in range(1, sizes.shape[1]):
        result &= sizes[:, d] > 0
    return result


def outside(starts: Ints, sizes: Ints, shapes: Ints) -> Flags:
    """Which boxes [n] are not within tensors of ``shapes`` [n, D], or have a negative start or size."""
    result: Flags = np.zeros(len(starts), dtype=np.bool_)
    for d in range(starts.shape[1]):
        result |= (starts[:, d] < 0) | (sizes[:, d] < 0) | (starts[:, d] + sizes[:, d] > shapes[:, d])
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """Boxes that trainer ranks hold, and where their bytes are.

    ``tensor`` int32 [n] indexes the manifest; ``rank`` int32 is a trainer rank, ``host`` int32 a number for its host;
    ``segment`` int32 indexes that rank's segments and ``offset`` int64 is where in it the box's first element lies, in
    bytes. ``starts``, ``sizes`` int64 [n, D] are the box; ``strides`` int64 [n, D] the elements of storage from one
    index of a dimension to the next; ``dtype`` int16 the shard's own dtype. Empty boxes are allowed and mean nothing.
    """

    tensor: Ints32
    rank: Ints32
    host: Ints32
    segment: Ints32
    offset: Ints
    starts: Ints
    sizes: Ints
    strides: Ints
    dtype: Codes

    def __post_init__(self) -> None:
        _check_columns(self)

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: Rows) -> Self:
        """The rows at ``rows`` (indices or a mask), in that order."""
        return type(self)(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All rows of ``parts``, which must have the same D; at least one part."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)))


@dataclasses.dataclass(frozen=True, eq=False)
class Destinations:
    """Boxes that one worker wants, and where in its parameters they go: one distinct trace.

    ``tensor`` int32 [n] indexes the manifest and ``starts``, ``sizes`` int64 [n, D] are a box of it, in checkpoint
    coordinates. ``parameter`` int32 counts the worker's parameters; ``offset`` int64 is where the box's first element
    goes, in elements from the parameter's first, and ``strides`` int64 [n, D] the elements of the parameter from one
    index of a checkpoint dimension to the next (0 where the size is 1). ``dtype`` int16 is the parameter's.
    That no two destinations share an element of a parameter is the trace's to prove, not the plan's.
    """

    tensor: Ints32
    parameter: Ints32
    starts: Ints
    sizes: Ints
    offset: Ints
    strides: Ints
    dtype: Codes

    def __post_init__(self) -> None:
        _check_columns(self)

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: Rows) -> Self:
        """The rows at ``rows`` (indices or a mask), in that order."""
        return type(self)(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All rows of ``parts``, which must have the same D; at least one part."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)))


@dataclasses.dataclass(frozen=True, eq=False)
class Fleet:
    """All workers of all engines: which of the distinct traces each has, and a number for its host.

    ``trace_of_worker`` and ``host_of_worker`` are int32 [workers]. Host numbers are shared with ``Shards.host``.
    ``parameters`` has for each trace the names of the parameters that its destinations count, for people only; it may
    be empty where nobody knows them.
    """

    traces: tuple[Destinations, ...]
    trace_of_worker: Ints32
    host_of_worker: Ints32
    parameters: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.parameters and len(self.parameters) != len(self.traces):
            raise ValueError(f"{len(self.traces)} traces have {len(self.parameters)} lists of parameters' names")
        if len(self.trace_of_worker) != len(self.host_of_worker):
            raise ValueError(f"{len(self.trace_of_worker)} workers have a trace, {len(self.host_of_worker)} a host")
        if len(self.trace_of_worker) and not (
            int(self.trace_of_worker.min()) >= 0 and int(self.trace_of_worker.max()) < len(self.traces)
        ):
            raise ValueError(f"a worker has a trace that is not one of the {len(self.traces)}")

    def __len__(self) -> int:
        return len(self.trace_of_worker)

    def workers_of(self, trace: int) -> Ints:
        """The workers that have ``trace``."""
        return np.flatnonzero(self.trace_of_worker == trace)


_WIDE = frozenset({"starts", "sizes", "strides"})
_TYPES = {"offset": np.int64, "starts": np.int64, "sizes": np.int64, "strides": np.int64, "dtype": np.int16}


def _check_columns(record: Shards | Destinations) -> None:
    dims = record.starts.shape[-1]
    for field in dataclasses.fields(record):
        column = getattr(record, field.name)
        expected = (len(record.tensor), dims) if field.name in _WIDE else (len(record.tensor),)
        kind = np.dtype(_TYPES.get(field.name, np.int32))
        if column.shape != expected or column.dtype != kind:
            raise ValueError(
                f"{type(record).__name__}.{field.name} is {column.dtype}{list(column.shape)}, "
                f"it must be {kind}{list(expected)}"
            )
