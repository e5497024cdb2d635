"""One door to whatever another process exports: memory that is mapped, or a file that is read.

This module knows which transport opens which kind of handle. It must not know how any of them does.
"""

from __future__ import annotations

from rankcast.transports.file import OpenedFile
from rankcast.transports.segment import OpenedSegment
from rankcast.transports.shm import open_handle
from rankcast.wire.handles import FileHandle, Handle

Opened = OpenedSegment | OpenedFile

#: The data planes whose handles can be opened here, and those of them that are mapped, as a loader needs it.
PLANES = frozenset({"shm", "file"})
MAPPED = frozenset({"shm"})


def open_any(handle: Handle) -> Opened:
    """Open what ``handle`` describes; raises ``LocationError`` and ``LimitError`` as the transports do."""
    return OpenedFile(handle) if isinstance(handle, FileHandle) else open_handle(handle)
