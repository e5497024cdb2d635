"""One call to the fleet that runs while the trainer stages the next round.

This module knows a thread and its result. It must not know what is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankcast.trainer.engine import Replies


class Pending:
    """``action`` in the background; ``wait`` for it, or leave it: it ends by itself when the fleet gives up."""

    def __init__(self, action: Callable[[], Replies]) -> None:
        self._result: list[Replies | BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(action,), name="rankcast install", daemon=True)
        self._thread.start()

    def _run(self, action: Callable[[], Replies]) -> None:
        try:
            self._result.append(action())
        except BaseException as error:
            self._result.append(error)

    def wait(self) -> Replies:
        """What came of it; raises what it raised."""
        # Bounded: the fleet gives up on an engine that makes no progress, and when another trainer rank fails.
        self._thread.join()
        result = self._result[0]
        if isinstance(result, BaseException):
            raise result
        return result
