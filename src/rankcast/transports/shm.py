"""Shared memory of one host, the owner's side: segments of anonymous or named memory, and what dead owners left.

This module knows descriptors, seals and mappings. It must not know what lies in a segment, nor how readers open one
(``shm_open``). Anonymous memory leaves nothing behind when its owner is killed; named memory is for readers in another
pid namespace, and leftovers of dead owners are swept.

A mapping is never closed by hand: ``torch.frombuffer`` keeps the mapping object alive but takes no lock on it, so that
closing it would pull the memory out from under a living tensor. Its references are dropped, and the last view frees it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from rankcast.errors import LimitError
from rankcast.process import ProcessIdentity, host_id, provably_dead, this_process
from rankcast.transports.limits import SHARED_MEMORY, check_mappings, check_room, raise_descriptor_limit
from rankcast.transports.segment import Segment
from rankcast.transports.shm_open import NAME, open_handle
from rankcast.wire.handles import FORMAT, Handle, ShmHandle, ShmNameHandle

__all__ = ["create_segment", "kind_of", "open_handle", "sweep_leftovers"]

# <linux/mman.h>, since 5.14; Python does not name it yet.
_MADV_POPULATE_WRITE = 23


def create_segment(size: int, *, kind: str = "shm") -> Segment:
    """A new segment of ``size`` bytes, zeroed and faulted in; an empty one gets one byte.

    ``kind`` is ``shm`` (anonymous, sealed against any change of size) or ``shm_name`` (a file under ``/dev/shm`` until
    ``unlink``). Raises ``LimitError`` when there is no room for it, ``ValueError`` on another kind or a negative size.
    """
    if kind not in ("shm", "shm_name"):
        raise ValueError(f"a segment is of kind shm or shm_name, not {kind!r}")
    if size < 0:
        raise ValueError(f"a segment cannot have {size} bytes")
    size = max(size, 1)
    check_room(size, kind)
    try:
        return _ShmSegment(size) if kind == "shm" else _ShmNameSegment(size)
    except OSError as fault:
        if fault.errno != errno.EMFILE:
            raise
        raise_descriptor_limit(2)
        return _ShmSegment(size) if kind == "shm" else _ShmNameSegment(size)


class _MappedSegment(Segment):
    """What both kinds share: a descriptor that stays open for readers, and one shared mapping."""

    _descriptor = -1
    _memory = None

    def _fill(self, size: int, kind: str) -> None:
        """Give the file of ``_descriptor`` its size and its pages, and map it."""
        self.size = size
        try:
            os.ftruncate(self._descriptor, size)
            # Takes the pages now: a file system without room answers here, and not with SIGBUS at the first write.
            os.posix_fallocate(self._descriptor, 0, size)
            mapping = mmap.mmap(self._descriptor, size)
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            check_mappings(1)
            check_room(size, kind)
            raise LimitError(
                f"no room for a segment of {size:,} bytes ({fault.strerror}), although it looked free a moment ago: "
                "use a smaller bucket_bytes"
            ) from None
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            # An older kernel: touch each page, so that the first push does not pay for the faults.
            memory[:: mmap.PAGESIZE].zero_()
        self._memory = memory

    def close(self) -> None:
        self.unlink()
        self._memory = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Kept as a default, because this module's own names may be gone when the interpreter exits. The kernel closes
        # the descriptor then, and the finalizer of a named segment has run.
        if not finalizing():
            self.close()


class _ShmSegment(_MappedSegment):
    handle: ShmHandle

    def __init__(self, size: int) -> None:
        # Readers come through /proc, so no child needs to inherit the descriptor.
        self._descriptor = os.memfd_create("rankcast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._descriptor, 0o600)
            self._fill(size, "shm")
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            status = os.fstat(self._descriptor)
            self.handle = ShmHandle(FORMAT, this_process(), self._descriptor, size, status.st_dev, status.st_ino)
        except BaseException:
            self.close()
            raise


class _ShmNameSegment(_MappedSegment):
    handle: ShmNameHandle
    _unlink: Callable[[], object] | None = None

    def __init__(self, size: int) -> None:
        owner = this_process()
        name = f"rankcast-{owner.pid}-{owner.start_time}-{_namespace_number(owner)}-{secrets.token_hex(8)}"
        path = f"{SHARED_MEMORY}/{name}"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        # Also runs when the interpreter exits, so that a segment nobody closed leaves no file.
        self._unlink = weakref.finalize(self, _unlink_own, path, owner.pid)
        try:
            self._fill(size, "shm_name")
            self.handle = ShmNameHandle(FORMAT, owner, name, size, os.fstat(self._descriptor).st_ino)
        except BaseException:
            self.close()
            raise

    def unlink(self) -> None:
        if self._unlink is not None:
            self._unlink()


def _unlink_own(path: str, pid: int) -> None:
    # A forked child inherits the finalizer but not the file.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _namespace_number(process: ProcessIdentity) -> int:
    """The inode number of a pid namespace, from its name ``pid:[number]``; 0 when it could not be read."""
    digits = re.search(r"\d+", process.namespace)
    return int(digits[0]) if digits else 0


def sweep_leftovers() -> list[str]:
    """Remove named segments whose owner is provably dead, and return their names.

    Files of living processes, and of processes in another pid namespace, which cannot be seen from here, stay.
    """
    here = this_process()
    swept: list[str] = []
    for path in sorted(Path(SHARED_MEMORY).glob("rankcast-*")):
        match = NAME.fullmatch(path.name)
        if match is None or not _namespace_number(here) or int(match[3]) != _namespace_number(here):
            continue
        owner = ProcessIdentity(host_id(), here.namespace, int(match[1]), int(match[2]))
        if provably_dead(owner):
            # Another sweeper may be first, and a file of another user's process is theirs to remove.
            with contextlib.suppress(OSError):
                path.unlink()
                swept.append(path.name)
    return swept


def kind_of(handle: Handle) -> str:
    """The ``kind`` with which ``create_segment`` makes segments of this sort."""
    return "shm" if isinstance(handle, ShmHandle) else "shm_name"
