"""What a worker would read of one rank's exported shards: segments opened by handle, boxes assembled as bits.

It knows columns and segments; it must not know sources.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from rankcast.manifest import DTYPES, Manifest
from rankcast.trainer.sources import RankShards
from rankcast.transports.file import OpenedFile
from rankcast.transports.shm import open_handle
from rankcast.wire.handles import FileHandle

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's elements as integers, in its shape."""
    # A copy, because torch never lets a storage move again of which numpy had a view.
    raw = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()
    return raw.view(WIDTHS[tensor.element_size()]).reshape(tuple(tensor.shape))


def boxes(rows: RankShards) -> list[tuple[int, tuple[slice, ...], np.ndarray]]:
    """(tensor, where in the whole tensor, bits) of each shard, read through its handle."""
    memory = []
    for handle in rows.handles:
        if isinstance(handle, FileHandle):
            with OpenedFile(handle) as file:
                memory.append(file.tensor("uint8", (handle.size,), 0).numpy())
        else:
            with open_handle(handle) as segment:
                memory.append(segment.tensor("uint8", (handle.size,), 0).numpy())
    found = []
    columns = (rows.tensors, rows.starts, rows.sizes, rows.segments, rows.offsets, rows.strides, rows.dtypes)
    for tensor, start, size, segment, offset, strides, dtype in zip(*columns, strict=True):
        width = DTYPES[dtype]
        last = offset + width * (1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True)))
        assert last <= len(memory[segment])
        view = np.ndarray(
            size, WIDTHS[width], memory[segment][offset:last].tobytes(), 0, [width * stride for stride in strides]
        )
        found.append((tensor, tuple(slice(a, a + n) for a, n in zip(start, size, strict=True)), view))
    return found


def assembled(ranks: Iterable[tuple[Manifest, RankShards]]) -> dict[str, np.ndarray]:
    """Whole tensors as bits, from all ranks' shards; fails unless each element is there, and replicas agree."""
    whole: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for manifest, rows in ranks:
        for tensor, where, view in boxes(rows):
            meta = manifest.row(tensor)
            into = whole.setdefault(meta.name, np.zeros(meta.shape, view.dtype))
            counts = seen.setdefault(meta.name, np.zeros(meta.shape, np.int64))
            assert (into[where] == view)[counts[where] > 0].all(), f"replicas of {meta.name} differ"
            into[where] = view
            counts[where] += 1
    for name, counts in seen.items():
        assert (counts > 0).all(), f"{name} has elements that no rank holds"
    return whole
