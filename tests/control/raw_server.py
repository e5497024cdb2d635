"""A server on loopback whose every byte a test says, for what no proper server would do.

It knows sockets and where a request ends. It must not know who asks.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

#: For ``localhost`` and 127.0.0.1, key and certificate in one; nobody trusts it.
CERTIFICATE = Path(__file__).with_name("self_signed.pem")
_PATIENCE = 30.0


def answer(body: bytes = b"{}", status: str = "200 OK", *headers: str) -> bytes:
    """A whole answer of a known length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def encrypting() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    return context


class Peer:
    """One client that connected. ``over`` is set when the test is at its end."""

    def __init__(self, connection: socket.socket, asked: list[bytes], over: threading.Event) -> None:
        self.over = over
        self._connection = connection
        self._asked = asked
        self._held = b""

    def head(self) -> bytes:
        """The next request up to its body; empty when the client has closed the connection."""
        while b"\r\n\r\n" not in self._held:
            came = self._connection.recv(65536)
            if not came:
                return b""
            self._held += came
        head, end, self._held = self._held.partition(b"\r\n\r\n")
        return head + end

    def request(self) -> bytes:
        """The next request; empty when the client has closed the connection."""
        head = self.head()
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        while len(self._held) < size:
            came = self._connection.recv(65536)
            assert came, "the client closed the connection within its request"
            self._held += came
        body, self._held = self._held[:size], self._held[size:]
        if head:
            self._asked.append(head + body)
        return head + body

    def say(self, data: bytes) -> None:
        self._connection.sendall(data)

    def trickle(self, data: bytes) -> bool:
        """Say ``data`` again and again until the test is over; whether the client took more than it ever should."""
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                if self.over.wait(0.01):
                    return False
                self.say(data)
            return True
        return False

    def encrypt(self) -> None:
        self._connection = encrypting().wrap_socket(self._connection, server_side=True)

    def close(self) -> None:
        self._connection.close()


Script = Callable[[Peer], object]


class RawServer:
    """Gives the first client that connects to the first script, and so on; the last script has all that follow.

    ``asked`` holds the requests in the order in which they had come whole, ``peers`` the clients.
    """

    def __init__(self, *scripts: Script, host: str = "127.0.0.1") -> None:
        self.asked: list[bytes] = []
        self.peers: list[Peer] = []
        self.over = threading.Event()
        self._scripts = scripts
        self.threads: list[threading.Thread] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepting, *self.threads):
            thread.join(_PATIENCE)
            assert not thread.is_alive() or kind is not None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(_PATIENCE)
                script = self._scripts[min(len(self.peers), len(self._scripts) - 1)]
                peer = Peer(connection, self.asked, self.over)
                self.peers.append(peer)
                thread = threading.Thread(target=self._play, args=(script, peer), daemon=True)
                self.threads.append(thread)
                thread.start()

    @staticmethod
    def _play(script: Script, peer: Peer) -> None:
        try:
            script(peer)
        except (ConnectionError, ssl.SSLError, TimeoutError):
            pass  # a client that goes is no fault of the script's
        finally:
            peer.close()


def serving(peer: Peer, reply: bytes | None = None) -> None:
    """A script: answers every request with ``reply``."""
    while peer.request():
        peer.say(answer() if reply is None else reply)
