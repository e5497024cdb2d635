"""Storages that move into shared memory in place, once, so that workers can read parameters where they lie.

This module knows storages of CPU tensors, what keeps one from being shared, and the limits of this machine. It must not
know names, boxes or handles. Moving changes the storage's address and nothing else: every parameter, view, tied weight
and optimizer state over it goes on working, because they all refer to the storage and not to its memory. Whoever kept a
bare address (``data_ptr()``, a numpy array over the tensor) is left with the old one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

import torch

from rankcast.errors import LimitError
from rankcast.manifest import listed
from rankcast.transports.limits import SHARED_MEMORY, check_mappings, check_room, named_room, raise_descriptor_limit
from rankcast.transports.live import SharedMemoryMap

#: Storages below this size are not shared one by one: a descriptor and a mapping each would cost more than a copy.
SMALL = 64 * 1024
#: A checkpoint that was loaded without a copy lies in a private mapping of a file so called, and nobody else has it.
_CHECKPOINTS = (".safetensors",)


class Sharing(NamedTuple):
    """What became of the storages that were asked to be shared.

    ``moved`` counts those that moved into shared memory now, ``moved_bytes`` their bytes, ``already`` those that lay
    there before. ``reasons`` says of each other one, by the storage's ``_cdata``, why it stays where it is.
    """

    moved: int
    moved_bytes: int
    already: int
    reasons: dict[int, str]


def share_in_place(tensors: Iterable[torch.Tensor]) -> Sharing:
    """Move the storage of each of ``tensors`` into shared memory in place; each storage once, whole.

    The old memory is freed storage by storage, so that at no time more than the largest is there twice. A storage that
    cannot be shared stays as it is, with a reason: none of its tensors' fault is raised. Raises ``LimitError`` naming
    the limit and the cure, before anything has moved, when ``/dev/shm``, memory, descriptors or mappings do not
    suffice; the soft limit of descriptors is raised as far as it must be.
    """
    storages: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage()._cdata, tensor)
    shared = SharedMemoryMap()
    checkpoints: _CheckpointMap | None = None
    reasons: dict[int, str] = {}
    movable: list[torch.UntypedStorage] = []
    already = 0
    for key, tensor in storages.items():
        storage = tensor.untyped_storage()
        reason = _unshareable(tensor)
        if reason is None and storage.nbytes():
            if shared.find(storage.data_ptr(), storage.nbytes()) is not None:
                already += 1
                continue
            if storage.is_shared():
                reason = (
                    "its memory is mapped, and no open descriptor leads to it (torch.from_file, or shared under the "
                    "file_system strategy and not file_descriptor): give it memory of its own "
                    "(parameter.data = parameter.data.clone())"
                )
            elif not storage.resizable():
                checkpoints = checkpoints or _CheckpointMap()
                if not checkpoints.has(storage.data_ptr(), storage.nbytes()):
                    reason = (
                        "its memory is lent by or to another library (numpy, .numpy(), a mapped file), which would be "
                        "left with a stale copy: give it memory of its own (parameter.data = parameter.data.clone())"
                    )
            if reason is None:
                movable.append(storage)
        if reason is not None:
            reasons[key] = reason
    _check_limits(movable)
    for storage in movable:
        # Not share_memory_: under torch's file_system strategy that leaves a named file and keeps no descriptor.
        storage._share_fd_cpu_()
    return Sharing(len(movable), sum(storage.nbytes() for storage in movable), already, reasons)


def _unshareable(tensor: torch.Tensor) -> str | None:
    if tensor.device.type != "cpu":
        return f"it is on {tensor.device}, not in memory of the host"
    if torch.cuda.is_available() and tensor.is_pinned():
        return "its memory is pinned, which it would not be after a move"
    return None


def _check_limits(storages: list[torch.UntypedStorage]) -> None:
    if not storages:
        return
    sizes = [storage.nbytes() for storage in storages]
    room = named_room()
    if sum(sizes) > room:
        raise LimitError(
            f"{len(sizes):,} storages of {sum(sizes):,} bytes are to lie in {SHARED_MEMORY}, which has {room:,} bytes "
            "free: give the container a larger one (docker run --shm-size=..., or an emptyDir of medium Memory), or "
            "push with mode='ranklocal', which needs room for two buckets only; nothing was moved"
        )
    check_room(max(sizes), "shm")
    check_mappings(len(sizes))
    raise_descriptor_limit(len(sizes))


class _CheckpointMap:
    """The private mappings of checkpoint files that this process has at the moment of construction."""

    def __init__(self) -> None:
        regions: list[tuple[int, int]] = []
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(maxsplit=5)
                private = len(fields) == 6 and fields[1][3] == "p"
                if private and fields[5].removesuffix(" (deleted)").endswith(_CHECKPOINTS):
                    start, end = (int(number, 16) for number in fields[0].split("-"))
                    regions.append((start, end))
        self._regions = sorted(regions)

    def has(self, address: int, size: int) -> bool:
        """Whether all of the ``size`` bytes at ``address`` lie in one of the files."""
        at = bisect.bisect_right(self._regions, (address, 2**64)) - 1
        return at >= 0 and address + size <= self._regions[at][1]


def told(reasons: dict[str, str]) -> str:
    """Reasons by name as one line: each reason once, with the first names that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{listed(names)}: {reason}" for reason, names in by_reason.items())
