"""The demo's child processes: how they are started, heard, missed, and ended by pid.

This module knows processes, lines and bounded waits. It must not know what the lines say. A child that ends before it
is told to is an error that names it and shows the last lines it wrote.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rankcast.cli.demo import leash
from rankcast.errors import RankcastError

#: How long a child may take to end by itself once it is told to, before it is killed, in seconds.
LEAVE_SECONDS = 5.0
_TAIL_LINES = 20


class Children:
    """All processes that one demo starts; a context manager that ends whatever is left of them.

    ``folder`` takes what they write to their standard errors, and their temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heard: queue.Queue[tuple[str, bytes | None]] = queue.Queue()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start ``python arguments...``; it dies with this process, however that may end."""
        command = [sys.executable, "-P", leash.__file__, str(os.getpid()), sys.executable, "-P", *arguments]
        with (self._folder / f"{name}.stderr").open("wb") as errors:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(self._folder),
                process_group=0,  # Ctrl-C is for this process, which then ends its children in order
            )
        self._children[name] = child
        reader = threading.Thread(target=self._listen, args=(name, child), name=f"listens to {name}", daemon=True)
        self._readers.append(reader)
        reader.start()

    def _listen(self, name: str, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None, "a pipe was asked for"
        with child.stdout as lines:
            for line in lines:
                self._heard.put((name, line))
        self._heard.put((name, None))

    def tell(self, name: str, line: bytes) -> None:
        """Write a line to a child's standard input; raises ``RankcastError`` when it has ended."""
        pipe = self._children[name].stdin
        assert pipe is not None, "a pipe was asked for"
        try:
            pipe.write(line)
            pipe.flush()
        except OSError as error:
            raise self._ended(name) from error

    def hear(self, seconds: float, awaited: str) -> tuple[str, bytes]:
        """The next line of any child and whose it is.

        Raises ``RankcastError`` when a child ends, or when none says anything for ``seconds``, naming ``awaited``.
        """
        try:
            name, line = self._heard.get(timeout=seconds)
        except queue.Empty:
            said = "".join(f"\n{self._tail(name)}" for name in self._children)
            raise RankcastError(f"nothing was heard for {seconds:g} s while waiting for {awaited}{said}") from None
        if line is None:
            raise self._ended(name)
        return name, line

    def check(self) -> None:
        """Raise ``RankcastError`` when a child has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise self._ended(name)

    def wait(self) -> None:
        """Return only by an error: a child that ended, or an interrupt."""
        while True:
            _, line = self._heard.get()
            if line is None:
                self.check()

    def _ended(self, first: str) -> RankcastError:
        # A rank that dies takes its peers along: name them all, whoever was heard of first.
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._children[first].wait(max(0.0, deadline - time.monotonic()))
        names = [first, *(name for name, child in self._children.items() if name != first and child.poll() is not None)]
        return RankcastError("\n".join(f"{name} (pid {self._children[name].pid}) {self._how(name)}" for name in names))

    def _how(self, name: str) -> str:
        code = self._children[name].poll()
        if code is None:
            how = "closed its output"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"ended with exit code {code}"
        return f"{how}. {self._tail(name)}"

    def _tail(self, name: str) -> str:
        lines = (self._folder / f"{name}.stderr").read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n    ".join([f"The last lines of {name}:", *lines]) if lines else f"{name} wrote nothing."

    def end(self, *names: str) -> None:
        """End these children (all of them when none is named): closed input first, then SIGTERM, then SIGKILL."""
        ending = [self._children.pop(name) for name in (names or tuple(self._children))]
        for child in ending:
            with contextlib.suppress(OSError):
                if child.stdin is not None:
                    child.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
        deadline = time.monotonic() + LEAVE_SECONDS
        for child in ending:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if not self._children:
            for reader in self._readers:
                reader.join(LEAVE_SECONDS)


def _environment(folder: Path) -> dict[str, str]:
    """This process's own, with this very rankcast on the path, one thread, and ``folder`` for temporary files."""
    kept = dict(os.environ)
    source = str(Path(__file__).parents[3])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH", "")]))
    kept["TMPDIR"] = str(folder)  # torch's optimizers leave a directory there
    kept["GLOO_SOCKET_IFNAME"] = "lo"
    kept["OMP_NUM_THREADS"] = kept["MKL_NUM_THREADS"] = "1"
    return kept
