"""Schedules: for each worker, which tensors come with which install and where they lie.

This module knows manifests, rounds and which tensors a worker touches. It must not know handles, sockets or torch. A
schedule is cut from columns that are made once for all workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from rankcast.manifest import Manifest
from rankcast.wire.bodies import Schedule


class Placed(msgspec.Struct, frozen=True):
    """Where every tensor of the manifest lies and when it comes, as columns over the manifest.

    ``segments`` index all segments of all trainer ranks, ``offsets`` are bytes, ``rounds`` count installs from 0.
    """

    rounds: tuple[int, ...]
    segments: tuple[int, ...]
    offsets: tuple[int, ...]
    installs: int


class WorkerSchedule(msgspec.Struct, frozen=True):
    """One worker's schedule, with the segments it refers to (in the order of its own indices) and its totals.

    ``calls`` is how many installs name at least one tensor, ``nbytes_by_round`` the bytes of each.
    """

    schedule: Schedule
    hash: str
    segments: tuple[int, ...]
    tensors: int
    nbytes: int
    calls: int
    nbytes_by_round: tuple[int, ...]


def cut_schedule(manifest: Manifest, placed: Placed, touched: Sequence[int]) -> WorkerSchedule:
    """The schedule of a worker that touches the tensors at ``touched`` (indices into ``manifest``)."""
    picked = np.asarray(sorted(touched), dtype=np.int64)
    rounds = np.asarray(placed.rounds, dtype=np.int64)[picked]
    order = np.argsort(rounds, kind="stable")
    picked, rounds = picked[order], rounds[order]
    used, local = np.unique(np.asarray(placed.segments, dtype=np.int64)[picked], return_inverse=True)
    own = manifest.take(int(i) for i in picked)
    schedule = Schedule(
        names=own.names,
        dtypes=own.dtypes,
        shapes=own.shapes,
        rounds=tuple(rounds.tolist()),
        segments=tuple(local.tolist()),
        offsets=tuple(np.asarray(placed.offsets, dtype=np.int64)[picked].tolist()),
    )
    sizes = np.asarray(own.sizes, dtype=np.int64)
    by_round = np.bincount(rounds, weights=sizes, minlength=placed.installs) if placed.installs else np.zeros(0)
    return WorkerSchedule(
        schedule=schedule,
        hash=hashlib.blake2b(msgspec.json.encode(schedule), digest_size=16).hexdigest(),
        segments=tuple(used.tolist()),
        tensors=len(own),
        nbytes=int(sizes.sum()),
        calls=len(np.unique(rounds)),
        nbytes_by_round=tuple(int(n) for n in by_round),
    )
