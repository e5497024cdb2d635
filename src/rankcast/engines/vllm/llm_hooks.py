"""What is hooked into vLLM's engine for offline use, behind ``vllm.LLM``, when the backend is ``rankcast``.

This module knows how requests get into that engine and how it is stepped. It must not know payloads or workers. A
server's requests wait while their engine is paused; here the caller itself would wait, for good, or would generate with
weights that are half new. So it is told, and the request is refused before any part of vLLM has taken note of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankcast.engines.vllm.core_hooks import WHY_NOT, why_not, wrap
from rankcast.engines.vllm.worker_hooks import CALLS
from rankcast.errors import StateError


def hook_llm_engine() -> None:
    """Wrap the engine's calls; does nothing the second time."""
    from vllm.v1.engine.llm_engine import LLMEngine

    wrap(LLMEngine, "collective_rpc", _collective_rpc)
    wrap(LLMEngine, "add_request", _generate)
    wrap(LLMEngine, "step", _generate)


def _collective_rpc(engine: Any, original: Callable[..., Any], method: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(method, *args, **kwargs)
    finally:
        if method in CALLS:
            engine._rankcast_why_not = _ask(engine)


def _ask(engine: Any) -> str | None:
    """Asked after each call for weights, and kept: an engine core in a process of its own answers between steps."""
    client = engine.engine_core
    core = getattr(client, "engine_core", None)
    found: str | None = client.call_utility(WHY_NOT) if core is None else why_not(core)
    return found


def _generate(engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    why = getattr(engine, "_rankcast_why_not", None)
    if why is not None:
        raise StateError(f"generate, but {why}")
    return original(*args, **kwargs)
