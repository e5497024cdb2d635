"""Faults that a worker of vLLM has at a moment of a test's choice, as a worker extension beside what reads it back.

It knows where rankcast calls vLLM's reload. It must not know what a test expects. Real workers have such faults when
memory runs out or a kernel refuses, which cannot be arranged for one rank alone.
"""

from __future__ import annotations

from typing import Any

from vllm_engine.readback import Readback


class Breaking(Readback):
    """Methods that vLLM adds to its worker, reached by ``collective_rpc``."""

    rank: int

    def break_next_finish(self, rank: int) -> None:
        """The next reload that worker ``rank`` finishes fails before anything is put back."""
        from rankcast.engines.vllm.adapter import reload

        if self.rank != rank:
            return
        original = reload.finish_reload

        def fail_once(*_: Any) -> None:
            reload.finish_reload = original
            raise RuntimeError("the finish broke")

        reload.finish_reload = fail_once
