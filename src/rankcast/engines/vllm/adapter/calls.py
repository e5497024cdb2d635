"""The classes of vLLM through which calls for weights go, and what they keep.

This module knows vLLM's workers, engine cores and its engine for offline use. It must not know weights or models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rankcast.engines.vllm.plugin import BACKEND


def is_ours(engine: Any) -> bool:
    """Whether a worker, an engine core or an engine (whatever has a ``vllm_config``) was configured for rankcast."""
    config = engine.vllm_config.weight_transfer_config
    return config is not None and config.backend == BACKEND


def worker_class() -> type:
    from vllm.v1.worker.gpu_worker import Worker

    cls: type = Worker
    return cls


def llm_engine_class() -> type:
    from vllm.v1.engine.llm_engine import LLMEngine

    cls: type = LLMEngine
    return cls


def core_classes(method: str) -> list[type]:
    """The engine core's classes that have a ``method`` of their own, the base class first."""
    from vllm.v1.engine import core

    return [cls for cls in (core.EngineCore, core.EngineCoreProc, core.DPEngineCoreProc) if method in vars(cls)]


def ask_core(engine: Any, method: str) -> Any:
    """Call ``method`` of the engine core behind an ``LLMEngine``, in this process or in one of its own."""
    from vllm.v1.engine.core_client import InprocClient

    client = engine.engine_core
    return getattr(client.engine_core, method)() if isinstance(client, InprocClient) else client.call_utility(method)


def flag_session(worker: Any, *, active: bool) -> None:
    """Set vLLM's own session flag, at which a worker looks before it lets go of a connection."""
    worker._weight_update_active = active


def all_workers(core: Any, method: str) -> Any:
    """Call ``method`` of every worker behind an engine core; their answers by rank."""
    return core.model_executor.collective_rpc(method)


class Activity(NamedTuple):
    """What an engine core is at: ``paused`` (or nothing to run), requests ``running``, its weights ``asleep``."""

    paused: bool
    running: bool
    asleep: bool


def activity(core: Any) -> Activity:
    from vllm.v1.engine.core import EngineCoreProc

    waiting = core.scheduler.has_unfinished_requests()
    return Activity(
        paused=core.is_scheduler_paused() or not (isinstance(core, EngineCoreProc) or waiting),
        # A pause that waits for its requests counts as one from the moment on at which no new ones are taken.
        running=waiting or bool(core.batch_queue),
        asleep="weights" in core.model_executor.sleeping_tags,
    )


def is_asleep(core: Any) -> bool:
    """Whether any of an engine core's memory is asleep: weights, or the cache without which nothing can run."""
    return bool(core.model_executor.is_sleeping)


def freeze(core: Any) -> bool:
    """Turn a pause that takes no new requests into one that runs none; returns whether it was such a one.

    In the former a session of streaming input is not counted as unfinished, and runs when its next part comes.
    """
    from vllm.v1.core.sched.interface import PauseState

    weak: bool = core.scheduler.pause_state == PauseState.PAUSED_NEW
    if weak:
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    return weak


def thaw(core: Any) -> None:
    """Turn the pause back into one that takes no new requests, if it still is one."""
    from vllm.v1.core.sched.interface import PauseState

    if core.scheduler.pause_state == PauseState.PAUSED_ALL:
        core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
