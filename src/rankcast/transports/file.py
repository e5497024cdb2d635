"""Files as segments: a regular file that one process has open, read by another through the same descriptor.

This module knows how a file is exported, opened, compared with its record and read at an offset. It must not know what
lies in a file. A file is read with ``preadv`` and never mapped, because touching a page of a mapped file that somebody
truncates is a SIGBUS; and a handle carries no path, so that nobody can ask a worker for a file of their choice.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from rankcast.errors import LimitError, LocationError
from rankcast.process import this_process
from rankcast.transports.limits import raise_descriptor_limit
from rankcast.transports.owner import READ_ONLY, check_host, check_namespace, check_owner, refusal, status_of
from rankcast.transports.segment import torch_dtype
from rankcast.wire.handles import FORMAT, FileHandle, check_format

#: The kernel reads at most 2 GiB less a page in one call; this is a round number below that.
_READ_AT_ONCE = 2**30
#: What the kernel says when descriptors or memory run out, for this process or for all.
_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ExportedFile:
    """A file that this process keeps open for readers; ``handle`` is the record with which they open it.

    It is open until ``close``, or until nobody refers to this object any more.
    """

    handle: FileHandle

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open ``path``; raises ``LocationError`` when it cannot be read or is no regular file, ``LimitError`` when
        descriptors run out."""
        self.path = Path(path)
        self._descriptor = -1
        _with_room(self._open, str(path))

    def _open(self) -> None:
        owner = this_process()
        try:
            self._descriptor = os.open(self.path, READ_ONLY)
        except OSError as fault:
            if fault.errno in _ROOM:
                raise
            raise LocationError(f"{self.path} cannot be opened: {fault.strerror}") from None
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        try:
            _check_regular(status, str(self.path))
        except BaseException:
            self.close()
            raise
        self.handle = FileHandle(
            FORMAT, owner, self._descriptor, status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns
        )

    def verify(self) -> None:
        """Compare the file with its record, at its path too; raises ``LocationError`` naming it when it changed."""
        if self._descriptor < 0:
            raise LocationError(f"{self.path} was verified after it was closed")
        _check_status(os.fstat(self._descriptor), self.handle, str(self.path))
        try:
            status = os.stat(self.path)
        except OSError as fault:
            raise LocationError(f"{self.path} is gone ({fault.strerror}) since it was exported") from None
        _check_status(status, self.handle, str(self.path))

    def close(self) -> None:
        """Let go of the descriptor; readers that have the file open keep it. Idempotent, never raises."""
        if self._descriptor >= 0:
            self._closing()
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OpenedFile:
    """Another process's file, opened to be read; ``size`` is in bytes, ``label`` says in messages which file it is."""

    def __init__(self, handle: FileHandle) -> None:
        """Open another process's file (or this one's own) to be read.

        Raises ``LocationError`` naming the file and what differs when its owner is gone, restarted or not visible,
        access is denied, or it is not the file that was exported; ``LimitError`` when descriptors run out.
        """
        self._descriptor = -1
        check_format(handle)
        self._handle = handle
        self._source = f"/proc/{handle.owner.pid}/fd/{handle.descriptor}"
        self.size = handle.size
        check_host(handle.owner, "a descriptor can be read on one host only")
        check_namespace(handle.owner, "share it (docker run --pid=host); files are not exported by path")
        self.label = _named(self._source, f"descriptor {handle.descriptor} of pid {handle.owner.pid}")
        _with_room(self._open, self.label)

    def _open(self) -> None:
        owner = self._handle.owner
        check_owner(owner)
        # Looked at before it is opened, because opening some devices acts on them, and again once it is.
        _check_status(status_of(self._source, owner, self.label), self._handle, self.label)
        try:
            self._descriptor = os.open(self._source, READ_ONLY)
        except OSError as fault:
            raise refusal(fault, owner, self.label) from None
        try:
            _check_status(os.fstat(self._descriptor), self._handle, self.label)
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, buffer: torch.Tensor, *, name: str | None = None) -> None:
        """Fill ``buffer`` with the bytes that start ``offset`` bytes into the file.

        ``buffer`` is a dense, row-major CPU tensor of any dtype; as many bytes as it has are read. ``name`` is the
        tensor's, for messages. Raises ``LocationError`` when they do not all lie in the file, when the file ends before
        they are read (it was truncated), or when it cannot be read; what ``buffer`` holds then is not to be used.
        Raises ``ValueError`` on another kind of buffer.
        """
        what = name or "a tensor"
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(f"{what} is read into a dense CPU tensor, not one of strides {buffer.stride()}")
        size = buffer.numel() * buffer.element_size()
        self._check_range(offset, size, what, name)
        if not size:
            return
        # Not view(-1): a dimension of one element may have any stride and counts as dense all the same.
        view = buffer.detach().as_strided((buffer.numel(),), (1,)).view(torch.uint8).numpy().data
        done = 0
        while done < size:
            try:
                count = os.preadv(self._descriptor, [view[done : done + _READ_AT_ONCE]], offset + done)
            except OSError as fault:
                raise LocationError(f"{what} cannot be read from {self.label}: {fault.strerror}", tensor=name) from None
            if not count:
                raise LocationError(
                    f"{self.label} ended at byte {offset + done} while {what} was read up to byte {offset + size}: it "
                    "was truncated",
                    tensor=name,
                )
            done += count

    def tensor(self, dtype: str, shape: Sequence[int], offset: int, *, name: str | None = None) -> torch.Tensor:
        """A new dense tensor, read ``offset`` bytes into the file; raises as ``read_into`` does, before it allocates
        more than the file has."""
        kind = torch_dtype(dtype)
        if any(size < 0 for size in shape):
            raise LocationError(f"{name or 'a tensor'} in {self.label} has shape {list(shape)}", tensor=name)
        self._check_range(offset, math.prod(shape) * kind.itemsize, name or "a tensor", name)
        made = torch.empty(tuple(shape), dtype=kind)
        self.read_into(offset, made, name=name)
        return made

    def _check_range(self, offset: int, size: int, what: str, name: str | None) -> None:
        if self._descriptor < 0:
            raise LocationError(f"{what} was asked of {self.label} after it was closed", tensor=name)
        if offset < 0 or offset + size > self.size:
            raise LocationError(
                f"{what} would lie at bytes {offset}..{offset + size} of {self.label}, which has {self.size}: the plan "
                "and the file do not belong together",
                tensor=name,
            )

    def verify(self) -> None:
        """Compare the open file, and what the owner has at its descriptor, with the record once more.

        Raises ``LocationError`` naming the file when it was truncated, rewritten or replaced, or its owner is gone.
        """
        if self._descriptor < 0:
            raise LocationError(f"{self.label} was verified after it was closed")
        _check_status(os.fstat(self._descriptor), self._handle, self.label)
        check_owner(self._handle.owner)
        _check_status(status_of(self._source, self._handle.owner, self.label), self._handle, self.label)

    def verify_size(self) -> None:
        """Compare the open file with the record once more: there are few files, and one that was rewritten is another.

        Raises ``LocationError`` naming the file when it was truncated, grown or rewritten.
        """
        if self._descriptor < 0:
            raise LocationError(f"{self.label} was verified after it was closed")
        _check_status(os.fstat(self._descriptor), self._handle, self.label)

    def refresh(self) -> None:
        """Nothing to do: every read asks the file anew."""

    def close(self) -> None:
        """Let go of the file. Idempotent, never raises."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _with_room(open_it: Callable[[], None], label: str) -> None:
    """Call ``open_it``, and once more under a raised limit when it runs out of descriptors; then that is the error."""
    for again in (False, True):
        try:
            return open_it()
        except OSError as fault:
            if fault.errno == errno.EMFILE and not again:
                raise_descriptor_limit(2)
                continue
            raise LimitError(f"{label} could not be opened: {fault.strerror}") from None
    raise AssertionError("unreachable")


def _named(link: str, otherwise: str) -> str:
    """The path behind a descriptor, for messages only, with the descriptor itself."""
    try:
        return f"{os.readlink(link)} ({otherwise})"
    except OSError:
        return otherwise  # told apart, and named, by the stat that follows


def _check_regular(status: os.stat_result, label: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise LocationError(f"{label} is not a regular file but {stat.filemode(status.st_mode)}: refused")


def _check_status(status: os.stat_result, handle: FileHandle, label: str) -> None:
    _check_regular(status, label)
    if (status.st_dev, status.st_ino) != (handle.device, handle.inode):
        raise LocationError(
            f"{label} was replaced: it is inode {status.st_ino} of device {status.st_dev}, its handle says "
            f"{handle.inode} of {handle.device}"
        )
    if status.st_size != handle.size:
        raise LocationError(f"{label} has {status.st_size} bytes, its handle says {handle.size}: it shrank or grew")
    if status.st_mtime_ns != handle.mtime_ns:
        raise LocationError(
            f"{label} was rewritten: it was changed at {status.st_mtime_ns} ns, its handle says {handle.mtime_ns} ns"
        )
