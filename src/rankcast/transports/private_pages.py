"""Whether this process wrote into a private mapping, asked of the kernel.

This module knows the kernel's page map. It must not know what is mapped, or why. torch counts the writes that it sees
itself, and a loader may write around it (``tensor.data``, numpy): only the page table knows them all. Where it cannot
be read the answer is that there may have been a write.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

_PAGEMAP = "/proc/self/pagemap"
_ENTRY = 8
#: A page that is there, in memory or swapped out.
_HELD = np.uint64(0b11 << 62)
#: A page that is still the file's (or the shared memory's), and no copy of this process's own.
_SHARED = np.uint64(1 << 61)


def may_have_written(address: int, size: int) -> bool:
    """Whether any page of the ``size`` bytes from ``address`` on, which is mapped privately, may be a copy."""
    first = address // mmap.PAGESIZE
    count = -(-(address + size) // mmap.PAGESIZE) - first
    with contextlib.suppress(OSError):
        descriptor = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            table = os.pread(descriptor, count * _ENTRY, first * _ENTRY)
        finally:
            os.close(descriptor)
        if len(table) == count * _ENTRY:
            entries = np.frombuffer(table, dtype=np.uint64)
            return bool((((entries & _HELD) != 0) & ((entries & _SHARED) == 0)).any())
    return True
