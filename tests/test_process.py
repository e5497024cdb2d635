"""Who a process is, and when it may be called dead: never by mistake."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rankcast.process import ProcessIdentity, host_id, pid_namespace, provably_dead, start_time, this_process


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(timeout=60)
    process.stdin.close()


def identity(pid: int) -> ProcessIdentity:
    started = start_time(pid)
    assert started is not None
    return ProcessIdentity(host_id(), pid_namespace(), pid, started)


def test_this_process_is_alive_and_its_identity_survives_json() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert not provably_dead(me)
    assert msgspec.json.decode(msgspec.json.encode(me), type=ProcessIdentity) == me


def test_a_process_is_dead_once_it_was_killed_before_and_after_its_parent_looks(
    other: subprocess.Popen[bytes],
) -> None:
    who = identity(other.pid)
    assert not provably_dead(who)
    os.kill(other.pid, signal.SIGSTOP)
    assert not provably_dead(who)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(other.pid) is None  # a zombie
    assert provably_dead(who)
    other.wait(timeout=60)
    assert provably_dead(who)


def test_a_pid_that_was_given_to_another_process_does_not_bring_the_first_one_back() -> None:
    me = this_process()
    assert provably_dead(msgspec.structs.replace(me, start_time=me.start_time - 1))


@pytest.mark.parametrize("field", [{"host": "another"}, {"namespace": "pid:[1]"}, {"pid": 0}, {"pid": -1}])
def test_what_cannot_be_seen_from_here_is_not_called_dead(field: dict[str, object]) -> None:
    assert not provably_dead(msgspec.structs.replace(this_process(), **{"pid": 2**22 + 1, "start_time": 1, **field}))


def test_a_pid_that_no_kernel_gives_out_is_dead() -> None:
    for pid in (2**22 + 1, 2**70):
        assert provably_dead(msgspec.structs.replace(this_process(), pid=pid))


def test_a_process_without_descriptors_left_calls_nobody_dead(other: subprocess.Popen[bytes]) -> None:
    who = identity(other.pid)
    host_id(), pid_namespace()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        dead = provably_dead(who)
        with pytest.raises(OSError, match="Too many open files"):
            start_time(other.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not dead


HIDDEN = """
import os, subprocess, sys
from rankcast.process import ProcessIdentity, host_id, pid_namespace, provably_dead, start_time
namespace = pid_namespace()
parent = os.getppid()
started = start_time(parent)
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"], check=True)
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print(start_time(parent), provably_dead(ProcessIdentity(host_id(), namespace, parent, started)))
"""


def test_a_process_that_proc_hides_is_not_called_dead() -> None:
    mount = 'mount -t proc -o hidepid=2 proc /proc && umount /proc && exec "$0" "$@"'
    command = ["unshare", "-m", "sh", "-c", mount]
    if subprocess.run([*command, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("this machine does not allow a mount of one's own (unshare -m)")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")}
    done = subprocess.run(
        [*command, sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["None", "False"]


@pytest.mark.parametrize("name", [b"a) R 1 (b", b"\xff\xfe", b") Z 1 1", b""])
def test_a_command_name_cannot_confuse_the_start_time(name: bytes) -> None:
    libc = ctypes.CDLL(None)
    before, old = start_time(os.getpid()), ctypes.create_string_buffer(16)
    libc.prctl(16, old)  # PR_GET_NAME
    libc.prctl(15, name)  # PR_SET_NAME, of this thread: the main one, whose name /proc/pid/stat shows
    try:
        assert start_time(os.getpid()) == before
    finally:
        libc.prctl(15, old)
