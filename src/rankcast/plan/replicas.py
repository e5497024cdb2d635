"""Which of several equal shards each worker reads: near ones first, and every holder about equally much.

This module knows who holds what, on which host, and how many bytes each read is. It must not know boxes. Every process
that plans from the same columns chooses alike: all arithmetic is on integers, and ties go to the lower rank.
"""

from __future__ import annotations

import heapq

import numpy as np

from rankcast.plan.columns import Flags, Fleet, Ints, Ints32
from rankcast.plan.crossings import Crossings
from rankcast.plan.pieces import Pieces

#: Reads of more than one part in so many of a holder's fair share are dealt out one by one, largest first; the others
#: then fill what is left, and put no holder further from its share than one of them is long.
LARGE = 50


def choose_replicas(pieces: Pieces, crossings: Crossings, fleet: Fleet, nbytes: Ints) -> tuple[Ints32, Ints]:
    """The shard that each route reads, and where each worker's routes begin.

    ``nbytes`` int64 is what a read of each crossing moves. Returns int32 [routes], rows of ``pieces.shards``, worker by
    worker and within one in the order of its trace's crossings; and int64 [workers + 1], the bounds.
    """
    lengths = np.diff(crossings.first)[fleet.trace_of_worker]
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    starts = crossings.first[:-1][fleet.trace_of_worker]
    only = pieces.first.astype(np.int32)[crossings.piece]
    chosen = np.empty(int(bounds[-1]), dtype=np.int32)
    loads = np.zeros(int(pieces.shards.rank.max(initial=-1)) + 1, dtype=np.int64)
    rank_of_single = pieces.shards.rank[only]
    shared = pieces.count[crossings.piece] > 1
    times = np.bincount(fleet.trace_of_worker, minlength=len(fleet.traces))
    reads = np.repeat(times, np.diff(crossings.first)) * nbytes
    np.add.at(loads, rank_of_single[~shared], reads[~shared])
    for worker, start in enumerate(starts.tolist()):
        begin, end = int(bounds[worker]), int(bounds[worker + 1])
        chosen[begin:end] = only[start : start + end - begin]
    if shared.any() and len(fleet):
        _spread_shared(pieces, crossings, fleet, nbytes, shared, chosen, bounds, loads)
    return chosen, bounds


def _spread_shared(
    pieces: Pieces,
    crossings: Crossings,
    fleet: Fleet,
    nbytes: Ints,
    shared: Flags,
    chosen: Ints32,
    bounds: Ints,
    loads: Ints,
) -> None:
    """Choose for the routes that have a choice; changes ``chosen`` and ``loads``."""
    sets, set_of_piece = _holder_sets(pieces)
    hosts = np.zeros(len(loads), dtype=np.int64)
    hosts[pieces.shards.rank] = pieces.shards.host
    groups, group_of = _groups(sets, hosts, fleet)
    # One row for each read that has a choice, worker by worker.
    rows, routes, keys = [], [], []
    own = [np.flatnonzero(shared[crossings.of(trace)]) for trace in range(len(fleet.traces))]
    group_rows = [set_of_piece[crossings.piece[crossings.of(t)][own[t]]] for t in range(len(fleet.traces))]
    for worker, trace in enumerate(fleet.trace_of_worker.tolist()):
        rows.append(own[trace] + int(crossings.first[trace]))
        routes.append(own[trace] + int(bounds[worker]))
        keys.append(group_of.groups(group_rows[trace], int(fleet.host_of_worker[worker])))
    row, route, key = np.concatenate(rows), np.concatenate(routes), np.concatenate(keys)
    order = np.argsort(key.astype(np.uint16) if len(groups) < 2**16 else key, kind="stable")
    ends = np.cumsum(np.bincount(key, minlength=len(groups)))
    first_shard = pieces.first[crossings.piece]
    # Who has the fewest to choose from goes first; the rest then evens out what that left.
    for group in sorted(range(len(groups)), key=lambda g: (len(groups[g][1]), g)):
        members, places = groups[group]
        mine = order[ends[group - 1] if group else 0 : ends[group]]
        if not len(mine):
            continue
        picked = _spread(nbytes[row[mine]], loads[members[places]])
        chosen[route[mine]] = first_shard[row[mine]] + places[picked]
        np.add.at(loads, members[places[picked]], nbytes[row[mine]])


