"""One HTTP connection that is kept between calls, each of which is over at its deadline.

This module knows sockets and, by h11, HTTP/1.1. It must not know what is sent. Clients made for more bound each step of
a call and not the whole, so that an answer that trickles in holds them up; and they take several times the processor
time, which counts where a call is one of the many small ones that make up a push. No proxy of the environment is asked:
a trainer and its engines are neighbours.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from urllib.parse import urlsplit

import h11

#: The longest answer that is read, in bytes.
ANSWER_LIMIT = 65536
_AT_ONCE = 65536


class BrokenConnectionError(Exception):
    """The connection ended within a call, or what came over it is no HTTP; a kept one may just have gone stale."""


class KeptConnection:
    """A connection to the host of ``url``, made when it is first needed. Not thread-safe.

    Raises ``ValueError`` when ``url`` is no http or https URL.
    """

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        if split.scheme not in ("http", "https") or not split.hostname:
            raise ValueError("it is no http URL")
        self.url = url
        self._host = split.hostname
        self._port = split.port or (443 if split.scheme == "https" else 80)
        self._encrypted = split.scheme == "https"
        self._target = (split.path or "/") + (f"?{split.query}" if split.query else "")
        self._headers = [("Host", split.netloc), ("Content-Type", "application/json")]
        self._socket: socket.socket | None = None
        self._http = h11.Connection(h11.CLIENT)

    def post(self, data: bytes, deadline: float) -> tuple[int, bytes]:
        """POST ``data``, which is JSON; the status and the body of the answer.

        ``deadline`` is of ``time.monotonic``. Raises ``TimeoutError`` when it has passed, ``BrokenConnectionError``,
        ``OSError`` when there is no connection to be had, and ``ValueError`` when the answer is too long.
        """
        try:
            connection = self._socket or self._connect(deadline)
            try:
                return self._exchange(connection, data, deadline)
            except (ConnectionError, ssl.SSLError, h11.ProtocolError) as fault:
                raise BrokenConnectionError(str(fault) or type(fault).__name__) from fault
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; a later call makes another one."""
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def _connect(self, deadline: float) -> socket.socket:
        made = socket.create_connection((self._host, self._port), timeout=_left(deadline))
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._encrypted:
                made.settimeout(_left(deadline))
                made = ssl.create_default_context().wrap_socket(made, server_hostname=self._host)
        except BaseException:
            made.close()
            raise
        self._http = h11.Connection(h11.CLIENT)
        self._socket = made
        return made

    def _exchange(self, connection: socket.socket, data: bytes, deadline: float) -> tuple[int, bytes]:
        http = self._http
        head = http.send(
            h11.Request(
                method="POST", target=self._target, headers=[*self._headers, ("Content-Length", str(len(data)))]
            )
        )
        body, end = http.send(h11.Data(data=data)), http.send(h11.EndOfMessage())
        connection.settimeout(_left(deadline))
        # In one piece: a head that waits for its body to follow costs a round trip. The timeout is that of the whole.
        connection.sendall(b"".join(part for part in (head, body, end) if part))
        status, answer = 0, bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                connection.settimeout(_left(deadline))
                http.receive_data(connection.recv(_AT_ONCE))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                answer += event.data
                if len(answer) > ANSWER_LIMIT:
                    raise ValueError(f"the answer has more than {ANSWER_LIMIT:,} bytes")
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionError("it was closed before the answer")
        if http.our_state is h11.DONE and http.their_state is h11.DONE:
            http.start_next_cycle()
        else:
            self.close()
        return status, bytes(answer)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not in time")
    return left
