"""Framed bytes between the server process and one worker process, over one end of a socket pair.

This module knows frames and when a peer is gone. It must not know what the bytes say. A frame is its length in eight
bytes, big-endian, and that many bytes. The worker's end is used blockingly; the server's end moves many frames at once
and never blocks.
"""

from __future__ import annotations

import contextlib
import socket

from rankcast.errors import EngineError, LimitError

#: The longest frame, in bytes. A frame carries at most one request body, which the server limits below this.
FRAME_LIMIT = 2**30

_HEADER = 8
_PIECE = 2**20


class ChannelClosed(EngineError):
    """The process at the other end of a channel is gone."""

    code = "channel_closed"


class Channel:
    """One end of a connected stream socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._incoming = bytearray()
        self._outgoing: list[memoryview] = []

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    # -- the worker's way: one thing at a time -----------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        """Write one frame; raises ``ChannelClosed`` when the peer is gone, ``LimitError`` when it is too long."""
        self.begin(frame)
        try:
            for part in self._outgoing:
                self._socket.sendall(part)
        except OSError as fault:
            raise ChannelClosed(f"the peer is gone: {fault}") from fault
        self._outgoing.clear()

    def receive(self) -> bytes:
        """Wait for one frame, as long as the peer lives; raises ``ChannelClosed`` and ``LimitError``."""
        while (frame := self._cut()) is None:
            self._read(0)
        return frame

    # -- the server's way: whatever moves without waiting --------------------------------------------------------------

    def begin(self, frame: bytes) -> None:
        """Queue one frame for ``flush``; raises ``LimitError`` when it is too long."""
        checked(frame)
        self._outgoing += [memoryview(len(frame).to_bytes(_HEADER, "big")), memoryview(frame)]

    def flush(self) -> bool:
        """Write what the socket takes now; whether all is out. Raises ``ChannelClosed``."""
        try:
            while self._outgoing:
                sent = self._socket.send(self._outgoing[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._outgoing[0] = self._outgoing[0][sent:]
                if not self._outgoing[0]:
                    self._outgoing.pop(0)
        except BlockingIOError:
            return False
        except OSError as fault:
            raise ChannelClosed(f"the peer is gone: {fault}") from fault
        return True

    def poll(self) -> bytes | None:
        """A frame if one is complete by now; raises ``ChannelClosed`` and ``LimitError``."""
        with contextlib.suppress(BlockingIOError):
            self._read(socket.MSG_DONTWAIT)
        return self._cut()

    def _read(self, flags: int) -> None:
        try:
            piece = self._socket.recv(_PIECE, flags)
        except BlockingIOError:
            raise
        except OSError as fault:
            raise ChannelClosed(f"the peer is gone: {fault}") from fault
        if not piece:
            raise ChannelClosed("the peer closed its end")
        self._incoming += piece

    def _cut(self) -> bytes | None:
        if len(self._incoming) < _HEADER:
            return None
        length = int.from_bytes(self._incoming[:_HEADER], "big")
        if length > FRAME_LIMIT:
            raise LimitError(f"a frame of {length:,} bytes was announced: the limit is {FRAME_LIMIT:,}")
        end = _HEADER + length
        if len(self._incoming) < end:
            return None
        frame = bytes(memoryview(self._incoming)[_HEADER:end])
        del self._incoming[:end]
        return frame


def checked(frame: bytes) -> bytes:
    """``frame``, unless it is too long: then raises ``LimitError``."""
    if len(frame) > FRAME_LIMIT:
        raise LimitError(f"a message of {len(frame):,} bytes between server and worker: the limit is {FRAME_LIMIT:,}")
    return frame
