"""The reader's side of shared memory: a handle is opened, compared with what it says, and mapped.

This module knows what can differ between a handle and the memory behind it, and names it. It must not know what lies in
a segment, nor how segments are made. Nothing but shared memory is ever opened, and only to be read.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
from functools import cache

import torch

from rankcast.errors import LimitError, LocationError
from rankcast.process import provably_dead
from rankcast.transports.limits import SHARED_MEMORY, check_mappings, raise_descriptor_limit
from rankcast.transports.owner import READ_ONLY, check_host, check_namespace, check_owner, refusal, status_of
from rankcast.transports.private_pages import may_have_written
from rankcast.transports.segment import OpenedSegment
from rankcast.wire.handles import FileHandle, Handle, MemoryHandle, ShmHandle, ShmNameHandle, check_format

#: Names of our files: pid, start time and pid namespace of the owner, and 64 random bits.
NAME = re.compile(r"rankcast-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}")

# Names under which the kernel shows shared memory: memfd_create, named, and anonymous shared mappings.
_SHARED = ("/memfd:", f"{SHARED_MEMORY}/", "/dev/zero")


def open_handle(handle: Handle) -> OpenedSegment:
    """Open another process's segment (or this one's own) to be read.

    Raises ``LocationError`` naming what differs when the owner is gone, restarted or not visible, access is denied, or
    the memory is not the one described, or is a file; ``LimitError`` when descriptors or mappings run out.
    """
    check_format(handle)
    if isinstance(handle, FileHandle):
        raise LocationError(
            f"descriptor {handle.descriptor} of pid {handle.owner.pid} is exported as a file, which is read and never "
            "mapped: refused as shared memory"
        )
    if handle.size < 1:
        raise LocationError(f"a handle says that its segment has {handle.size} bytes")
    check_host(handle.owner, "shared memory works on one host only")
    for again in (False, True):
        try:
            if isinstance(handle, ShmHandle):
                return _OpenedShm(handle)
            return _OpenedShmName(handle)
        except OSError as fault:
            if fault.errno == errno.EMFILE and not again:
                raise_descriptor_limit(1)
                continue
            if fault.errno == errno.ENOMEM:
                check_mappings(1)
            raise LimitError(f"a segment of {handle.size:,} bytes could not be opened: {fault}") from None
    raise AssertionError("unreachable")


class _Mapped(OpenedSegment):
    """A private, writable mapping of a read-only descriptor.

    Pages are the owner's own until this reader writes to one; the write then goes to a copy that only it sees.
    """

    _mapping: mmap.mmap | None

    def _map(self, descriptor: int, size: int, label: str) -> None:
        self.size, self.label = size, label
        # Python's mapping keeps a duplicate of the descriptor for as long as it lives: one for each segment.
        self._mapping = mmap.mmap(
            descriptor,
            size,
            flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0),
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def verify_size(self) -> None:
        if self._mapping is None:
            raise LocationError(f"{self.label} was verified after it was closed")
        now = self._mapping.size()
        if now != self.size:
            raise LocationError(f"{self.label} shrank or was replaced: it has {now} bytes now, {self.size} when opened")

    def refresh(self) -> None:
        if self._mapping is None:
            raise LocationError(f"{self.label} was refreshed after it was closed")
        # Pages that are dropped must be mapped anew, which costs as much as reading them: only where it is needed.
        if self._memory is None or may_have_written(self._memory.data_ptr(), self.size):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._memory = None
        self._mapping = None


class _OpenedShm(_Mapped):
    def __init__(self, handle: ShmHandle) -> None:
        self._handle = handle
        owner = handle.owner
        check_namespace(owner, "share it (docker run --pid=host), or export named segments (shm_name)")
        check_owner(owner)
        label = f"segment {handle.descriptor} of pid {owner.pid}"
        path = self._path = f"/proc/{owner.pid}/fd/{handle.descriptor}"
        self._known = (handle.inode, handle.size, handle.device)
        # Looked at before it is opened, because opening some devices acts on them, and again once it is.
        _check_shared(path, owner.pid, label)
        _check_status(status_of(path, owner, label), handle, label)
        try:
            descriptor = os.open(path, READ_ONLY)
        except OSError as fault:
            raise refusal(fault, owner, label) from None
        try:
            _check_status(os.fstat(descriptor), handle, label)
            self._map(descriptor, handle.size, label)
        finally:
            os.close(descriptor)

    def verify(self) -> None:
        # One call a segment in the usual case: a trainer exports hundreds. What is open here is the very memory that is
        # asked after, and so has the same size.
        if self._mapping is not None:
            with contextlib.suppress(OSError):
                now = os.stat(self._path)
                if (now.st_ino, now.st_size, now.st_dev) == self._known:
                    return
        self.verify_size()
        owner = self._handle.owner
        # What is open here cannot be swapped, but the owner may have closed it and write elsewhere by now. Whoever has
        # this very memory at this descriptor is the owner: only when nobody does it matters whether it still lives.
        try:
            _check_status(status_of(self._path, owner, self.label), self._handle, self.label)
        except LocationError:
            check_owner(owner)
            raise


class _OpenedShmName(_Mapped):
    def __init__(self, handle: ShmNameHandle) -> None:
        self._owner = handle.owner
        if NAME.fullmatch(handle.name) is None:
            raise LocationError(f"{handle.name!r} is not the name of a rankcast segment")
        label = f"segment {handle.name}"
        path = f"{SHARED_MEMORY}/{handle.name}"
        try:
            descriptor = os.open(path, READ_ONLY | os.O_NOFOLLOW)
        except OSError as fault:
            raise refusal(fault, handle.owner, label) from None
        try:
            _check_status(os.fstat(descriptor), handle, label)
            self._map(descriptor, handle.size, label)
        finally:
            os.close(descriptor)

    def verify(self) -> None:
        self.verify_size()
        if provably_dead(self._owner):
            raise LocationError(f"the owner of {self.label}, pid {self._owner.pid}, died")


def _check_shared(path: str, pid: int, label: str) -> None:
    """Refuse whatever is not shared memory, by the kernel's name for it and by the device that it lies on."""
    try:
        shown, device = os.readlink(path), os.stat(path).st_dev
    except OSError:
        return  # told apart, and named, by the stat that follows
    if not shown.startswith(_SHARED) or device not in _shared_devices(pid):
        raise LocationError(f"{label} is {shown}, which is not shared memory: refused")


def _shared_devices(pid: int) -> set[int]:
    devices = {_anonymous_device()}
    # The owner's /dev/shm is another file system than ours when it has its own mounts.
    for folder in (SHARED_MEMORY, f"/proc/{pid}/root{SHARED_MEMORY}"):
        try:
            devices.add(os.stat(folder).st_dev)
        except OSError:
            continue
    return devices


@cache
def _anonymous_device() -> int:
    descriptor = os.memfd_create("rankcast", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def _check_status(status: os.stat_result, handle: MemoryHandle, label: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise LocationError(f"{label} is not a regular file but {stat.filemode(status.st_mode)}: refused")
    if isinstance(handle, ShmHandle) and status.st_dev != handle.device:
        raise LocationError(f"{label} lies on device {status.st_dev}, its handle says {handle.device}: it was replaced")
    if status.st_ino != handle.inode:
        raise LocationError(f"{label} is inode {status.st_ino}, its handle says {handle.inode}: it was replaced")
    if status.st_size != handle.size:
        raise LocationError(f"{label} has {status.st_size} bytes, its handle says {handle.size}: it shrank or grew")
