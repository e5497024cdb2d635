"""The report that a push returns.

This module knows the fields of a report. It must not know how a push runs.
"""

from __future__ import annotations

import msgspec


class WorkerRow(msgspec.Struct, frozen=True):
    """What one worker got in one push. ``nbytes`` is what it says it was handed, ``calls`` the installs that did it."""

    engine: str
    where: str
    rank: int
    dp: int
    pp: int
    tp: int
    ep: int
    tensors: int
    nbytes: int
    calls: int
    seconds: float


class WayRow(msgspec.Struct, frozen=True):
    """How many tensors went one way (``direct``, ``ranklocal`` or ``broadcast``), and why that way.

    ``nbytes`` is what all workers together were told to read of them.
    """

    way: str
    why: str
    tensors: int
    nbytes: int


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One published push.

    ``transport`` is how the bytes went: ``shm``, ``file``, or ``file+shm``. ``seconds`` is the whole push as this
    trainer rank saw it, ``stage_seconds`` its stages (they overlap). ``nbytes`` is what all workers together say that
    they were handed, ``direct_nbytes`` the part of it that the plan has by route.

    ``worker_calls`` counts installs that carried data, once for each worker that reported to have read any, however
    often a request was repeated on the way. ``control_calls`` counts all other calls that reach workers, once for each
    worker: claim, start, prepare, installs that carry nothing for it, finish, release, and the init of workers that are
    met again.
    ``engine_calls`` counts calls that an engine answers by itself: pause, resume, version and cache, and the question
    whether it is paused. ``requests`` and ``request_bytes`` are the HTTP requests to the engines for all of these.

    ``ignored`` lists tensors that every worker passes over on purpose, such as a tied head; ``untouched`` persistent
    buffers of workers that no tensor fills, and that keep what they have. ``ways`` says how many tensors and bytes went
    which way and why. ``direct_tensors`` counts those that workers copied from where they lie; ``cast_tensors`` those
    of them that have another dtype at a worker, which casts while it copies, and ``cast_nbytes`` what was read of
    these. ``through_loader`` says of others why not, with how many for each reason, where that was tried.
    """

    weight_version: str
    mode: str
    transport: str
    seconds: float
    stage_seconds: dict[str, float]
    rounds: int
    tensors: int
    nbytes: int
    staged_bytes: int
    worker_calls: int
    control_calls: int
    engine_calls: int
    requests: int
    request_bytes: int
    ignored: tuple[str, ...]
    untouched: tuple[str, ...]
    direct_tensors: int
    direct_nbytes: int
    cast_tensors: int
    cast_nbytes: int
    through_loader: dict[str, int]
    ways: tuple[WayRow, ...]
    workers: tuple[WorkerRow, ...]
