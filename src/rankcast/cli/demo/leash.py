"""Run a command that ends when whoever started it dies: ``python leash.py PID COMMAND...``.

This module knows Linux's parent-death signal, which lasts across exec, and process groups. It must not know what it
runs, and imports nothing that takes time. The signal reaches the command alone, and one that has just started others
may be gone before these know of it; so a watcher stays behind, which ends what is left of the command's process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
#: How long a command may take to end in order when its starter has died, in milliseconds.
_GRACE_MS = 5_000


def main(starter: int, command: list[str]) -> None:
    """Become ``command``, unless ``starter`` is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    with contextlib.suppress(ProcessLookupError):
        watched = os.pidfd_open(starter)
        if os.getppid() == starter:
            if os.getpgrp() == os.getpid():
                _leave_a_watcher(watched)
            os.close(watched)
            os.execv(command[0], command)


def _leave_a_watcher(starter: int) -> None:
    """Returns in the process that becomes the command; the watcher is nobody's child, and in a session of its own."""
    group = os.getpid()
    command = os.pidfd_open(group)
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        os.close(command)
        return
    os.setsid()
    if os.fork() == 0:
        # Whoever reads the command's output must not wait for this process to close it.
        kept = sorted((starter, command))
        for start, end in zip((0, *(fd + 1 for fd in kept)), (*kept, os.sysconf("SC_OPEN_MAX")), strict=True):
            os.closerange(start, end)
        _watch(starter, command, group)
    os._exit(0)


def _watch(starter: int, command: int, group: int) -> None:
    """Wait for the starter or the command to end; when it is the starter, nothing of the group is left."""
    either = select.poll()
    either.register(starter, select.POLLIN)
    either.register(command, select.POLLIN)
    if starter not in dict(either.poll()):
        return
    either.unregister(starter)
    either.poll(_GRACE_MS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
