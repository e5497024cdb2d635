"""The demo's children: none outlives it, whichever way it ends, and one that dies is named with its last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleets import environment, wait_gone
from rankcast.cli.demo.processes import Children
from rankcast.errors import RankcastError

SECONDS = 60.0
ECHO = "import sys\nfor line in sys.stdin: print('heard', line, end='', flush=True)"
# Ignores SIGTERM and a closed input, and says so once it does.
STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True: signal.pause()
"""
PARENT = """
import os, sys
from pathlib import Path

from rankcast.cli.demo.command import _terminable
from rankcast.cli.demo.processes import Children
with _terminable(), Children(Path(sys.argv[1])) as children:
    for name in ("a", "b"):
        children.start(name, ["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
    pids = [int(children.hear(60, "pids")[1]) for _ in range(2)]
    print(*pids, flush=True)
    children.wait()
"""


def test_children_hear_and_are_heard(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("echo", ["-c", ECHO])
        children.tell("echo", b"one\n")
        assert children.hear(SECONDS, "an echo") == ("echo", b"heard one\n")


def test_a_child_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("trainer rank 1", ["-c", "import sys; sys.exit('the optimizer broke')"])
        with pytest.raises(
            RankcastError, match=r"(?s)trainer rank 1 \(pid \d+\) ended with exit code 1.*the optimizer"
        ):
            children.hear(SECONDS, "anything")


def test_a_child_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("the fleet", ["-c", STUBBORN])
        _, pid = children.hear(SECONDS, "its pid")
        os.kill(int(pid), signal.SIGKILL)
        with pytest.raises(RankcastError, match=r"the fleet \(pid \d+\) was killed by signal 9"):
            children.hear(SECONDS, "anything")


def test_silence_is_an_error_that_says_what_was_awaited(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("echo", ["-c", ECHO])
        with pytest.raises(
            RankcastError, match=r"nothing was heard for 0\.01 s while waiting for the end of the world"
        ):
            children.hear(0.01, "the end of the world")


def test_a_child_that_will_not_leave_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankcast.cli.demo.processes.LEAVE_SECONDS", 0.1)
    with Children(tmp_path) as children:
        children.start("stubborn", ["-c", STUBBORN])
        pid = int(children.hear(SECONDS, "its pid")[1])
    assert wait_gone([pid]) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -2), (signal.SIGKILL, -9)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_no_child_outlives_the_demo_whatever_ends_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
        assert parent.wait(SECONDS) == code
    assert wait_gone(pids) == []
