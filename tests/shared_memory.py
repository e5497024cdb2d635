"""Which names in shared memory are of this run's processes: tests of other runs may make theirs at the same moment.

It knows how rankcast names its files and how ``conftest`` marks the processes that a test starts. It must not know what
the files hold.
"""

from __future__ import annotations

import os
from pathlib import Path

# As in ``conftest``, by which every process that a test starts is known.
MARK = "RANKCAST_TEST_RUN"


def names(*, orphans: bool = True) -> set[str]:
    """The names of rankcast's files under ``/dev/shm`` whose owner is of this run, or (``orphans``) is dead.

    What the dead left says not whose it was: only tests of the files in ``conftest.SWEEPERS`` may count it, which run
    one after another.
    """
    return {path.name for path in Path("/dev/shm").glob("rankcast-*") if _counts(path.name, orphans)}


def _counts(name: str, orphans: bool) -> bool:
    owner = name.split("-")[1]
    if owner == str(os.getpid()):
        return True
    try:
        started_with = Path(f"/proc/{owner}/environ").read_bytes()
    except OSError:
        return orphans
    if not started_with:  # a process that ends
        return orphans
    return f"{MARK}={os.environ[MARK]}".encode() in started_with.split(bytes(1))
