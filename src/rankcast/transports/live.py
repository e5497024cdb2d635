"""Tensors that lie in shared memory already, found so that they can be exported where they lie.

This module knows ``/proc/self/maps`` and ``/proc/self/fd``. It must not know who shared the memory (torch's
``share_memory_`` and rankcast's own segments look alike here), nor what is done with the handle.
"""

from __future__ import annotations

import bisect
import fcntl
import functools
import os
from typing import NamedTuple

from rankcast.process import this_process
from rankcast.wire.handles import FORMAT, ShmHandle


class SharedBytes(NamedTuple):
    """Where bytes of this process lie in shared memory: ``offset`` bytes into the file open as ``descriptor``.

    ``size`` is the whole file's, in bytes; ``device`` and ``inode`` are its ``st_dev`` and ``st_ino``.
    """

    descriptor: int
    offset: int
    size: int
    device: int
    inode: int


class _Region(NamedTuple):
    start: int
    end: int
    offset: int
    device: int
    inode: int


class SharedMemoryMap:
    """The shared mappings and open descriptors of this process at the moment of construction.

    Make one for each batch of tensors: what is mapped, closed or opened later is not seen.
    """

    def __init__(self) -> None:
        self._regions = _shared_regions()
        self._starts = [region.start for region in self._regions]

    def find(self, address: int, nbytes: int) -> SharedBytes | None:
        """Where the ``nbytes`` bytes at ``address`` lie, or ``None`` when not all of them lie in one shared file.

        Also ``None`` when the file has no open descriptor in this process, because then no other process can open it.
        A descriptor that only reads does not count: it is of a reader here, a worker in its trainer's process, who
        closes it when it likes, while who shared the memory keeps one to write.
        """
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or nbytes < 1:
            return None
        region = self._regions[at]
        if address + nbytes > region.end:
            return None
        found = self._descriptors.get((region.device, region.inode))
        if found is None:
            return None
        descriptor, size = found
        offset = region.offset + address - region.start
        if offset + nbytes > size:
            return None
        return SharedBytes(descriptor, offset, size, region.device, region.inode)

    def file_at(self, address: int) -> tuple[int, int, int] | None:
        """The device and inode of the shared file mapped at ``address``, and how many bytes into it that is."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._regions[at].end:
            return None
        region = self._regions[at]
        return region.device, region.inode, region.offset + address - region.start

    @functools.cached_property
    def _descriptors(self) -> dict[tuple[int, int], tuple[int, int]]:
        wanted = {(region.device, region.inode) for region in self._regions}
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                status = os.fstat(int(name))
            except OSError:
                continue  # the descriptor of the listing itself
            key = (status.st_dev, status.st_ino)
            if key in wanted and key not in found and _writable(int(name)):
                found[key] = int(name), status.st_size
        return found


def _writable(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    except OSError:
        return False  # closed meanwhile by another thread


def handle_for(found: SharedBytes) -> ShmHandle:
    """The handle with which another process opens the file that ``found`` lies in.

    It holds for as long as the descriptor stays open, for a torch tensor: as long as its storage lives.
    """
    return ShmHandle(FORMAT, this_process(), found.descriptor, found.size, found.device, found.inode)


def _shared_regions() -> list[_Region]:
    """Shared mappings of shared memory, by address; neighbours that go on where the other ends are one."""
    regions: list[_Region] = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) < 6 or fields[1][3] != "s" or not fields[5].startswith(("/memfd:", "/dev/shm/")):
                continue
            start, end = (int(number, 16) for number in fields[0].split("-"))
            major, minor = (int(number, 16) for number in fields[3].split(":"))
            fresh = _Region(start, end, int(fields[2], 16), os.makedev(major, minor), int(fields[4]))
            last = regions[-1] if regions else None
            if (
                last is not None
                and last.end == start
                and (last.device, last.inode) == (fresh.device, fresh.inode)
                and last.offset + (last.end - last.start) == fresh.offset
            ):
                regions[-1] = last._replace(end=end)
            else:
                regions.append(fresh)
    return regions
