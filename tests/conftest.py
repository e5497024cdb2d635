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
from typing import NamedTuple

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
# How long a test that runs beside another may take to clear away what it left on purpose.
PATIENCE_SECONDS = 60.0
# Files of tests that make named memory, or remove what dead owners left of it, whoever's it is.
SWEEPERS = ("test_limits.py", "test_live.py", "test_pid_namespaces.py", "test_shm.py")
# Set in each of the processes among which the tests are divided.
DIVIDED = "PYTEST_XDIST_WORKER"


class _Status(NamedTuple):
    """Parent's pid and state letter, and what is another one once the process is another or has another environment."""

    parent: int
    state: str
    incarnation: tuple[str, ...]


def _status(pid: int) -> _Status | None:
    """What the kernel says of a process, or None when it is gone."""
    # The name in parentheses may hold anything; what follows the last one may not.
    fields = _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    if len(fields) < 49:
        return None
    # When it started, and where its environment lies in its memory: both for good, until it executes another program.
    return _Status(int(fields[1]), fields[0], (fields[19], *fields[47:49]))


def _read(pid: int, what: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{what}", "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


#: Whether each living process carries this run's mark, by pid: environments are long, and two scans a test are many.
_marked: dict[int, tuple[tuple[str, ...], bool]] = {}


def _is_marked(pid: int, incarnation: tuple[str, ...]) -> bool:
    known = _marked.get(pid)
    if known is not None and known[0] == incarnation:
        return known[1]
    found = _read(pid, "environ")
    marked = f"{MARK}={os.environ[MARK]}".encode() in found.split(b"\0")
    if found:  # it has none for a moment while it executes another program
        _marked[pid] = incarnation, marked
    return marked


def _started_by_us() -> set[int]:
    """Living processes below this one, and those that inherited this run's mark and lost their parent since."""
    living: dict[int, _Status] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (status := _status(int(name))) is not None and status.state not in "ZX":
            living[int(name)] = status
    for pid in _marked.keys() - living.keys():
        del _marked[pid]
    me = os.getpid()
    ours = {pid for pid, status in living.items() if pid != me and _is_marked(pid, status.incarnation)}
    return (ours | _below({me}, {pid: status.parent for pid, status in living.items()})) - {me}


def _below(roots: set[int], parents: dict[int, int]) -> set[int]:
    found = set(roots)
    while grown := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= grown
    return found


def _lasting(allowed: set[int], ours: set[int]) -> set[int]:
    """`allowed`, whatever they started, and the tracker that Python keeps beside a process until that exits."""
    parents = {pid: status.parent for pid in ours if (status := _status(pid)) is not None}
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


def _shared_memory_files(allowed: set[int], *, orphans: bool = True) -> set[str]:
    """Names of rankcast's files in shared memory, less those whose owner is `allowed` or alive and not of this run.

    A name starts with its owner's pid; one that does not is nobody's: those, and those of the dead, are ``orphans``.
    """
    if not any(SHARED_MEMORY.glob("rankcast-*")):
        return set()
    ours = _started_by_us() | {os.getpid()}
    lasting = _lasting(allowed, ours)
    names: set[str] = set()
    for path in SHARED_MEMORY.glob("rankcast-*"):
        match = re.match(r"rankcast-(\d+)\b", path.name)
        owner = int(match[1]) if match else None
        lost = owner is None or _status(owner) is None
        if orphans if lost else owner in ours and owner not in lasting:
            names.add(path.name)
    return names


def _fail_on_leftovers(allowed_pids: set[int], allowed_files: set[str], when: str, *, orphans: bool = True) -> None:
    left = _left_running(allowed_pids)
    if left:
        _wait_until_gone(left, time.monotonic() + GRACE_SECONDS)
        left = _left_running(allowed_pids)
    described = [f"pid {pid}: {_read(pid, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')}" for pid in left]
    for pid in left:  # the next test must not pay for this one
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait_until_gone(left, time.monotonic() + GRACE_SECONDS)
    files = sorted(_shared_memory_files(allowed_pids, orphans=orphans) - allowed_files)
    deadline = time.monotonic() + (PATIENCE_SECONDS if DIVIDED in os.environ else 0.0)
    while files and time.monotonic() < deadline:  # it may be another test's, which runs beside this one
        select.select([], [], [], 0.2)
        files = sorted(_shared_memory_files(allowed_pids, orphans=orphans) - allowed_files)
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
def _nothing_outlives_a_test(request: pytest.FixtureRequest, lasting_processes: set[int]) -> Iterator[None]:
    # What the dead left says not whose it is: while others run beside this one it counts in the end.
    orphans = DIVIDED not in os.environ or request.path.name in SWEEPERS
    # Fixtures of wider scope are up by now and those of this test are not: that order is what the check rests on.
    processes = _started_by_us()
    files = _shared_memory_files(processes, orphans=orphans)
    yield
    _fail_on_leftovers(processes | lasting_processes, files, "by this test", orphans=orphans)
