"""What is hooked into vLLM's engine core when, and only when, the backend is ``rankcast``.

This module knows which of the engine core's calls may touch weights, or run the model over them. It must not know what
a payload says, nor vLLM's insides (``adapter``). All replies of a call are here before anything is concluded from them,
so a fault on one rank never leaves another rank's reply in the queue; callers without a report channel get one error
with every rank's faults, and a session that failed on one rank is ended on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from rankcast.engines.agreement import partly_written
from rankcast.engines.vllm.adapter import calls
from rankcast.engines.vllm.worker_hooks import CALLS, PRIVATE, Reply
from rankcast.errors import StateError, UnsupportedError
from rankcast.session import OPEN
from rankcast.wire.reports import error_of

#: The engine core's method that answers ``why_not`` to a process that is not the engine core's own.
WHY_NOT = "rankcast_why_not"


def hook_engine_core() -> None:
    """Wrap the engine core's calls; does nothing the second time."""
    around: dict[str, Callable[..., Any]] = {
        "resume_scheduler": _resume,
        "pause_scheduler": _pause,
        "reset_prefix_cache": _reset_prefix_cache,
        "sleep": _sleep,
        "set_weight_version": _set_weight_version,
        "collective_rpc": _collective_rpc,
    }
    for method, hook in around.items():
        for cls in calls.core_classes(method):
            wrap(cls, method, hook)
    (base,) = calls.core_classes("collective_rpc")
    defaults = {"_rankcast_open": False, "_rankcast_unservable": False, "_rankcast_held": False}
    for name, start in {WHY_NOT: why_not, **defaults}.items():
        setattr(base, name, start)


def why_not(core: Any) -> str | None:
    """Why nothing may be generated on this engine now, or ``None``."""
    if core._rankcast_open:
        return "a weight update is open on this engine: finish it or abort it first"
    if core._rankcast_unservable:
        return "the weights of this engine are incomplete: push again, which makes them whole"
    return None


def wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Put ``around(self, original, ...)`` in the place of a method, for engines with this backend; once."""
    original = vars(cls)[name]
    if getattr(original, "rankcast", False):
        return

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not calls.is_ours(self):
            return original(self, *args, **kwargs)
        return around(self, functools.partial(original, self), *args, **kwargs)

    hooked.rankcast = True  # type: ignore[attr-defined]  # marks a wrapped method, so that it is wrapped once
    setattr(cls, name, hooked)


def _resume(core: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    why = why_not(core)
    if why is not None:
        raise StateError(f"resume, but {why}")
    if calls.is_asleep(core):
        return None  # without its cache nothing can run: waking the rest resumes it
    return original(*args, **kwargs)


def _pause(core: Any, original: Callable[..., Any], mode: str = "abort", *args: Any, **kwargs: Any) -> Any:
    # A pause that waits lets what is frozen go on, over weights that are half new; data-parallel ranks run the model to
    # agree on any; and whoever opened the update will lift it.
    why = why_not(core)
    if why is not None and (mode == "wait" or core._rankcast_open):
        raise StateError(f"pause with mode={mode}, but {why}")
    try:
        return original(mode, *args, **kwargs)
    finally:
        _hold(core)


def _reset_prefix_cache(
    core: Any, original: Callable[..., Any], reset_running_requests: bool = False, *args: Any, **kwargs: Any
) -> Any:
    done = original(reset_running_requests, *args, **kwargs)
    if reset_running_requests:
        # Asked for like this after an update: what an encoder made of images is as old as what was made of tokens.
        core.reset_encoder_cache()
    return done


def _set_weight_version(core: Any, original: Callable[..., Any], weight_version: str) -> Any:
    why = why_not(core)
    if why is not None:
        raise StateError(f"update_weight_version to {weight_version!r}, but {why}")
    return original(weight_version)


def _sleep(core: Any, original: Callable[..., Any], level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level > 0 and core._rankcast_open:
        raise StateError("sleep, but a weight update is open on this engine: finish it or abort it first")
    if level > 0 and core._rankcast_unservable:
        # What a failed update left half-way is put away while its memory is there.
        _order(core, "abandon_weight_update")
    try:
        asleep = original(level, *args, **kwargs)
    except Exception:
        if level >= 2:  # some workers may have dropped theirs
            _disown(core)
        raise
    if level < 2:
        return asleep
    # Level 2 drops the weights, and waking brings only their memory back.
    if isinstance(asleep, Future):
        asleep.add_done_callback(lambda _: _disown(core))
    else:
        _disown(core)
    return asleep


def _collective_rpc(
    core: Any,
    original: Callable[..., Any],
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if method in PRIVATE:
        raise UnsupportedError(f"{method} is this engine core's own call to its workers: nobody else may make it")
    if method == "start_draft_weight_update":
        # Refused here and not by the workers: each would raise, and all replies but the first would stay behind.
        raise UnsupportedError("rankcast does not update draft models: serve without one")
    if method == "reload_weights":
        raise UnsupportedError(
            "reload_weights goes around rankcast, which would not know what this engine holds: rankcast push CHECKPOINT"
        )
    if method in ("shutdown_weight_transfer_engine", "reset_weights") and core._rankcast_open:
        raise StateError(f"{method}, but a weight update is open on this engine: finish it or abort it first")
    if method == "reset_weights":
        _check_quiet(core, method)
        try:
            return original(method, timeout, args, kwargs)
        finally:
            _disown(core)
    if method not in CALLS:
        return original(method, timeout, args, kwargs)
    if method == "start_weight_update":
        _check_quiet(core, "start")
    return _concluded(core, method, _read(core, original(method, timeout, args, kwargs)))


def _concluded(core: Any, method: str, replies: Sequence[Reply]) -> None:
    """Raise what the caller has to know and was not told on its report channel."""
    reports = [reply.report for reply in replies]
    if method == "finish_weight_update" and not any(report.faults for report in reports):
        partly = partly_written(reports)
        if partly is not None:
            # Each worker is content with what it holds: only here is it seen that they hold different weights.
            _disown(core)
            raise StateError(partly)
    faults = [(reply.report, fault) for reply in replies if not reply.told for fault in reply.report.faults]
    if not faults:
        return
    if method in ("start_weight_update", "update_weights", "finish_weight_update") and not all(
        report.state == reports[0].state for report in reports
    ):
        # Some ranks went on and some did not: no rank may be left with another flag than the rest.
        _order(core, "abandon_weight_update")
    text = "; ".join(dict.fromkeys(f"{report.worker.label}: {fault.message}" for report, fault in faults))
    raise error_of(msgspec.structs.replace(faults[0][1], message=text))


def _check_quiet(core: Any, what: str) -> None:
    """Refuse to change weights where generation could run into half-new weights, which ends the engine."""
    found = calls.activity(core)
    if not found.paused:
        raise StateError(f"{what}, but generation is not paused on this engine: POST /pause?mode=keep first")
    if found.running:
        raise StateError(f"{what}, but requests are still running on this engine: wait for the pause to return")
    if found.asleep:
        raise StateError(f"{what}, but this engine's weights are asleep: POST /wake_up?tags=weights first")


def _disown(core: Any) -> None:
    """Whatever the workers hold is not to be served, or is not what they think it is."""
    _order(core, "disown_weight_update")


def _order(core: Any, method: str) -> None:
    """Make one of the calls that only the engine core makes."""
    _read(core, calls.all_workers(core, method))


def _read(core: Any, raw: Sequence[Any]) -> list[Reply]:
    replies = [msgspec.json.decode(reply, type=Reply) for reply in raw]
    core._rankcast_open = any(reply.report.state in OPEN for reply in replies)
    core._rankcast_unservable = not all(reply.report.servable for reply in replies)
    _hold(core)
    return replies


def _hold(core: Any) -> None:
    """See to it that a pause lets nothing run at all while nothing may be generated, and then goes on as it was."""
    if why_not(core) is not None:
        core._rankcast_held = calls.freeze(core) or core._rankcast_held
    elif core._rankcast_held:
        core._rankcast_held = False
        calls.thaw(core)
