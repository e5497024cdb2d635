"""Processes that a nursery has forked, in place of ones that load torch each for itself, which takes longer than most
of what is asked of them.

It knows how such a process is told its environment and its arguments. It must not know what it is asked for then.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from rankcast.engines.reference.nursery import Nursery


class Forked:
    """What a test asks of a ``subprocess.Popen``, of a child of ``nursery`` that was told ``arguments``."""

    def __init__(self, nursery: Nursery, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._child = nursery.spawn(theirs)
            self.pid = self._child.pid
            self.stdin = ours.makefile("wb")
            self.stdout = ours.makefile("rb", buffering=0)
        self.stdin.write(json.dumps([list(arguments), dict(environment)]).encode() + b"\n")
        self.stdin.flush()

    def wait(self, seconds: float = 60.0) -> int | None:
        """The exit code, negative for a signal; TimeoutError when there is none in time."""
        return self._child.wait(seconds)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._child.kill()


def told(descriptor: int) -> list[str]:
    """In the child, before anything else: standard input and output are the socket, and the environment is as told.

    Returns the arguments.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a nursery ignores it
    for standard in (0, 1):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    arguments, environment = json.loads(sys.stdin.readline())
    os.environ.clear()
    os.environ.update(environment)
    return [str(argument) for argument in arguments]
