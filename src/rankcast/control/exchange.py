"""One HTTP call as those who make it see it: what goes out and by when, what comes back, in which ways it can fail.

This module knows the shape of a call. It must not know how one is sent, over which way, or what an engine is: whoever
sends calls (``KeptConnections``, ``ProxiedCalls``) and whoever makes them agree here, and import nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

#: How long an idle connection is kept, in seconds. Servers close one after 5 s (uvicorn, and so vLLM): let go of it
#: first, or a call may meet the closing.
KEPT_SECONDS = 4.0

Headers = Sequence[tuple[bytes, bytes]]


class Call(NamedTuple):
    """What is asked of a server.

    ``headers`` are all that is sent but ``Content-Length``, so ``Host`` is among them; ``body`` is ``None`` where none
    belongs to the method. ``connect_by`` and ``deadline`` are of ``time.monotonic``: the first for a connection that
    has to be made, the second for everything together. ``limit`` is the longest answer that is read, in bytes.
    """

    method: str
    target: str
    headers: Headers
    body: bytes | None
    connect_by: float
    deadline: float
    limit: int


class Answer(NamedTuple):
    """What the server said. ``encoding`` is its ``Content-Encoding``, by which ``body`` is as it came; else empty."""

    status: int
    body: bytes
    encoding: str


class NoAnswerError(Exception):
    """Nobody answered; which of the four ways it was, the subclass says."""


class UnreachableError(NoAnswerError):
    """There is no connection to be had; nothing was sent."""


class UntrustedError(UnreachableError):
    """Whoever took the connection has a certificate that is not trusted; nothing was sent."""


class SlowConnectionError(NoAnswerError):
    """A connection was not made in time; nothing was sent."""


class SlowAnswerError(NoAnswerError):
    """The answer was not there, or had not ended, at the deadline."""


class BrokenConnectionError(NoAnswerError):
    """The connection ended within the call, or what came over it is no HTTP; a kept one may just have gone stale."""


class LongAnswerError(Exception):
    """The answer is longer than the call allows."""


class ClosedError(Exception):
    """Whoever should have sent the call was closed."""


class Exchange(Protocol):
    """Whoever sends calls to one server. Thread-safe; nothing is ever sent twice."""

    def send(self, call: Call) -> Answer:
        """The answer to ``call``, whatever its status, redirects included.

        Raises a ``NoAnswerError``, ``LongAnswerError``, and ``ClosedError`` after, or by, a ``close``.
        """

    def close(self) -> None:
        """Close the connections; calls in flight fail."""
