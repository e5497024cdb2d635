"""The owner of what a handle describes: whether it lives, and why something of it cannot be opened.

This module knows ``/proc`` as a way to another process's descriptors. It must not know what lies behind a descriptor:
shared memory and files are told apart by those who open them.
"""

from __future__ import annotations

import errno
import os

from rankcast.errors import LocationError
from rankcast.process import ProcessIdentity, host_id, pid_namespace, start_time

#: How anything of an owner's is opened: to be read only, without waiting for a pipe and without taking a terminal.
READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def check_host(owner: ProcessIdentity, what: str) -> None:
    """Raise ``LocationError`` unless ``owner`` runs on this host; ``what`` names in the message what is of one host."""
    if owner.host != host_id():
        raise LocationError(
            f"a segment of pid {owner.pid} lies on another host (boot id {owner.host}, here {host_id()}): {what}"
        )


def check_namespace(owner: ProcessIdentity, cure: str) -> None:
    """Raise ``LocationError`` unless ``owner`` is counted in the pid namespace of this process."""
    if owner.namespace != pid_namespace():
        raise LocationError(
            f"the owner of a segment, pid {owner.pid}, lives in another pid namespace ({owner.namespace}, here "
            f"{pid_namespace()}): {cure}"
        )


def check_owner(owner: ProcessIdentity) -> None:
    """Raise ``LocationError`` unless ``owner`` lives and is the process that it says."""
    started = start_time(owner.pid)
    if started is None:
        raise LocationError(
            f"the owner of a segment, pid {owner.pid}, died or is not visible here: if it lives, run both as the same "
            "user and mount /proc without hidepid"
        )
    if started != owner.start_time:
        raise LocationError(
            f"pid {owner.pid} started at tick {started}, the owner of the segment at tick {owner.start_time}: the "
            "trainer restarted; connect again"
        )


def status_of(path: str, owner: ProcessIdentity, label: str) -> os.stat_result:
    """``os.stat`` of ``path``, something of ``owner``'s; raises what ``refusal`` makes of a failure."""
    try:
        return os.stat(path)
    except OSError as fault:
        raise refusal(fault, owner, label) from None


def refusal(fault: OSError, owner: ProcessIdentity, label: str) -> Exception:
    """The error that names why ``label`` cannot be opened; running out of descriptors stays what it is."""
    if fault.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return fault
    if fault.errno in (errno.EACCES, errno.EPERM):
        return LocationError(
            f"{label} may not be opened by uid {os.geteuid()} ({fault.strerror}): run the trainer (pid {owner.pid}) "
            "and the engine as the same user, the trainer dumpable (not from a setuid program), its pid visible"
        )
    if fault.errno == errno.ELOOP:
        return LocationError(f"{label} is a symbolic link: refused")
    return LocationError(f"{label} is gone ({fault.strerror}): its owner closed it, or it was unlinked")
