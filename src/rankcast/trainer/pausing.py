"""Pausing generation around an update, and leaving engines as they were found.

This module knows the optional pause, resume and cache calls of a client. It must not know sessions. An engine that the
user had paused already stays paused afterwards; an engine that cannot be paused is not asked to.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankcast.control.client import capability
from rankcast.errors import EngineError
from rankcast.trainer.fleet import Engine, Fleet, WorkerFault, fault_of

#: The ways of pausing, as vLLM names them; ``None`` leaves it to the caller.
PAUSE_MODES = (None, "keep", "wait", "abort")


def pause(fleet: Fleet, mode: str | None) -> list[WorkerFault]:
    """Pause every engine that is not paused; returns the faults of those that could not be.

    When any could not be, the others go on as before: there will be no update.
    """
    if mode is None:
        return []
    fresh: list[Engine] = []

    def hold(engine: Engine) -> None:
        stop, ask = capability(engine.client, "pause"), capability(engine.client, "is_paused")
        if stop is None:
            return
        if ask is not None and ask():
            return
        stop(mode)
        if not engine.paused_by_us:
            fresh.append(engine)
        engine.paused_by_us = True

    faults = [WorkerFault(engine.where, "", fault_of(error)) for engine, error in fleet.each("pause", hold)]
    return faults + resume(fleet, fresh) if faults else []


def reset_caches(fleet: Fleet) -> list[WorkerFault]:
    """Throw away prefixes computed under old weights; an engine that says it could not is a fault, never hidden."""

    def reset(engine: Engine) -> None:
        call = capability(engine.client, "reset_prefix_cache")
        if call is not None and call() is False:
            raise EngineError(
                f"{engine.where} did not reset its prefix cache: cached prefixes of the old weights would be served; "
                "pause with pause='wait' or 'abort', then push again"
            )

    return [WorkerFault(engine.where, "", fault_of(error)) for engine, error in fleet.each("reset_prefix_cache", reset)]


def resume(fleet: Fleet, engines: Sequence[Engine] | None = None) -> list[WorkerFault]:
    """Resume what ``pause`` paused, and nothing else."""

    def go_on(engine: Engine) -> None:
        call = capability(engine.client, "resume")
        if call is not None:
            call()
        engine.paused_by_us = False

    ours = [engine for engine in (fleet.engines if engines is None else engines) if engine.paused_by_us]
    return [WorkerFault(engine.where, "", fault_of(error)) for engine, error in fleet.each("resume", go_on, ours)]
