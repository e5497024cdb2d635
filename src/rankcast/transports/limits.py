"""The limits of this machine that an export can run into, asked before it does.

This module knows where Linux says how much memory, shared memory, descriptors and mappings there are. It must not know
what they are used for. Overrunning a full ``/dev/shm`` is a SIGBUS in whoever touches the page, so it is asked first.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from rankcast.errors import LimitError

#: Where named shared memory lives.
SHARED_MEMORY = "/dev/shm"

#: Descriptors left over for what the process opens besides.
SPARE_DESCRIPTORS = 64

_CGROUPS = Path("/sys/fs/cgroup")


def check_room(size: int, kind: str) -> None:
    """Raise ``LimitError`` unless a segment of ``size`` bytes fits, naming needed and free bytes and the cure.

    ``kind`` is ``shm`` (anonymous: memory and the control group's limit count) or ``shm_name`` (the size of the file
    system under ``/dev/shm`` counts as well).
    """
    if kind == "shm_name":
        room = named_room()
        if size > room:
            raise LimitError(
                f"a segment of {size:,} bytes does not fit into {SHARED_MEMORY}, which has {room:,} bytes free: give "
                "the container a larger one (docker run --shm-size=2g, or an emptyDir of medium Memory), or use a "
                "smaller bucket_bytes"
            )
    for room, where in _memory_rooms():
        if size > room:
            raise LimitError(
                f"a segment of {size:,} bytes does not fit into memory: {where} leaves {room:,} bytes: give the "
                "process more memory, or use a smaller bucket_bytes"
            )


def named_room() -> int:
    """Free bytes of ``/dev/shm``; raises ``LimitError`` when there is none."""
    try:
        free = os.statvfs(SHARED_MEMORY)
    except OSError as fault:
        raise LimitError(f"{SHARED_MEMORY} cannot be used ({fault.strerror}): mount a tmpfs there") from None
    return free.f_bavail * free.f_frsize


def _memory_rooms() -> Iterator[tuple[int, str]]:
    available = _fields(Path("/proc/meminfo")).get("MemAvailable:")
    if available is not None:
        yield available * 1024, "MemAvailable of /proc/meminfo"
    listing = _text(Path("/proc/self/cgroup"))
    if listing is not None:
        room = control_group_room(_CGROUPS, listing)
        if room is not None:
            yield room, "the memory limit of the control group"


def control_group_room(root: Path, listing: str) -> int | None:
    """Bytes that the memory control group still allows, or ``None`` when nothing limits it.

    ``root`` is where control groups are mounted, ``listing`` the text of ``/proc/<pid>/cgroup``. Versions 1 and 2 are
    read, every level up to the root counts, and page cache, which the kernel gives back, counts as free.
    """
    rooms: list[int] = []
    for line in listing.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, names = [root, root / "unified"], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            tops, names = [root / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for top in tops:
            rooms += _rooms_up(top, path, *names)
    return min(rooms, default=None)


def _rooms_up(top: Path, path: str, limit_name: str, usage_name: str) -> Iterator[int]:
    # Inside a container the path may be the host's and absent here: then only the levels that exist are read.
    here = top / path.lstrip("/")
    levels = [here, *here.parents]
    for level in levels[: levels.index(top) + 1]:
        limit, usage = _text(level / limit_name), _text(level / usage_name)
        if limit is None or usage is None or not limit.strip().isdigit():
            continue
        stat = _fields(level / "memory.stat")
        cache = [stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file")]
        yield max(int(limit) - int(usage) + sum(cache), 0)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _fields(path: Path) -> dict[str, int]:
    """The first number behind each word that starts a line of ``path``; nothing when it cannot be read."""
    rows = (line.split() for line in (_text(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def raise_descriptor_limit(needed: int) -> None:
    """Make room for ``needed`` descriptors besides those open now, by raising the soft limit towards the hard one.

    Raises ``LimitError`` naming both limits when the hard one is too low. Never lowers a limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        present = len(os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor left to list them with
        present = soft
    wanted = present + needed + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise LimitError(
            f"{needed:,} more descriptors are needed, {wanted:,} in all, but the soft limit is {soft:,} and the hard "
            f"limit {hard:,}: start the process under `ulimit -n {wanted}` (docker run --ulimit nofile={wanted})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_mappings(needed: int) -> None:
    """Raise ``LimitError`` unless this process may make ``needed`` more memory mappings."""
    allowed = _text(Path("/proc/sys/vm/max_map_count"))
    maps = _text(Path("/proc/self/maps"))
    if allowed is None or maps is None:
        return
    present = maps.count("\n")
    if present + needed > int(allowed):
        raise LimitError(
            f"{needed:,} more memory mappings are needed besides {present:,}, but vm.max_map_count is {int(allowed):,}"
            f": raise it (sysctl -w vm.max_map_count={2 * (present + needed)}), or export fewer, larger segments"
        )
