"""What holds for every test: one thread, no proxy, no network, and nothing left behind.

It knows how to find the processes and shared-memory files of this run; it must not know what any test is about, and it
imports nothing of rankcast. Fixtures that outlive a test (a session's fleet) are allowed for: whatever they started
before the test began may stay until the run ends, and so may all its descendants.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

# Inherited by every process a test starts, so that one whose parent was killed is still known as ours.
MARK = "RANKCAST_TEST_RUN"
os.environ[MARK] = uuid.uuid4().hex
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _name in ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy"):
    os.environ.pop(_name, None)
    os.environ.pop(_name.upper(), None)
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
for _name in ("RANKCAST_SECRET", "RANKCAST_SECRET_FILE"):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(1)

settings.register_profile(
    "default",
    deadline=None,
    print_blob=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("default"), max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))

SHARED_MEMORY = Path("/dev/shm")
# How long a process that a test has told to stop may take to be gone.
GRACE_SECONDS = 10.0
# Files of tests that remove named memory of dead owners, or look for it: whoever's it is.
SWEEPERS = ("test_pid_namespaces.py", "test_shm.py")


def _status(pid: int) -> tuple[int, str] | None:
    """Parent's pid and state letter, or None when the process is gone."""
    try:
        # The name in parentheses may hold anything; what follows the last one may not.
        state, parent = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return int(parent), state


def _read(pid: int, what: str) -> bytes:
    try:
        return (Path("/proc") / str(pid) / what).read_bytes()
    except OSError:
        return b""


def _started_by_us() -> set[int]:
    """Living processes below this one, and those that inherited this run's mark and lost their parent since."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (status := _status(int(entry.name))) is not None and status[1] not in "ZX":
            parents[int(entry.name)] = status[0]
    me = os.getpid()
    mark = f"{MARK}={os.environ[MARK]}".encode()
    ours = {pid for pid in parents if pid != me and mark in _read(pid, "environ").split(b"\0")}
    return (ours | _below({me}, parents)) - {me}


def _below(roots: set[int], parents: dict[int, int]) -> set[int]:
    found = set(roots)
    while grown := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= grown
    return found


def _lasting(allowed: set[int], ours: set[int]) -> set[int]:
    """`allowed`, whatever they started, and the tracker that Python keeps beside a process until that exits."""
    parents = {pid: status[0] for pid in ours if (status := _status(pid)) is not None}
    trackers = {pid for pid in ours if b"multiprocessing.resource_tracker" in _read(pid, "cmdline")}
    return _below(allowed, parents) | trackers


def _left_running(allowed: set[int]) -> set[int]:
    ours = _started_by_us()
    return ours - _lasting(allowed, ours)


def _wait_until_gone(pids: set[int], deadline: float) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(descriptor)


def _shared_memory_files(allowed: set[int]) -> set[str]:
    """Names of rankcast's files in shared memory, less those whose owner is `allowed` or alive and not of this run.

    A name starts with its owner's pid; one that does not is nobody's and always counts.
    """
    if not any(SHARED_MEMORY.glob("rankcast-*")):
        return set()
    ours = _started_by_us() | {os.getpid()}
    lasting = _lasting(allowed, ours)
    names: set[str] = set()
    for path in SHARED_MEMORY.glob("rankcast-*"):
        match = re.match(r"rankcast-(\d+)\b", path.name)
        owner = int(match[1]) if match else None
        if owner is None or (owner in ours and owner not in lasting) or _status(owner) is None:
            names.add(path.name)
    return names


def _fail_on_leftovers(allowed_pids: set[int], allowed_files: set[str], when: str) -> None:
    left = _left_running(allowed_pids)
    if left:
        _wait_until_gone(left, time.monotonic() + GRACE_SECONDS)
        left = _left_running(allowed_pids)
    described = [f"pid {pid}: {_read(pid, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')}" for pid in left]
    for pid in left:  # the next test must not pay for this one
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait_until_gone(left, time.monotonic() + GRACE_SECONDS)
    files = sorted(_shared_memory_files(allowed_pids) - allowed_files)
    if files and os.environ.get("PYTEST_XDIST_WORKER"):
        # A file of a dead owner may be another test's, which runs beside this one and is not done with it.
        deadline = time.monotonic() + GRACE_SECONDS
        while files and time.monotonic() < deadline:
            select.select([], [], [], 0.1)
            files = sorted(_shared_memory_files(allowed_pids) - allowed_files)
    for name in files:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    if described or files:
        lines = [f"left behind {when}:", *described, *(f"{SHARED_MEMORY}/{name}" for name in files)]
        pytest.fail("\n  ".join(lines), pytrace=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file's tests stay in one process, for the sake of what they share; so do those that sweep up after the dead."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group("sweepers" if item.path.name in SWEEPERS else str(item.path)))


@pytest.fixture(scope="session")
def lasting_processes() -> set[int]:
    """Pids that may outlive a test; a fixture of wider scope adds its own here when a test asks for it half-way."""
    return set()


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_run() -> Iterator[None]:
    files = _shared_memory_files(set())
    yield
    _fail_on_leftovers(set(), files, "by the whole run")


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test(lasting_processes: set[int]) -> Iterator[None]:
    # Fixtures of wider scope are up by now and those of this test are not: that order is what the check rests on.
    processes = _started_by_us()
    files = _shared_memory_files(processes)
    yield
    _fail_on_leftovers(processes | lasting_processes, files, "by this test")
