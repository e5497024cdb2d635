"""Where workers are born: one process that has torch loaded, and forks a worker for every socket that it is given.

The module that it loads says what a worker is: its ``main(descriptor)`` serves over the socket until that ends.

Loading torch takes longer than all else that a worker does before it has its weights, and forked workers share what was
loaded. It is a process of its own because only one that never started a thread can be forked without harm, and a server
has threads. This module knows how a process is begun, ended and missed. It must not know what a worker does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from rankcast.errors import NotServableError

#: From the nursery: what happened (``born`` or ``ended``), a pid, and for an end the exit code, negative for a signal.
_NEWS = struct.Struct("<5sqi")
_BORN, _ENDED = b"born ", b"ended"
#: How long the nursery may take to load torch and fork, in seconds, and to say how a child ended.
BIRTH_SECONDS = 300.0
NEWS_SECONDS = 1.0


class Child:
    """A worker process; its parent is the nursery, so that only a descriptor of it tells when it ends."""

    def __init__(self, nursery: Nursery, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._descriptor = descriptor
        self._ended = selectors.PollSelector()
        self._ended.register(descriptor, selectors.EVENT_READ)

    def wait(self, seconds: float) -> int | None:
        """The exit code, negative for a signal, or ``None`` where nobody is left who knows it.

        Raises ``TimeoutError`` when the child has not ended in ``seconds``.
        """
        if self._descriptor >= 0 and not self._ended.select(seconds):
            raise TimeoutError(f"process {self.pid} has not ended within {seconds:g} s")
        return self._nursery.code(self.pid)

    def kill(self) -> None:
        """SIGKILL; harmless once the child has ended."""
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """Let go of the descriptor, once the child has ended. Idempotent."""
        if self._descriptor >= 0:
            self._ended.close()
            os.close(self._descriptor)
            self._descriptor = -1


class Nursery:
    """The server's side; one thread uses it. It ends by itself when this side is closed, or its process is gone.

    ``pid`` is the nursery's own.
    """

    def __init__(self, environment: dict[str, str], module: str = "rankcast.engines.reference.worker") -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rankcast.engines.reference.nursery", str(theirs.fileno()), module],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a command line prints on its standard output is for programs to read
            )
        self.pid = self._process.pid
        self._codes: dict[int, int] = {}

    def spawn(self, connection: socket.socket) -> Child:
        """Fork a worker that speaks over ``connection``, which is the caller's to close.

        Raises ``NotServableError`` when the nursery did not do it.
        """
        with contextlib.suppress(ConnectionError):  # then there is nothing to hear either
            socket.send_fds(self._control, [b"fork"], [connection.fileno()])
        deadline = time.monotonic() + BIRTH_SECONDS
        while (news := self._hear(deadline)) is not None:
            what, pid, descriptors = news
            if what == _BORN:
                return Child(self, pid, descriptors[0])
        raise NotServableError(
            f"no worker could be started: the process that starts them (pid {self.pid}) said nothing more, "
            "see its last words on standard error"
        )

    def code(self, pid: int) -> int | None:
        """How process ``pid``, which has ended, did so; ``None`` when the nursery is gone."""
        deadline = time.monotonic() + NEWS_SECONDS
        while pid not in self._codes and self._hear(deadline) is not None:
            pass
        return self._codes.get(pid)

    def _hear(self, deadline: float) -> tuple[bytes, int, list[int]] | None:
        """The next news; ``None`` when there is none in time, or never will be."""
        self._control.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, _NEWS.size, 1)
        except (TimeoutError, BlockingIOError, ConnectionError):
            return None
        if len(message) != _NEWS.size:
            return None
        what, pid, code = _NEWS.unpack(message)
        if what == _ENDED:
            self._codes[pid] = code
        return what, pid, descriptors

    def close(self) -> None:
        """End the nursery; its children end with the connections that they were given. Idempotent."""
        self._control.close()
        try:
            self._process.wait(NEWS_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Fork as told, and say who ended how, until nobody listens any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a worker
    control = socket.socket(fileno=int(sys.argv[1]))
    live = importlib.import_module(sys.argv[2]).main  # what a child needs is loaded here, once
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if control in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for descriptor in (control.detach(), woken, waker):
                    os.close(descriptor)
                _live(live, descriptors[0])
            os.close(descriptors[0])
            born = os.pidfd_open(pid)
            socket.send_fds(control, [_NEWS.pack(_BORN, pid, 0)], [born])
            os.close(born)
        if woken in ready:
            os.read(woken, 4096)
            _reap(control)


def _live(live: Callable[[int], object], descriptor: int) -> NoReturn:
    """Be the worker that speaks over ``descriptor``; whatever happens, never go back to the nursery's loop."""
    try:
        live(descriptor)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(_NEWS.pack(_ENDED, pid, os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
