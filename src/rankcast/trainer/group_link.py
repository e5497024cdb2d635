"""One authenticated connection between two trainer ranks: frames, whole and bounded.

This module knows sockets, the frame and who is at the other end. It must not know a group's calls or epochs: it carries
them. Frames are msgspec inside the length-prefixed messages of ``multiprocessing.connection``, of which only the byte
calls are used: nothing that arrives is unpickled.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Literal

import msgspec

from rankcast.errors import LimitError
from rankcast.process import ProcessIdentity, this_process

#: The longest frame, in bytes: a hundred times the manifest of 100,000 tensors.
FRAME_LIMIT = 2**30

#: How long a handshake, or a send that must not hold its caller up, may take, in seconds.
PROMPTLY = 5.0

Kind = Literal["hello", "welcome", "begin", "go", "data", "fail", "lost", "pulse", "close"]


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank says to another; what ``what`` and ``data`` hold depends on ``kind``."""

    epoch: int
    kind: Kind
    what: str = ""
    data: bytes = b""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trainer rank: its process, and its host's name for people."""

    rank: int
    host: str
    process: ProcessIdentity

    @property
    def label(self) -> str:
        return f"trainer rank {self.rank} (pid {self.process.pid} on {self.host})"


def this_peer(rank: int) -> Peer:
    """The calling process as trainer rank ``rank``."""
    return Peer(rank, socket.gethostname(), this_process())


class Link:
    """A connection to one rank. Sends may come from any thread; one thread at a time receives.

    ``receive`` raises ``EOFError`` or ``OSError`` when the other end is gone and ``msgspec.MsgspecError`` when it talks
    nonsense. A send that makes no progress for ``timeout`` seconds raises ``OSError`` and ends the connection, since
    what follows half a frame could not be told from its rest.
    """

    def __init__(self, opened: socket.socket, timeout: float) -> None:
        opened.setblocking(True)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = opened
        self._connection = Connection(os.dup(opened.fileno()))
        self._sending = threading.Lock()
        self._timeout = timeout
        self._bound(socket.SO_SNDTIMEO, timeout)

    def authenticate(self, key: bytes, *, listening: bool) -> None:
        """Each end proves to the other that it has ``key``; raises ``ConnectionError`` when one does not, in time."""
        self._bound(socket.SO_RCVTIMEO, PROMPTLY)
        try:
            for turn in (listening, not listening):
                (deliver_challenge if turn else answer_challenge)(self._connection, key)
        except Exception as fault:  # the two functions raise many kinds, AssertionError among them
            raise ConnectionError(f"the other end did not prove who it is: {type(fault).__name__} {fault}") from None
        self._bound(socket.SO_RCVTIMEO, 0)

    def send(self, frame: Frame) -> None:
        """Send ``frame``; raises ``LimitError`` when it is too long and ``OSError`` when the other end is gone."""
        encoded = self._encoded(frame)
        with self._sending:
            self._send(encoded)

    def send_promptly(self, frame: Frame, seconds: float = PROMPTLY) -> bool:
        """Send a short ``frame`` if that can be done within ``seconds``; whether it was. Never raises."""
        if not self._sending.acquire(timeout=seconds):
            return False
        try:
            room = select.poll()  # not select.select, which fails on descriptors above 1,023
            room.register(self._connection.fileno(), select.POLLOUT)
            if not room.poll(seconds * 1000):
                return False
            self._send(self._encoded(frame))
            return True
        except (OSError, ValueError):
            return False
        finally:
            self._sending.release()

    def receive(self, timeout: float | None = None) -> Frame:
        """The next frame; waits for it at most ``timeout`` seconds (``None``: until the other end is gone)."""
        if timeout is not None and not self._connection.poll(timeout):
            raise TimeoutError(f"nothing came for {timeout:g} s")
        return msgspec.msgpack.decode(self._connection.recv_bytes(FRAME_LIMIT), type=Frame)

    def shut(self) -> None:
        """End the connection: what was sent still arrives, and whoever waits for it here wakes up."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Give the descriptors back. Only once nobody sends or receives any more. Idempotent."""
        self._socket.close()
        if not self._connection.closed:
            self._connection.close()

    def _send(self, encoded: bytes) -> None:
        try:
            self._connection.send_bytes(encoded)
        except OSError:
            self.shut()
            raise

    def _encoded(self, frame: Frame) -> bytes:
        encoded = msgspec.msgpack.encode(frame)
        if len(encoded) > FRAME_LIMIT:
            raise LimitError(
                f"{frame.what} takes {len(encoded):,} bytes, trainer ranks exchange at most {FRAME_LIMIT:,}"
            )
        return encoded

    def _bound(self, option: int, seconds: float) -> None:
        """Bound reads or writes in the kernel (0: not): Python's own timeouts make a descriptor non-blocking."""
        whole = int(seconds)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, int((seconds - whole) * 1e6)))
