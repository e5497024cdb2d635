"""The plan: all routes of a sync, from what trainer ranks hold and what workers want.

This module joins the steps (pieces, crossings, replicas) and gives each worker its rows. It must not know where shards
and traces come from, torch, or how bytes move. What the workers of one distinct trace share is worked out once; for
each worker there is only which replica it reads.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import msgspec
import numpy as np

from rankcast.manifest import Manifest
from rankcast.plan import explain
from rankcast.plan.columns import ITEM_BYTES, Flags, Fleet, Ints, Ints32, Shards, shape_columns, steps
from rankcast.plan.crossings import Crossings, cross
from rankcast.plan.pieces import Pieces, pieces_of
from rankcast.plan.replicas import choose_replicas
from rankcast.plan.rows import Origins, Targets, WorkerRoutes, rows_digest


def make_plan(manifest: Manifest, shards: Shards, fleet: Fleet) -> Plan:
    """Intersect ``shards`` and the fleet's destinations, prove coverage, and choose replicas.

    A replica on the worker's host is preferred; beyond that, holders of equal shards send equally much, but for less
    than 5% or one read. Deterministic, and independent of the order of ``shards``.

    Raises ``ManifestError`` naming the tensors when a worker wants an element that no trainer rank holds, and for a
    shard or destination that contradicts the manifest; ``UnsupportedError`` for a tensor whose shards overlap in too
    many ways.
    """
    shapes = shape_columns(manifest)
    pieces = pieces_of(manifest, shapes, shards)
    crossings = cross(manifest, shapes, pieces, fleet)
    # All shards of a tensor have one dtype, so what a read moves does not depend on the replica.
    nbytes = crossings.volume * ITEM_BYTES[pieces.shards.dtype[pieces.first[crossings.piece]]]
    chosen, bounds = choose_replicas(pieces, crossings, fleet, nbytes)
    return Plan(manifest, fleet, pieces, crossings, nbytes, chosen, bounds)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All routes of a sync. Made by ``make_plan``.

    ``chosen`` int32 [routes] is the row of ``pieces.shards`` that each route reads, worker by worker (``bounds`` int64
    [workers + 1]); within a worker routes have the order of its trace's crossings. ``nbytes`` int64 is what a read of
    each crossing moves out of a trainer rank.
    """

    manifest: Manifest
    fleet: Fleet
    pieces: Pieces
    crossings: Crossings
    nbytes: Ints
    chosen: Ints32
    bounds: Ints

    @property
    def routes(self) -> int:
        """How many routes there are, over all workers."""
        return len(self.chosen)

    def routes_of(self, worker: int) -> int:
        return int(self.bounds[worker + 1] - self.bounds[worker])

    def for_worker(self, worker: int) -> WorkerRoutes:
        """The rows of one worker, which is all that it is ever sent."""
        return WorkerRoutes(self._targets[int(self.fleet.trace_of_worker[worker])], self._origins(worker))

    def moved(self, shards: Shards) -> Plan | None:
        """This plan with its shards where ``shards`` says; ``None`` when these are other boxes, or other ranks'.

        It equals what ``make_plan`` would make of ``shards``. Which boxes meet and who reads which replica does not
        depend on where bytes lie, so neither is worked out, nor coverage proved, again.
        """
        pieces = pieces_of(self.manifest, shape_columns(self.manifest), shards)
        if not pieces.same_boxes(self.pieces):
            return None
        found = dataclasses.replace(self, pieces=pieces)
        # What is about destinations only is the same, and was perhaps most of the work.
        for name in ("_targets", "sender_bytes", "worker_bytes", "casts"):
            if name in self.__dict__:
                found.__dict__[name] = self.__dict__[name]
        return found

    def reads(self, worker: int, rows: Flags) -> bool:
        """Whether ``worker`` reads any of the shards at ``rows``, a flag for each row of ``pieces.shards``."""
        return bool(rows[self._chosen_by(worker)].any())

    @functools.cached_property
    def hash(self) -> str:
        """32 hex digits: of the manifest, and of every worker's hash in order. Each worker can check its own part."""
        shared = [targets.digest for targets in self._targets]
        state = hashlib.blake2b(msgspec.msgpack.encode([len(self.fleet), self.manifest]), digest_size=16)
        for worker, trace in enumerate(self.fleet.trace_of_worker.tolist()):
            state.update(rows_digest(shared[trace], self._origins(worker).digest))
        return state.hexdigest()

    @functools.cached_property
    def sender_bytes(self) -> Ints:
        """int64 [trainer ranks, up to the last that holds anything]: what workers read out of each rank."""
        sent = np.zeros(int(self.pieces.shards.rank.max(initial=-1)) + 1, dtype=np.int64)
        for worker, trace in enumerate(self.fleet.trace_of_worker.tolist()):
            ranks = self.pieces.shards.rank[self._chosen_by(worker)]
            sent += _sums(ranks, self.nbytes[self.crossings.of(trace)], len(sent))
        return sent

    @functools.cached_property
    def worker_bytes(self) -> Ints:
        """int64 [workers]: what each worker reads, in the shards' dtypes."""
        of_trace = [int(self.nbytes[self.crossings.of(trace)].sum()) for trace in range(len(self.fleet.traces))]
        return np.array(of_trace, dtype=np.int64)[self.fleet.trace_of_worker]

    @functools.cached_property
    def casts(self) -> tuple[int, int]:
        """How many tensors have another dtype at some worker than at their shards, and what is read of these.

        The bytes are of all workers together, in the shards' dtypes.
        """
        crossings = self.crossings
        held = self.pieces.shards.dtype[self.pieces.first[crossings.piece]]
        casts = held != crossings.destinations.dtype[crossings.destination]
        tensors = np.unique(crossings.destinations.tensor[crossings.destination[casts]])
        cast_bytes = self.nbytes * casts
        of_trace = [int(cast_bytes[crossings.of(trace)].sum()) for trace in range(len(self.fleet.traces))]
        return len(tensors), sum(of_trace[trace] for trace in self.fleet.trace_of_worker.tolist())

    def explain(self, name: str | None = None) -> str:
        """For people: who holds the tensor ``name``, who reads what of it from whom; without a name, a summary.

        Raises ``ManifestError`` for a name that the manifest does not have.
        """
        return explain.summary(self) if name is None else explain.tensor(self, name)

    def to_json(self) -> dict[str, Any]:
        """A summary as plain values: counts and bytes, not routes."""
        return {
            "hash": self.hash,
            "tensors": len(self.manifest),
            "pieces": len(self.pieces.tensor),
            "shards": len(self.pieces.shards),
            "trainer_ranks": len(self.sender_bytes),
            "workers": len(self.fleet),
            "traces": len(self.fleet.traces),
            "routes": self.routes,
            "bytes": int(self.worker_bytes.sum()),
            "sender_bytes": self.sender_bytes.tolist(),
            "worker_bytes": self.worker_bytes.tolist(),
        }

    def _chosen_by(self, worker: int) -> Ints32:
        return self.chosen[int(self.bounds[worker]) : int(self.bounds[worker + 1])]

    @functools.cached_property
    def _moved(self) -> tuple[Ints, Flags]:
        """Indices from the first of each crossing's piece to its own; and where a crossing has more than one index."""
        return self.crossings.starts - self.pieces.starts[self.crossings.piece], self.crossings.sizes > 1

    @functools.cached_property
    def _targets(self) -> list[Targets]:
        """The destination's half of the rows of each distinct trace."""
        wanted, crossings = self.crossings.destinations, self.crossings
        found = []
        for trace in range(len(self.fleet.traces)):
            own = crossings.of(trace)
            rows = crossings.destination[own]
            sizes = np.ascontiguousarray(crossings.sizes[own])
            strides = wanted.strides[rows]
            offset = wanted.offset[rows] + steps(crossings.starts[own] - wanted.starts[rows], strides)
            strides *= sizes > 1
            found.append(
                Targets(wanted.tensor[rows], wanted.parameter[rows], offset, strides, wanted.dtype[rows], sizes)
            )
        return found

    def _origins(self, worker: int) -> Origins:
        """The shard's half of a worker's rows."""
        own = self.crossings.of(int(self.fleet.trace_of_worker[worker]))
        # Taken once and by native indices: a large fleet's hash is mostly this.
        rows, shards = self._chosen_by(worker).astype(np.intp), self.pieces.shards
        strides, dtype = shards.strides.take(rows, axis=0), shards.dtype.take(rows)
        moved, wide = self._moved
        offset = shards.offset.take(rows) + steps(moved[own], strides) * ITEM_BYTES.take(dtype)
        strides *= wide[own]
        return Origins(shards.rank.take(rows), shards.segment.take(rows), offset, strides, dtype)


def _sums(keys: Ints32, values: Ints, length: int) -> Ints:
    """Sums of ``values`` for each key; exact, as one worker's bytes are far below 2**53."""
    sums: Ints = np.bincount(keys, weights=values, minlength=length).astype(np.int64)
    return sums
