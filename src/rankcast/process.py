"""Who a process is on its host, read from ``/proc``.

This module knows the host's boot id and a process's start time, which together name a process for good (a bare pid is
reused). It must not know what anyone does with that knowledge.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process of one boot of one host, as its pid namespace numbers it.

    ``start_time`` is in clock ticks since boot (field 22 of ``/proc/pid/stat``).
    """

    host: str
    namespace: str
    pid: int
    start_time: int


@functools.cache
def host_id() -> str:
    """The kernel's boot id: equal for every process and container of one running host, and for no other host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since boot, or ``None`` when no such living process is visible here.

    Raises ``OSError`` when it cannot be told, for want of descriptors: that must not read as a death.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name, in parentheses, may itself hold spaces, parentheses and any byte: count from the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in b"ZX" else int(fields[19])


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    pid = os.getpid()
    started = start_time(pid)
    if started is None:
        raise OSError(f"/proc/{pid}/stat cannot be read: mount /proc (hidepid must allow a process to see itself)")
    return ProcessIdentity(host=host_id(), namespace=pid_namespace(), pid=pid, start_time=started)


def provably_dead(process: ProcessIdentity) -> bool:
    """True only when ``process`` lived where this process can see it and no longer does.

    From another host, or from another pid namespace (a container's), an absent pid proves nothing: then False. So it is
    when ``/proc`` hides a process (hidepid) that answers to a signal.
    """
    if process.host != host_id() or process.namespace != pid_namespace() or process.pid < 1:
        return False
    try:
        started = start_time(process.pid)
        if started is None:
            os.kill(process.pid, 0)  # signal 0 only asks whether it is there; one of our own is a zombie
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return started != process.start_time


@functools.cache
def pid_namespace() -> str:
    """The name of the pid namespace in which this process's pids are counted."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"
