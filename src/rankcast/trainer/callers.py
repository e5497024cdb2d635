"""Threads in which calls run beside whoever makes them, kept for the calls that follow.

This module knows threads. It must not know what is called. On a busy machine a new thread waits a whole time slice for
its first turn, one that wakes up does not, and a push makes about ten calls one after the other. They are daemons: a
call that hangs must not keep a trainer from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_Job = tuple[str, Callable[[], None]]


class Callers:
    """As many threads as there were calls at once. Thread-safe."""

    def __init__(self) -> None:
        self._choosing = threading.Lock()
        self._idle: list[_Caller] = []
        self._closed = False

    def start(self, name: str, call: Callable[[], _T], done: Callable[[_T], None]) -> None:
        """Run ``call``, which does not raise, in a thread of this ``name``, and then ``done`` with its result.

        When ``done`` is called the thread is free already. Works after ``close`` too, in a thread that is not kept.
        """
        with self._choosing:
            caller = self._idle.pop() if self._idle else _Caller()

        def run() -> None:
            result = call()
            self._free(caller)
            done(result)

        caller.jobs.put((name, run))

    def close(self) -> None:
        """End the threads that are idle; the others end when their calls do."""
        with self._choosing:
            self._closed = True
            idle, self._idle = self._idle, []
        for caller in idle:
            caller.jobs.put(None)
        for caller in idle:
            caller.thread.join()  # it has nothing to do any more

    def _free(self, caller: _Caller) -> None:
        with self._choosing:
            if self._closed:
                caller.jobs.put(None)
            else:
                self._idle.append(caller)


class _Caller:
    """One thread, and what it is to do."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="rankcast idle", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            self.thread.name, run = job
            run()
            self.thread.name = "rankcast idle"
