"""A client for a ``vllm.LLM`` in the trainer's own process: the same calls, without HTTP.

This module knows the methods of vLLM's offline class and the dicts that they take. It must not import vLLM: the object
it is given is vLLM's own.
"""

from __future__ import annotations

from typing import Any

from rankcast.control.client import Payload
from rankcast.errors import UnsupportedError

#: vLLM's sleep level that only stops scheduling, and the tag that starts it again.
_PAUSE_LEVEL = 0
_SCHEDULING = "scheduling"


class LLMClient:
    """One ``vllm.LLM``; generation is held up by stopping its scheduler, which only an engine in a process of its own
    needs: in-process, nothing runs between calls."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @staticmethod
    def fits(target: object) -> bool:
        """Whether ``target`` is a ``vllm.LLM``."""
        return any(cls.__module__.startswith("vllm.") and cls.__name__ == "LLM" for cls in type(target).__mro__)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Payload) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def update_weight_version(self, weight_version: str) -> None:
        self._llm.update_weight_version(weight_version)

    def weight_info(self) -> dict[str, Any]:
        return {"weight_version": self._llm.get_weight_version()}

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """Stop scheduling. Raises ``UnsupportedError`` for ``wait``: this thread is the one that would have to run."""
        if mode == "wait":
            raise UnsupportedError("pause='wait' would wait for requests that only this thread can run: use 'keep'")
        self._llm.sleep(level=_PAUSE_LEVEL, mode=mode)

    def resume(self) -> None:
        self._llm.wake_up(tags=[_SCHEDULING])

    def is_paused(self) -> bool:
        """Whether scheduling is stopped, by whomever; an engine of which anything sleeps does not schedule either."""
        return bool(self._llm.llm_engine.is_sleeping())

    def reset_prefix_cache(self) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
