"""One HTTP connection that is kept between calls, each of which is over at its deadline.

This module knows sockets and, by h11, HTTP/1.1. It must not know what is sent, nor how many connections there are.
Clients made for more bound each step of a call and not the whole, so that an answer that trickles in holds them up; and
they take several times the processor time, which counts where a call is one of the many small ones that make up a push.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from urllib.parse import urlsplit

import h11

from rankcast.control.exchange import (
    Answer,
    BrokenConnectionError,
    Call,
    LongAnswerError,
    SlowAnswerError,
    SlowConnectionError,
    UnreachableError,
    UntrustedError,
)

_AT_ONCE = 65536
# The longest head of an answer, in bytes: h11's own bound is below what a chain of proxies may put before an answer.
_HEAD_LIMIT = 100 * 1024
# The longest wait that the kernel is asked for, in seconds; it takes no infinity.
_LONGEST_WAIT = 1e6


class KeptConnection:
    """A connection to the server of ``url``, made when it is first needed. Not thread-safe, but for ``abort``.

    ``authority`` is what belongs into the header ``Host``, and ``target`` what a call to ``url`` itself asks for.
    ``trust`` says which certificates of an https server are good; ``None`` leaves it to the system. To look the host's
    name up takes what the system's resolver allows itself. Raises ``ValueError`` when ``url`` is no http or https URL.
    """

    def __init__(self, url: str, trust: ssl.SSLContext | None = None) -> None:
        split = urlsplit(url)
        if split.scheme not in ("http", "https") or not split.hostname:
            raise ValueError("it is no http URL")
        self.url = url
        self.authority = split.netloc.rpartition("@")[2]
        self.target = (split.path or "/") + (f"?{split.query}" if split.query else "")
        self._host = split.hostname
        self._port = (443 if split.scheme == "https" else 80) if split.port is None else split.port
        self._encrypted = split.scheme == "https"
        self._trust = trust
        self._aborted = False
        self._socket: socket.socket | None = None
        self._http = _fresh()

    def send(self, call: Call) -> Answer:
        """The answer to ``call``, whatever its status.

        Raises a ``NoAnswerError`` of the kind that fits, and ``LongAnswerError``. After an error the connection is
        closed, and a later call makes another one.
        """
        try:
            connection = self._socket or self._connected(call.connect_by)
            try:
                return self._exchanged(connection, call)
            except TimeoutError as fault:
                raise SlowAnswerError(str(fault)) from fault
            except (OSError, h11.ProtocolError) as fault:
                raise BrokenConnectionError(str(fault) or type(fault).__name__) from fault
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it is there, as far as this side knows."""
        return self._socket is not None

    def is_quiet(self) -> bool:
        """Whether it is open and the server has, since the last answer, neither closed it nor sent anything."""
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """End the call in flight, which then fails, from another thread; no call can be made any more."""
        self._aborted = True
        connection = self._socket
        if connection is not None:
            # To close a socket wakes nobody who waits for it. Below TLS: what encrypts belongs to the other thread.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a later call makes another one."""
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def _connected(self, by: float) -> socket.socket:
        try:
            made = self._opened(by)
        except TimeoutError as fault:
            raise SlowConnectionError(str(fault)) from fault
        except ssl.SSLCertVerificationError as fault:
            raise UntrustedError(str(fault)) from fault
        except (OSError, UnicodeError) as fault:  # a host may be named in a way that no name server can be asked about
            raise UnreachableError(str(fault)) from fault
        self._http = _fresh()
        self._socket = made
        if self._aborted:  # after the socket is where abort looks for it: one of the two sees the other
            raise BrokenConnectionError("it was ended from this side")
        return made

    def _opened(self, by: float) -> socket.socket:
        # Not socket.create_connection, which gives each address of a name all the time there is.
        addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        for after, (family, kind, protocol, _, address) in zip(range(len(addresses))[::-1], addresses, strict=True):
            try:
                made = socket.socket(family, kind, protocol)
                try:
                    made.settimeout(_left(by) / (after + 1))
                    made.connect(address)
                    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                except BaseException:
                    made.close()
                    raise
            except OSError:
                if not after:
                    raise
            else:
                return self._encrypting(made, by) if self._encrypted else made
        raise OSError("its name has no address")

    def _encrypting(self, plain: socket.socket, by: float) -> socket.socket:
        try:
            plain.settimeout(_left(by))
            trust = self._trust or ssl.create_default_context()
            return trust.wrap_socket(plain, server_hostname=self._host)
        except BaseException:
            plain.close()
            raise

    def _exchanged(self, connection: socket.socket, call: Call) -> Answer:
        taken = self._sent(connection, call)
        http, status, encoding, body = self._http, 0, "", bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                connection.settimeout(_left(call.deadline))
                http.receive_data(connection.recv(_AT_ONCE))
            elif isinstance(event, h11.Response):
                status = event.status_code
                encoding = _encoding(event)
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > call.limit:
                    raise LongAnswerError(f"the answer has more than {call.limit:,} bytes")
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionError("it was closed before the answer")
        # What follows the answer would be taken for the next one, also that the server has closed.
        over = http.our_state is h11.DONE and http.their_state is h11.DONE and http.trailing_data == (b"", False)
        if taken and over:
            http.start_next_cycle()
        else:
            self.close()
        return Answer(status, bytes(body), encoding)

    def _sent(self, connection: socket.socket, call: Call) -> bool:
        """Send ``call``; whether the server took all of it."""
        http, body = self._http, call.body
        headers = list(call.headers)
        if body is not None:
            headers.append((b"Content-Length", b"%d" % len(body)))
        parts = [http.send(h11.Request(method=call.method, target=call.target, headers=headers))]
        if body:
            parts.append(http.send(h11.Data(data=body)))
        parts.append(http.send(h11.EndOfMessage()))
        # In one piece: a head that waits for its body to follow costs a round trip.
        unsent = memoryview(b"".join(part for part in parts if part))
        try:
            while unsent:
                connection.settimeout(_left(call.deadline))
                unsent = unsent[connection.send(unsent) :]
        except (ConnectionError, ssl.SSLError):
            return False  # a server that refuses a long body says why, and need not have read it to its end
        return True


def _fresh() -> h11.Connection:
    return h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_LIMIT)


def _encoding(response: h11.Response) -> str:
    return b", ".join(value for name, value in response.headers if name == b"content-encoding").decode("latin-1")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not in time")
    return min(left, _LONGEST_WAIT)
