"""The leash: a command ends with its starter, and so does everything that it has started in its process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from end_to_end.seen import wait_until
from fleets import environment, wait_gone
from rankcast.cli.demo import leash

# What runs on the leash, says which process it is and which it has started, and hears no signal that asks it to end.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
# Ends at once when asked to, and leaves another behind.
CARELESS = STUBBORN.replace("SIG_IGN", "SIG_DFL")
STARTER = f"""
import os, subprocess, sys
leashed = [sys.executable, {leash.__file__!r}, str(os.getpid()), sys.executable, "-c", sys.argv[1]]
subprocess.Popen(leashed, process_group=0).wait()
"""


@pytest.mark.parametrize("command", [STUBBORN, CARELESS], ids=["stubborn", "careless"])
def test_nothing_of_a_command_outlives_its_starter(command: str) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, command], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert starter.stdout is not None
    with starter.stdout:
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 2
        starter.kill()
        starter.wait()
        assert wait_gone(pids) == []


def test_a_command_that_ends_by_itself_is_heard_to_end_at_once_and_leaves_no_watcher() -> None:
    before = watchers()
    command = "import os; print(os.getpid(), flush=True); os._exit(7)"
    leashed = [sys.executable, leash.__file__, str(os.getpid()), sys.executable, "-c", command]
    with subprocess.Popen(leashed, stdout=subprocess.PIPE, text=True, process_group=0, env=environment()) as child:
        assert child.stdout is not None
        said = child.stdout.read()
        assert child.wait() == 7
        # It became the command: who signals it signals that.
        assert int(said) == child.pid
    wait_until(lambda: not watchers() - before)


def watchers() -> set[int]:
    """Processes that run the leash for this one."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = (Path("/proc") / entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(leash.__file__) in words and str(os.getpid()).encode() in words:
            found.add(int(entry))
    return found
