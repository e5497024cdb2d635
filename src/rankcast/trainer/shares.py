"""Shares: what each worker is told in prepare, and what it will read, in whichever way.

This module knows schedules, plans and handles. It must not know sessions, sockets or torch. A share is cut once and
kept until what it was cut from changes, so that a push in the steady state names it by its hash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rankcast.manifest import Manifest
from rankcast.plan.columns import DTYPE_NAMES, ITEM_BYTES
from rankcast.plan.rows import WorkerRoutes
from rankcast.plan.schedule import Placed, cut_schedule
from rankcast.wire.bodies import Program, Schedule
from rankcast.wire.handles import Handle
from rankcast.wire.plan_digest import plan_digest


@dataclasses.dataclass(frozen=True)
class Share:
    """One worker's part of a session.

    ``nbytes_by_install`` has the bytes of each install, the copy program's first where there is one; ``tensors`` is
    how many tensors come in either way.
    """

    hash: str
    schedule: Schedule
    program: Program | None
    handles: tuple[Handle, ...]
    tensors: int
    nbytes_by_install: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_by_install)


@dataclasses.dataclass(frozen=True)
class Routes:
    """One worker's routes, with what their numbers mean: its parameters' names, and each trainer rank's segments."""

    rows: WorkerRoutes
    parameters: Sequence[str]
    handles: Sequence[Sequence[Handle]]


def cut_share(
    rest: Manifest, placed: Placed, staged: Sequence[Handle], touched: Sequence[int], routes: Routes | None
) -> Share:
    """The share of one worker: the tensors at ``touched`` of ``rest`` by schedule, and ``routes`` by program.

    ``placed`` and ``staged`` say where the tensors of ``rest`` lie.
    """
    cut = cut_schedule(rest, placed, touched)
    handles = [staged[i] for i in cut.segments]
    program, tensors = None, 0
    moved: tuple[int, ...] = ()
    if routes is not None:
        program, own, nbytes, tensors = _program(routes, len(handles))
        handles += own
        moved = (nbytes,)
    return Share(
        hash=plan_digest(cut.schedule, program, handles),
        schedule=cut.schedule,
        program=program,
        handles=tuple(handles),
        tensors=cut.tensors + tensors,
        nbytes_by_install=(*moved, *cut.nbytes_by_round),
    )


def _program(routes: Routes, base: int) -> tuple[Program, list[Handle], int, int]:
    """The program, its handles (numbered from ``base``), the bytes that it reads, and of how many tensors."""
    targets, origins = routes.rows.targets, routes.rows.origins
    pairs = np.stack([origins.rank, origins.segment], axis=1)
    used, first, local = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    # In the order in which this worker's own rows come to them: a segment that others read must not number these anew.
    order = np.argsort(first)
    used, local = used[order], np.argsort(order)[local.reshape(-1)]
    parameters, at = np.unique(targets.parameter, return_inverse=True)
    volume = targets.sizes.prod(axis=1)
    program = Program(
        parameters=tuple(routes.parameters[i] for i in parameters.tolist()),
        destinations=tuple(at.reshape(-1).tolist()),
        offsets=tuple(targets.offset.tolist()),
        strides=tuple(map(tuple, targets.strides.tolist())),
        sizes=tuple(map(tuple, targets.sizes.tolist())),
        segments=tuple((local + base).tolist()),
        addresses=tuple(origins.offset.tolist()),
        source_strides=tuple(map(tuple, origins.strides.tolist())),
        dtypes=tuple(DTYPE_NAMES[code] for code in origins.dtype.tolist()),
    )
    own = [routes.handles[rank][segment] for rank, segment in used.tolist()]
    return program, own, int((volume * ITEM_BYTES[origins.dtype]).sum()), len(np.unique(targets.tensor))
