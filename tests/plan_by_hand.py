"""Routes carried out in numpy, on memory that tests lay out themselves.

It knows strided views, segments and parameters as plain arrays. It knows nothing of how routes are found, and says
nothing about what a worker must hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankcast.geometry import contiguous_strides
from rankcast.manifest import Manifest
from rankcast.plan.columns import DTYPE_NAMES, Destinations, Fleet, Shards, dimensions, dtype_codes
from rankcast.plan.rows import WorkerRoutes

Array = np.ndarray[Any, Any]
Segments = dict[tuple[int, int], Array]


def numpy_dtype(code: int) -> np.dtype[Any]:
    """Integers of the same width for floats: they are moved as bits, and never cast in these tests."""
    name = DTYPE_NAMES[code]
    return np.dtype({"bfloat16": "uint16", "float16": "uint16", "float32": "uint32"}.get(name, name))


def padded(values: Sequence[int], dims: int, padding: int) -> list[int]:
    return [*values, *[padding] * (dims - len(values))]


def carry_out(rows: WorkerRoutes, segments: Segments, parameters: Sequence[Array]) -> list[Array]:
    """Copy every row into ``parameters`` (flat arrays); returns how often each of their elements was written."""
    written = [np.zeros(parameter.shape, dtype=np.int64) for parameter in parameters]
    to, whence = rows.targets, rows.origins
    for i in range(len(rows)):
        sizes = tuple(to.sizes[i].tolist())
        segment = segments[int(whence.rank[i]), int(whence.segment[i])]
        dtype = numpy_dtype(int(whence.dtype[i]))
        source = view(segment[int(whence.offset[i]) :], dtype, sizes, whence.strides[i].tolist())
        target = parameters[int(to.parameter[i])]
        assert target.dtype == numpy_dtype(int(to.dtype[i]))
        for array, value in ((target, source), (written[int(to.parameter[i])], None)):
            into = view(array.view(np.uint8)[int(to.offset[i]) * array.itemsize :], array.dtype, sizes, to.strides[i])
            if value is None:
                into += 1
            else:
                into[...] = value
    return written


def view(memory: Array, dtype: np.dtype[Any], sizes: Sequence[int], strides: Sequence[int]) -> Array:
    """A strided view of bytes; fails when it would leave them."""
    last = sum((size - 1) * int(stride) for size, stride in zip(sizes, strides, strict=True))
    assert memory.dtype == np.uint8
    assert (last + 1) * dtype.itemsize <= len(memory), "a row reaches beyond its memory"
    flat = memory[: (last + 1) * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(flat, sizes, [int(stride) * dtype.itemsize for stride in strides])


def filled(shards: Shards, tensors: Mapping[int, Array]) -> Segments:
    """Every rank's segments, with the shards' elements where the columns say; the rest is 0xAA.

    ``tensors`` are the full tensors by index, with as many dimensions as they have.
    """
    sizes: dict[tuple[int, int], int] = {}
    for i in range(len(shards)):
        if (shards.sizes[i] == 0).any():
            continue
        last = int(((shards.sizes[i] - 1) * shards.strides[i]).sum())
        end = int(shards.offset[i]) + (last + 1) * numpy_dtype(int(shards.dtype[i])).itemsize
        key = (int(shards.rank[i]), int(shards.segment[i]))
        sizes[key] = max(sizes.get(key, 0), end)
    segments = {key: np.full(size, 0xAA, dtype=np.uint8) for key, size in sizes.items()}
    for i in range(len(shards)):
        if (shards.sizes[i] == 0).any():
            continue
        memory = segments[int(shards.rank[i]), int(shards.segment[i])][int(shards.offset[i]) :]
        into = view(memory, numpy_dtype(int(shards.dtype[i])), shards.sizes[i].tolist(), shards.strides[i].tolist())
        into[...] = box_of(tensors[int(shards.tensor[i])], shards.starts[i], shards.sizes[i])
    return segments


def box_of(tensor: Array, starts: Array, sizes: Array) -> Array:
    """The box of a tensor, with the columns' number of dimensions."""
    wide = tensor.reshape(padded(tensor.shape, len(starts), 1))
    return wide[tuple(slice(int(s), int(s + n)) for s, n in zip(starts, sizes, strict=True))]


def shards_of(rows: Sequence[Mapping[str, Any]], dims: int) -> Shards:
    """Columns from rows: tensor, rank, box (starts, sizes), dtype, and host, segment, offset, strides where given."""

    def column(name: str, default: int, kind: type) -> Array:
        return np.array([row.get(name, default) for row in rows], dtype=kind)

    def wide(values: Sequence[Sequence[int]], padding: int) -> Array:
        return np.array([padded(each, dims, padding) for each in values], dtype=np.int64).reshape(-1, dims)

    strides = [row.get("strides", contiguous_strides(row["sizes"])) for row in rows]
    return Shards(
        column("tensor", 0, np.int32),
        column("rank", 0, np.int32),
        column("host", 0, np.int32),
        column("segment", 0, np.int32),
        column("offset", 0, np.int64),
        wide([row["starts"] for row in rows], 0),
        wide([row["sizes"] for row in rows], 1),
        wide(strides, 0),
        dtype_codes(row["dtype"] for row in rows),
    )


def destinations_by_hand(rows: Sequence[Mapping[str, Any]], dims: int) -> Destinations:
    """Columns from rows: tensor, parameter, box (starts, sizes), offset, strides, dtype."""

    def wide(name: str, padding: int) -> Array:
        return np.array([padded(row[name], dims, padding) for row in rows], dtype=np.int64).reshape(-1, dims)

    sizes = wide("sizes", 1)
    return Destinations(
        np.array([row["tensor"] for row in rows], dtype=np.int32),
        np.array([row["parameter"] for row in rows], dtype=np.int32),
        wide("starts", 0),
        sizes,
        np.array([row["offset"] for row in rows], dtype=np.int64),
        np.where(sizes == 1, 0, wide("strides", 0)),
        dtype_codes(row["dtype"] for row in rows),
    )


def whole_tensors(shapes: list[tuple[int, ...]], dtype: str = "int16") -> Manifest:
    """Tensors t0, t1, ... of these shapes."""
    return Manifest(tuple(f"t{i}" for i in range(len(shapes))), (dtype,) * len(shapes), tuple(shapes))


def wanting_all(manifest: Manifest, workers: int, hosts: list[int] | None = None) -> Fleet:
    """Workers that each want every tensor whole; without ``hosts``, on a host of no trainer rank."""
    dims = dimensions(manifest)
    rows = []
    for index, shape in enumerate(manifest.shapes):
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        box = {"starts": [0] * len(shape), "sizes": shape, "strides": strides, "offset": 0}
        rows.append({"tensor": index, "parameter": index, **box, "dtype": manifest.dtypes[index]})
    on = np.array(hosts or [99] * workers, dtype=np.int32)
    return Fleet((destinations_by_hand(rows, dims),), np.zeros(workers, dtype=np.int32), on)


def held_whole(manifest: Manifest, ranks: list[list[int]], hosts: list[int] | None = None) -> Shards:
    """Each tensor whole on each of its ``ranks``; ``hosts`` by rank."""
    rows = []
    for index, (shape, holders) in enumerate(zip(manifest.shapes, ranks, strict=True)):
        for rank in holders:
            row = {"tensor": index, "rank": rank, "starts": [0] * len(shape), "sizes": shape}
            rows.append({**row, "dtype": manifest.dtypes[index], "host": hosts[rank] if hosts else 0})
    return shards_of(rows, dimensions(manifest))
