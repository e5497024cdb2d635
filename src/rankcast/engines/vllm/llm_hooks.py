"""What is hooked into vLLM's engine for offline use, behind ``vllm.LLM``, when the backend is ``rankcast``.

This module knows how requests get into that engine and how it is stepped. It must not know payloads or workers. A
server's requests wait while their engine is paused; here the caller itself would wait, for good, or would generate with
weights that are half new. So it is told, and the request is refused before any part of vLLM has taken note of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from rankcast.engines.vllm.adapter import calls
from rankcast.engines.vllm.core_hooks import WHY_NOT, wrap
from rankcast.engines.vllm.worker_hooks import CALLS
from rankcast.errors import StateError


def hook_llm_engine() -> None:
    """Wrap the engine's calls; does nothing the second time."""
    cls: Any = calls.llm_engine_class()
    cls._rankcast_why_not = None  # what each engine keeps of its core's last answer
    wrap(cls, "collective_rpc", _collective_rpc)
    wrap(cls, "sleep", _sleep)
    wrap(cls, "add_request", _generate)
    wrap(cls, "step", _generate)


def _collective_rpc(engine: Any, original: Callable[..., Any], method: Any, *args: Any, **kwargs: Any) -> Any:
    if method not in CALLS and method != "reset_weights":
        return original(method, *args, **kwargs)
    return _and_ask(engine, functools.partial(original, method, *args, **kwargs))


def _sleep(engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _and_ask(engine, functools.partial(original, *args, **kwargs))


def _and_ask(engine: Any, call: Callable[[], Any]) -> Any:
    """Asked after each call for weights, and kept: an engine core in a process of its own answers between steps."""
    try:
        done = call()
    except Exception:
        with contextlib.suppress(Exception):  # what failed first is what the caller has to know
            engine._rankcast_why_not = calls.ask_core(engine, WHY_NOT)
        raise
    engine._rankcast_why_not = calls.ask_core(engine, WHY_NOT)
    return done


def _generate(engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if engine._rankcast_why_not is not None:
        raise StateError(f"generate, but {engine._rankcast_why_not}")
    return original(*args, **kwargs)
