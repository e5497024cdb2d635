"""What is hooked into vLLM's engine core when, and only when, the backend is ``rankcast``.

This module knows the engine core's pause state and its calls to all workers. It must not know what a payload says. All
replies of a call are here before anything is concluded from them, so a fault on one rank never leaves another rank's
reply in the queue; callers without a report channel get one error with every rank's faults, and a session that failed
on one rank is ended on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rankcast.engines.agreement import partly_written
from rankcast.engines.vllm.plugin import BACKEND
from rankcast.engines.vllm.worker_hooks import CALLS, Reply
from rankcast.errors import StateError, UnsupportedError
from rankcast.session import OPEN
from rankcast.wire.reports import error_of

#: The engine core's method that answers ``why_not`` to a process that is not the engine core's own.
WHY_NOT = "rankcast_why_not"


def hook_engine_core() -> None:
    """Wrap the engine core's calls; does nothing the second time."""
    from vllm.v1.engine import core

    for cls in (core.EngineCore, core.DPEngineCoreProc):
        if "resume_scheduler" in vars(cls):
            wrap(cls, "resume_scheduler", _resume)
    wrap(core.EngineCore, "sleep", _sleep)
    wrap(core.EngineCore, "set_weight_version", _set_weight_version)
    wrap(core.EngineCore, "collective_rpc", _collective_rpc)
    setattr(core.EngineCore, WHY_NOT, why_not)


def why_not(core: Any) -> str | None:
    """Why nothing may be generated on this engine now, or ``None``."""
    if getattr(core, "_rankcast_open", False):
        return "a weight update is open on this engine: finish it or abort it first"
    if getattr(core, "_rankcast_unservable", False):
        return "the weights of this engine are incomplete: push again, which makes them whole"
    return None


def wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Put ``around(self, original, ...)`` in the place of a method, for engines with this backend; once."""
    original = vars(cls)[name]
    if getattr(original, "rankcast", False):
        return

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config.weight_transfer_config
        if config is None or config.backend != BACKEND:
            return original(self, *args, **kwargs)
        return around(self, functools.partial(original, self), *args, **kwargs)

    hooked.rankcast = True  # type: ignore[attr-defined]  # marks a wrapped method, so that it is wrapped once
    setattr(cls, name, hooked)


def _resume(core: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    why = why_not(core)
    if why is not None:
        raise StateError(f"resume, but {why}")
    return original(*args, **kwargs)


def _set_weight_version(core: Any, original: Callable[..., Any], weight_version: str) -> Any:
    why = why_not(core)
    if why is not None:
        raise StateError(f"update_weight_version to {weight_version!r}, but {why}")
    return original(weight_version)


def _sleep(core: Any, original: Callable[..., Any], level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level > 0 and getattr(core, "_rankcast_open", False):
        raise StateError("sleep, but a weight update is open on this engine: finish it or abort it first")
    return original(level, *args, **kwargs)


def _collective_rpc(
    core: Any,
    original: Callable[..., Any],
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if method == "start_draft_weight_update":
        # Refused here and not by the workers: each would raise, and all replies but the first would stay behind.
        raise UnsupportedError("rankcast does not update draft models: serve without one")
    if method == "shutdown_weight_transfer_engine" and getattr(core, "_rankcast_open", False):
        raise StateError("a weight update is open on this engine: finish it or abort it before letting go of it")
    if method not in CALLS:
        return original(method, timeout, args, kwargs)
    if method == "start_weight_update":
        _check_quiet(core)
    replies = _read(core, original(method, timeout, args, kwargs))
    reports = [reply.report for reply in replies]
    if method == "finish_weight_update" and not any(report.faults for report in reports):
        partly = partly_written(reports)
        if partly is not None:
            # Each worker is content with what it holds: only here is it seen that they hold different weights.
            _read(core, original("disown_weight_update", timeout, (), None))
            raise StateError(partly)
    faults = [(reply.report, fault) for reply in replies if not reply.told for fault in reply.report.faults]
    if not faults:
        return None
    if method in ("start_weight_update", "update_weights", "finish_weight_update") and not all(
        report.state == reports[0].state for report in reports
    ):
        # Some ranks went on and some did not: no rank may be left with another flag than the rest.
        _read(core, original("abort_weight_update", timeout, (), None))
    text = "; ".join(dict.fromkeys(f"{report.worker.label}: {fault.message}" for report, fault in faults))
    raise error_of(msgspec.structs.replace(faults[0][1], message=text))


def _check_quiet(core: Any) -> None:
    """Refuse to start where generation could run into half-new weights, which ends the engine."""
    from vllm.v1.engine.core import EngineCoreProc

    may_run = isinstance(core, EngineCoreProc) or core.scheduler.has_unfinished_requests()
    if may_run and not core.is_scheduler_paused():
        raise StateError("start, but generation is not paused on this engine: POST /pause?mode=keep first")
    # A pause that waits for its requests counts as one from the moment on at which no new ones are taken.
    if core.scheduler.has_unfinished_requests() or getattr(core, "batch_queue", None):
        raise StateError("start, but requests are still running on this engine: wait for the pause to return")
    tags = getattr(core.model_executor, "sleeping_tags", ())
    if "weights" in tags:
        raise StateError("start, but this engine's weights are asleep: POST /wake_up?tags=weights first")


def _read(core: Any, raw: Sequence[Any]) -> list[Reply]:
    replies = [msgspec.json.decode(reply, type=Reply) for reply in raw]
    core._rankcast_open = any(reply.report.state in OPEN for reply in replies)
    core._rankcast_unservable = not all(reply.report.servable for reply in replies)
    return replies
