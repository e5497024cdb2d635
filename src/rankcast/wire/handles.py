"""Handles: plain-data records with which one process opens what another exports.

This module knows the fields of each kind of handle. It must not open anything: that is a transport's work, and what it
opens it compares with the record. Every kind carries a ``format`` number, so that a record of another layout is refused
and not misread.
"""

from __future__ import annotations

import msgspec

from rankcast.errors import LocationError
from rankcast.process import ProcessIdentity

#: The layout of handle records that this version writes and reads.
FORMAT = 1


class ShmHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="shm"):
    """Anonymous shared memory, opened read-only through ``/proc/<pid>/fd/<descriptor>`` of its owner.

    ``size`` is in bytes; ``device`` and ``inode`` are the descriptor's ``st_dev`` and ``st_ino``.
    """

    format: int
    owner: ProcessIdentity
    descriptor: int
    size: int
    device: int
    inode: int


class ShmNameHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="shm_name"):
    """Named shared memory under ``/dev/shm``, for readers in another pid namespace; ``name`` has no directory part.

    ``size`` is in bytes; ``inode`` is the file's ``st_ino``. The owner unlinks it once every reader has it.
    """

    format: int
    owner: ProcessIdentity
    name: str
    size: int
    inode: int


class FileHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="file"):
    """A regular file that its owner has open, opened read-only through ``/proc/<pid>/fd/<descriptor>`` of the owner.

    ``size`` is in bytes; ``device``, ``inode`` and ``mtime_ns`` are the file's ``st_dev``, ``st_ino`` and
    ``st_mtime_ns``: a reader refuses a file that was replaced, truncated or rewritten since. No path travels, so that a
    handle never asks a worker to open what its owner could not.
    """

    format: int
    owner: ProcessIdentity
    descriptor: int
    size: int
    device: int
    inode: int
    mtime_ns: int


#: Handles of memory, which a reader maps.
MemoryHandle = ShmHandle | ShmNameHandle
Handle = MemoryHandle | FileHandle


def check_format(handle: Handle) -> None:
    """Raise ``LocationError`` when a handle is of a layout that this version does not read."""
    if handle.format != FORMAT:
        raise LocationError(
            f"a handle of format {handle.format} came, this worker reads format {FORMAT}: "
            "use the same rankcast version on the trainer and on the engines"
        )


def plane_of(handle: Handle) -> str:
    """The transport that opens a handle: ``file``, or ``shm`` for memory however it is named."""
    return "file" if isinstance(handle, FileHandle) else "shm"


def kind_of(handle: Handle) -> str:
    """The kind of a handle, as its record says it."""
    return str(handle.__struct_config__.tag)