def _holder_sets(pieces: Pieces) -> tuple[list[Ints], Ints]:
    """The distinct sets of ranks that hold a piece together, and which of them each piece has (-1: a single rank)."""
    sets: list[Ints] = []
    set_of_piece = np.full(len(pieces.first), -1, dtype=np.int64)
    for count in np.unique(pieces.count[pieces.count > 1]).tolist():
        which = np.flatnonzero(pieces.count == count)
        ranks = pieces.shards.rank[pieces.first[which][:, None] + np.arange(count)]
        distinct, inverse = np.unique(ranks, axis=0, return_inverse=True)
        set_of_piece[which] = len(sets) + inverse.reshape(-1)
        sets += list(distinct.astype(np.int64))
    return sets, set_of_piece


class _HostColumns:
    """For each set of holders and each host, the number of the group that reads of it from that host belong to."""

    def __init__(self, table: Ints, column_of: dict[int, int]) -> None:
        self._table = table
        self._column_of = column_of

    def groups(self, sets: Ints, host: int) -> Ints:
        column: Ints = self._table[sets, self._column_of.get(host, 0)]
        return column


def _groups(sets: list[Ints], hosts: Ints, fleet: Fleet) -> tuple[list[tuple[Ints, Ints]], _HostColumns]:
    """Groups of reads that have the same holders to choose from, each with a set's ranks and the places allowed in it.

    A worker on the host of some of the holders may choose only among those.
    """
    groups = [(members, np.arange(len(members))) for members in sets]
    near = sorted(set(np.unique(fleet.host_of_worker).tolist()) & set(np.unique(hosts).tolist()))
    column_of = {host: column for column, host in enumerate(near, 1)}
    table = np.repeat(np.arange(len(sets))[:, None], len(near) + 1, axis=1)
    for number, members in enumerate(sets):
        on = hosts[members]
        for host in np.unique(on).tolist():
            if host in column_of and (on != host).any():
                table[number, column_of[host]] = len(groups)
                groups.append((members, np.flatnonzero(on == host)))
    return groups, _HostColumns(table, column_of)


def _spread(nbytes: Ints, loads: Ints) -> Ints:
    """Which of the holders, who carry ``loads`` already, takes each read, so that all end about equally loaded."""
    picked = np.zeros(len(nbytes), dtype=np.int64)
    if len(loads) == 1:
        return picked
    loads = loads.copy()
    large = nbytes * LARGE > int(nbytes.sum()) // len(loads)
    if large.any():
        where = np.flatnonzero(large)
        where = where[np.argsort(-nbytes[where], kind="stable")]
        heap = [(load, place) for place, load in enumerate(loads.tolist())]
        heapq.heapify(heap)
        for read, size in zip(where.tolist(), nbytes[where].tolist(), strict=True):
            load, place = heap[0]
            picked[read] = place
            heapq.heapreplace(heap, (load + size, place))
        for load, place in heap:
            loads[place] = load
    small = np.flatnonzero(~large)
    if len(small):
        # In the order of workers, so that each worker reads from few holders.
        sizes = nbytes[small]
        ends = np.cumsum(_room(loads, int(sizes.sum())))
        middles = np.cumsum(sizes) - sizes // 2 - 1
        picked[small] = np.minimum(np.searchsorted(ends, middles, side="right"), len(loads) - 1)
    return picked


def _room(loads: Ints, more: int) -> Ints:
    """How much each holder takes of ``more`` so that the least loaded come up to one level; sums to ``more`` or above.

    As water finds its level: only those below it take any.
    """
    ordered = np.sort(loads)
    counts = np.arange(1, len(loads) + 1)
    # With the k lowest taking it all the level is their mean; right is the last k whose level reaches its k-th.
    levels = -(-(np.cumsum(ordered) + more) // counts)
    right = int(np.flatnonzero(levels >= ordered)[-1])
    room: Ints = np.maximum(int(levels[right]) - loads, 0)
    return room
