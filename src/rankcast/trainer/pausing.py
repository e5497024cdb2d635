"""Pausing generation around an update, and leaving engines as they were found.

This module knows the optional pause, resume and cache calls of a client. It must not know sessions. An engine that the
user had paused already stays paused afterwards; an engine that cannot be paused is not asked to.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankcast.errors import EngineError, RankcastError
from rankcast.trainer.engine import Engine, WorkerFault
from rankcast.trainer.fleet import Fleet
from rankcast.wire.reports import Fault

#: The ways of pausing, as vLLM names them; ``None`` leaves it to the caller.
PAUSE_MODES = (None, "keep", "wait", "abort")


def pause(fleet: Fleet, mode: str | None) -> list[WorkerFault]:
    """Pause every engine that is not paused; returns the faults of those that could not be.

    When any could not be, the others go on as before: there will be no update. An engine whose pause failed may pause
    after all, later: it is told to go on too, and is named when it cannot be.
    """
    if mode is None:
        return []
    fresh: list[Engine] = []

    def hold(engine: Engine) -> None:
        stop, ask = engine.optional("pause"), engine.optional("is_paused")
        if stop is None:
            return
        if ask is not None and ask():
            engine.paused_by_user = not engine.paused_by_us
            return
        engine.paused_by_user = False
        if not engine.paused_by_us:
            fresh.append(engine)
        engine.paused_by_us = True
        stop(mode)

    failed = fleet.each("pause", hold)
    if not failed:
        return []
    faults = [WorkerFault.of(engine, error) for engine, error in failed]
    with fleet.ending():
        stuck = resume(fleet, list(fresh))
    if stuck:
        where = ", ".join(engine.where for engine in fresh if engine.paused_by_us)
        late = f"{where} may be paused now, or pause later, and could not be resumed: push again, or resume it by hand"
        faults += [*stuck, WorkerFault(where, "", Fault(EngineError.code, late))]
    return faults


def reset_caches(fleet: Fleet) -> list[WorkerFault]:
    """Throw away prefixes computed under old weights; an engine that says it could not is a fault, never hidden."""

    def reset(engine: Engine) -> None:
        call = engine.optional("reset_prefix_cache")
        if call is None:
            return
        why: Exception | None = None
        try:
            if call() is not False:
                return
        except RankcastError as error:
            why = error
        raise EngineError(
            f"{engine.where} did not reset its prefix cache{f' ({why})' if why else ''}: cached prefixes of the old "
            "weights would be served; push again once nothing holds its blocks (resume an engine that you had paused; "
            "pass pause='wait')"
        ) from why

    return [WorkerFault.of(engine, error) for engine, error in fleet.each("reset_prefix_cache", reset)]


def resume(fleet: Fleet, engines: Sequence[Engine] | None = None) -> list[WorkerFault]:
    """Resume what ``pause`` paused, and nothing else."""

    def go_on(engine: Engine) -> None:
        call = engine.optional("resume")
        if call is not None:
            call()
        engine.paused_by_us = False

    ours = [engine for engine in (fleet.engines if engines is None else engines) if engine.paused_by_us]
    failed = fleet.each("resume", go_on, ours, checked=False)
    return [WorkerFault.of(engine, error) for engine, error in failed]
