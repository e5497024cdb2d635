"""What takes the place of vLLM's worker methods when, and only when, the backend is ``rankcast``.

This module knows which methods of vLLM's worker are called by name. It must not know what the calls do. vLLM's own
methods raise before any engine sees a call, on some ranks or on all, and clear their session flag on the failing rank
only. Here a worker never raises: every rank answers, in step, with what it found, and the engine core (``core_hooks``)
reads all answers before it concludes anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from rankcast.engines.vllm.adapter import calls
from rankcast.wire.reports import Report

#: vLLM's method -> the receiver's call.
CALLS = {
    "init_weight_transfer_engine": "init",
    "start_weight_update": "start",
    "update_weights": "update",
    "finish_weight_update": "finish",
    "abort_weight_update": "abort",
    "abandon_weight_update": "abandon",
    "disown_weight_update": "disown",
}
#: Those that only the engine core makes, and needs nobody's leave for.
PRIVATE = frozenset({"abandon_weight_update", "disown_weight_update"})
#: Those that vLLM's own worker does not have.
ADDED = PRIVATE | {"abort_weight_update"}


class Reply(msgspec.Struct, frozen=True):
    """One worker's answer to its engine core: the report, and whether a trainer has been told."""

    report: Report
    told: bool


def hook_worker() -> None:
    """Wrap the methods; does nothing the second time."""
    cls = calls.worker_class()
    for method, call in CALLS.items():
        original = vars(cls).get(method) if method in ADDED else vars(cls)[method]
        if not getattr(original, "rankcast", False):
            setattr(cls, method, _wrapped(method, call, original))


def _wrapped(method: str, call: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not calls.is_ours(self):
            if original is None:
                raise AttributeError(f"{type(self).__name__} has no method {method}")
            return original(self, *args, **kwargs)
        argument = args[0] if args else next(iter(kwargs.values()), None)
        report, told = self.weight_transfer_engine.handle(call, argument)
        calls.flag_session(self, active=self.weight_transfer_engine.receiver.session_open)
        return msgspec.json.encode(Reply(report, told)).decode()

    if original is not None:
        hooked = functools.wraps(original)(hooked)
    hooked.rankcast = True  # type: ignore[attr-defined]  # marks a wrapped method, so that it is wrapped once
    return hooked
