"""In which order requests get forward passes, and what a pause does to them.

This module knows the three ways to pause. It must not know workers, threads or HTTP: the fleet's one thread asks it
whose turn it is and tells it what came out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from rankcast.engines.reference.request import Request
from rankcast.errors import NotServableError, PayloadError, RankcastError, StateError

PauseMode = Literal["keep", "wait", "abort"]

#: How many requests may be there at once.
REQUEST_LIMIT = 1024
#: How long a request is held by a pause before it is refused, in seconds.
HOLD_SECONDS = 3600.0


class RequestQueue:
    """Requests in flight take turns, one forward pass each; those that came during a pause wait for its end.

    ``paused`` says that new requests wait. An abandoned request is dropped before the next forward pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.paused = False
        self._running: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._frozen = False
        self._draining: list[Future[None]] = []
        self._clock = clock

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(self, request: Request) -> None:
        """Take a request, or refuse it when there are too many."""
        if len(self) >= REQUEST_LIMIT:
            request.fail(NotServableError(f"{REQUEST_LIMIT} requests are in flight or waiting: try later"))
        else:
            (self._waiting if self.paused else self._running).append(request)

    def next(self) -> Request | None:
        """Whose turn the next forward pass is; ``None`` when nobody may have one."""
        self._drop_abandoned()
        if self._frozen or not self._running:
            return None
        request = self._running[0]
        self._running.rotate(-1)
        return request

    def remove(self, request: Request) -> None:
        """The request is finished."""
        self._running.remove(request)
        self._check_drained()

    def fail_all(self, error: RankcastError, *, waiting: bool) -> None:
        """Answer every running request with ``error``, and every waiting one too if so said."""
        for request in [*self._running, *(self._waiting if waiting else ())]:
            request.fail(error)
        self._running.clear()
        if waiting:
            self._waiting.clear()
        self._check_drained()

    # -- pausing -----------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, done: Future[None]) -> None:
        """Pause; ``done`` is set once no forward pass will run until ``resume``.

        ``keep`` freezes requests in flight until then, ``wait`` lets them finish, ``abort`` ends them with what they
        have. Pausing while paused takes the new mode, for the requests still in flight. Raises ``PayloadError`` for
        another mode.
        """
        if mode not in ("keep", "wait", "abort"):
            raise PayloadError(f"unknown pause mode {mode!r}: keep, wait or abort")
        self.paused = True
        self._frozen = mode != "wait"
        if mode == "abort":
            for request in self._running:
                request.end("abort")
            self._running.clear()
        self._draining.append(done)
        self._check_drained()

    def resume(self) -> None:
        """Let everyone go on; harmless when nothing is paused."""
        for done in self._draining:
            if not done.done():
                done.set_exception(StateError("resumed before the requests in flight were finished: pause again"))
        self._draining.clear()
        self.paused = self._frozen = False
        self._running.extend(self._waiting)
        self._waiting.clear()

    def expire(self) -> None:
        """Refuse what a pause has held for too long."""
        held = [*(self._running if self._frozen else ()), *self._waiting]
        for request in held:
            if self._clock() - request.arrived > HOLD_SECONDS:
                request.fail(NotServableError(f"generation was paused for more than {HOLD_SECONDS:.0f} s"))
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        for queue in (self._running, self._waiting):
            for request in [request for request in queue if request.abandoned or request.future.done()]:
                request.end("abort")
                queue.remove(request)
        self._check_drained()

    def _check_drained(self) -> None:
        if self.paused and (self._frozen or not self._running):
            for done in self._draining:
                if not done.done():
                    done.set_result(None)
            self._draining.clear()
