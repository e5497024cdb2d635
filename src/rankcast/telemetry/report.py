"""The report that a push returns.

This module knows the fields of a report. It must not know how a push runs.
"""

from __future__ import annotations

import msgspec


class WorkerRow(msgspec.Struct, frozen=True):
    """What one worker got in one push. ``nbytes`` is what it was told to read, ``calls`` the installs that did."""

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


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One published push.

    ``seconds`` is the whole push as this trainer rank saw it, ``stage_seconds`` its stages (they overlap). ``nbytes``
    is what all workers together were told to read; ``worker_calls`` counts install calls that carry data, summed over
    workers, ``control_calls`` all other worker calls; ``requests`` and ``request_bytes`` are those to the engines.
    ``ignored`` lists tensors that every worker passes over on purpose, such as a tied head. ``direct_tensors`` counts
    those that workers copied from where they lie; ``through_loader`` says of others why not, with how many for each
    reason, where that was tried.
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
    requests: int
    request_bytes: int
    ignored: tuple[str, ...]
    direct_tensors: int
    through_loader: dict[str, int]
    workers: tuple[WorkerRow, ...]
