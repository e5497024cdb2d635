"""One call to the fleet that runs while the trainer stages the next round.

This module knows a call and its result. It must not know what is asked.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from rankcast.trainer.callers import Callers
from rankcast.trainer.engine import Replies


class Pending:
    """``action`` in the background; ``wait`` for it, or leave it: it ends by itself when the fleet gives up."""

    def __init__(self, callers: Callers, action: Callable[[], Replies]) -> None:
        self._result: queue.SimpleQueue[Replies | BaseException] = queue.SimpleQueue()

        def run() -> Replies | BaseException:
            try:
                return action()
            except BaseException as error:
                return error

        callers.start("rankcast install", run, self._result.put)

    def wait(self) -> Replies:
        """What came of it, once; raises what it raised."""
        # Bounded: the fleet gives up on an engine that makes no progress, and when another trainer rank fails.
        result = self._result.get()
        if isinstance(result, BaseException):
            raise result
        return result
