"""Run a command that the kernel ends when whoever started it dies: ``python leash.py PID COMMAND...``.

This module knows Linux's parent-death signal, which lasts across exec. It must not know what it runs, and imports
nothing that takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Become ``command``, unless ``parent`` is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == parent:
        os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
