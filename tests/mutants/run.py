"""Runs chosen tests once for each mutant, each in a forked process of its own: ``python run.py FOLDER TEST ...``.

It knows how to fork, wait and keep what was said. It must not know what a mutant is or which tests there are. What
takes long, importing torch, is done once, before the first fork. For each mutant FOLDER gets a file NAME with what
pytest said and, on its last line, its exit status; the name ``none`` stands for no mutant.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

# Only for the time that it takes.
import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401

from mutants.plugin import VARIABLE
from mutants.registry import MUTANTS

AT_ONCE = 2
SECONDS = 120.0
OPTIONS = ["-x", "-q", "-p", "mutants.plugin", "-p", "no:cacheprovider", "--assert=plain", "--tb=line"]


def main(folder: Path, tests: list[str]) -> None:
    waiting = ["none", *MUTANTS]
    running: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            pid = _fork(waiting.pop(0), folder, tests)
            running[os.pidfd_open(pid)] = pid
        over, _, _ = select.select(list(running), [], [], SECONDS)
        for descriptor in over or list(running):
            if not over:
                os.kill(running[descriptor], signal.SIGKILL)
            os.waitpid(running.pop(descriptor), 0)
            os.close(descriptor)


def _fork(name: str, folder: Path, tests: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        with (folder / name).open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            if name != "none":
                os.environ[VARIABLE] = name
            status = pytest.main([*OPTIONS, *tests])
            sys.stdout.flush()
            os.write(1, f"\n{int(status)}\n".encode())
    finally:
        os._exit(int(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
