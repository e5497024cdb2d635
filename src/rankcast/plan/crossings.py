"""Where destinations and pieces meet: every route but for the choice of a replica, and the proof that nothing lacks.

This module knows boxes. It must not know ranks, replicas or hosts: workers of one distinct trace share its crossings.
Work is done on columns; nothing here loops over tensors or routes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rankcast.errors import ManifestError
from rankcast.manifest import Manifest, listed
from rankcast.plan.columns import Destinations, Fleet, Ints, outside, product, solid
from rankcast.plan.pieces import Pieces


@dataclasses.dataclass(frozen=True, eq=False)
class Crossings:
    """The common boxes of destinations and pieces, in the order of destinations, trace by trace.

    ``destination`` int64 [n] indexes ``destinations``, which are those of all traces one after another; ``piece`` int64
    indexes the pieces. ``starts``, ``sizes`` int64 [n, D]; ``volume`` int64 is their number of elements. The crossings
    of trace t are rows ``first[t]`` to ``first[t + 1]``.
    """

    destinations: Destinations
    destination: Ints
    piece: Ints
    starts: Ints
    sizes: Ints
    volume: Ints
    first: Ints

    def of(self, trace: int) -> slice:
        """The rows of one trace."""
        return slice(int(self.first[trace]), int(self.first[trace + 1]))


def cross(manifest: Manifest, shapes: Ints, pieces: Pieces, fleet: Fleet) -> Crossings:
    """Intersect every destination with the pieces of its tensor, and prove that they fill it exactly once.

    Pieces are disjoint, so a destination is filled exactly once when the volumes of its crossings add up to its own.
    Raises ``ManifestError`` naming the tensors (the first ten, and how many) of which a destination lacks elements, and
    for a destination that is outside its tensor.
    """
    traces = [_solid(trace) for trace in fleet.traces]
    bounds = np.cumsum([0, *map(len, traces)])
    wanted = Destinations.joined(traces) if traces else _nothing(shapes.shape[1])
    _check(manifest, shapes, wanted)
    begin, end = _candidates(pieces, wanted, shapes)
    counts = np.maximum(end - begin, 0)
    destination = np.repeat(np.arange(len(wanted)), counts)
    piece = np.arange(len(destination)) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
    low, high = wanted.starts[destination], pieces.starts[piece]
    starts = np.maximum(low, high)
    sizes = np.minimum(low + wanted.sizes[destination], high + pieces.sizes[piece]) - starts
    meet = solid(sizes)
    if not bool(meet.all()):
        destination, piece, starts, sizes = destination[meet], piece[meet], starts[meet], sizes[meet]
    volume = product(sizes)
    _prove(manifest, fleet, bounds, wanted, destination, volume)
    first = np.searchsorted(destination, bounds)
    return Crossings(wanted, destination, piece, starts, sizes, volume, first)


def _solid(trace: Destinations) -> Destinations:
    some = solid(trace.sizes)
    return trace if bool(some.all()) else trace.take(some)


def _nothing(dims: int) -> Destinations:
    one, wide = np.zeros(0, dtype=np.int32), np.zeros((0, dims), dtype=np.int64)
    return Destinations(one, one, wide, wide, np.zeros(0, np.int64), wide, np.zeros(0, np.int16))


def _check(manifest: Manifest, shapes: Ints, wanted: Destinations) -> None:
    if not len(wanted):
        return
    if int(wanted.tensor.min()) < 0 or int(wanted.tensor.max()) >= len(manifest):
        raise ManifestError(f"a destination is of tensor {int(wanted.tensor.max())}, the manifest has {len(manifest)}")
    if wanted.starts.shape[1] != shapes.shape[1]:
        raise ManifestError(f"destinations have {wanted.starts.shape[1]} dimensions, the manifest {shapes.shape[1]}")
    bad = outside(wanted.starts, wanted.sizes, shapes[wanted.tensor])
    if bad.any():
        names = _names(manifest, wanted.tensor[bad])
        raise ManifestError(
            f"workers want boxes outside of {listed(names)}: their traces were taken with another manifest than the "
            "one that is planned; connect again",
            tensor=names[0],
        )


def _candidates(pieces: Pieces, wanted: Destinations, shapes: Ints) -> tuple[Ints, Ints]:
    """For each destination the range of pieces that can meet it: those near it in the leading dimension.

    A tensor's pieces are sorted there by start, and by end too, since intervals are equal or apart. Tensor and start
    make one number, so one binary search serves all tensors.
    """
    width = int(shapes.max(initial=0)) + 1
    lead = pieces.lead[pieces.tensor]
    rows = np.arange(len(pieces.tensor))
    start = pieces.starts[rows, np.maximum(lead, 0)]
    key = pieces.tensor.astype(np.int64) * width
    ends = key + start + pieces.sizes[rows, np.maximum(lead, 0)]
    starts = key + start
    own = pieces.lead[wanted.tensor]
    rows = np.arange(len(wanted))
    low = wanted.starts[rows, np.maximum(own, 0)]
    tensor = wanted.tensor.astype(np.int64)
    key = tensor * width
    begin = np.searchsorted(ends, key + low, side="right")
    end = np.searchsorted(starts, key + low + wanted.sizes[rows, np.maximum(own, 0)], side="left")
    odd = own < 0
    if odd.any():
        begin[odd] = np.searchsorted(pieces.tensor, tensor[odd], side="left")
        end[odd] = np.searchsorted(pieces.tensor, tensor[odd], side="right")
    return begin, end


def _prove(
    manifest: Manifest, fleet: Fleet, bounds: Ints, wanted: Destinations, destination: Ints, volume: Ints
) -> None:
    needed = product(wanted.sizes)
    covered = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(covered, destination, volume)
    short = np.flatnonzero(covered != needed)
    if not len(short):
        return
    row = int(short[0])
    names = _names(manifest, wanted.tensor[short])
    trace = int(np.searchsorted(bounds, row, side="right")) - 1
    workers = fleet.workers_of(trace)
    who = f"worker {int(workers[0])}" if len(workers) else "a worker"
    meta = manifest.row(int(wanted.tensor[row]))
    pairs = list(zip(wanted.starts[row].tolist(), wanted.sizes[row].tolist(), strict=True))[: len(meta.shape)]
    box = "[" + ", ".join(f"{start}:{start + size}" for start, size in pairs) + "]"
    raise ManifestError(
        f"the trainer ranks' shards leave parts of tensors out that workers want: {listed(names)}. First, {who} wants "
        f"{box} of {meta}, {int(needed[row]):,} elements, and the shards hold {int(covered[row]):,} of them: some "
        "trainer rank must hold, or declare, the rest",
        tensor=names[0],
    )


def _names(manifest: Manifest, tensors: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[str]:
    return [manifest.names[tensor] for tensor in np.unique(tensors).tolist()]
