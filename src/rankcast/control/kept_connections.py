"""The straight way to a server: as many kept connections as there are calls at once.

This module knows when a connection may be used again. It must not know how a call travels over one, nor what is sent.
"""

from __future__ import annotations

import ssl
import threading
import time

from rankcast.control.exchange import KEPT_SECONDS, Answer, BrokenConnectionError, Call, ClosedError
from rankcast.control.kept_connection import KeptConnection


class KeptConnections:
    """An ``Exchange`` with the server of ``url``, each of whose calls has a connection to itself meanwhile.

    ``trust`` is as for ``KeptConnection``. An idle connection is let go of after 4 s, at the next call; one that the
    server has closed, or sent something over that nobody asked for, is not used again.
    """

    def __init__(self, url: str, trust: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._trust = trust
        self._choosing = threading.Lock()
        self._closed = False
        self._busy: set[KeptConnection] = set()
        self._idle: list[tuple[float, KeptConnection]] = []  # the longest idle one first

    def send(self, call: Call) -> Answer:
        """See ``Exchange``."""
        connection = self._taken()
        try:
            return connection.send(call)
        except BrokenConnectionError as fault:
            if self._closed:
                raise ClosedError("during the call; whether it was done is not known") from fault
            raise
        finally:
            self._returned(connection)

    def close(self) -> None:
        """Close the connections; calls in flight fail."""
        with self._choosing:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.abort()
        for _, connection in idle:
            connection.close()

    def _taken(self) -> KeptConnection:
        gone: list[KeptConnection] = []
        with self._choosing:
            if self._closed:
                raise ClosedError("nothing was sent")
            taken = None
            # The last one used first, so that the others grow old and go when fewer calls are made at once.
            while self._idle and taken is None:
                since, connection = self._idle.pop()
                if time.monotonic() - since < KEPT_SECONDS and connection.is_quiet():
                    taken = connection
                else:
                    gone.append(connection)
            oldest = time.monotonic() - KEPT_SECONDS
            while self._idle and self._idle[0][0] < oldest:
                gone.append(self._idle.pop(0)[1])
            if taken is None:
                taken = KeptConnection(self._url, self._trust)
            self._busy.add(taken)
        for connection in gone:
            connection.close()
        return taken

    def _returned(self, connection: KeptConnection) -> None:
        with self._choosing:
            self._busy.discard(connection)
            if connection.is_open and not self._closed:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()
