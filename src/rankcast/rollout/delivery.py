"""From a schedule and handles to tensors: opened, checked and cut into rounds once, used at every install.

This module knows segments and where tensors lie in them. It must not know sessions or models. Views are built once per
(schedule, handles) and reused while both stay the same, so that an install touches no metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rankcast.errors import LocationError, PayloadError
from rankcast.manifest import Manifest, TensorMeta, nbytes
from rankcast.process import ProcessIdentity
from rankcast.transports.digest import digest
from rankcast.transports.opening import Opened, open_any
from rankcast.transports.segment import OpenedSegment
from rankcast.wire.bodies import Schedule
from rankcast.wire.handles import Handle


def schedule_manifest(schedule: Schedule, *, installs: int, segments: int) -> Manifest:
    """The tensors of a schedule, once its columns are proved to fit each other.

    Raises ``PayloadError`` on uneven columns or an install that is not announced, ``LocationError`` on a segment that
    did not come, ``ManifestError`` on bad or repeated names.
    """
    count = len(schedule.names)
    for column in ("dtypes", "shapes", "rounds", "segments", "offsets"):
        if len(getattr(schedule, column)) != count:
            raise PayloadError(f"a schedule has {count} names but {len(getattr(schedule, column))} {column}")
    for name, turn, segment in zip(schedule.names, schedule.rounds, schedule.segments, strict=True):
        if not 0 <= turn < installs:
            raise PayloadError(f"{name} is to come with install {turn}, but there are {installs} installs", tensor=name)
        if not 0 <= segment < segments:
            raise LocationError(f"{name} lies in segment {segment}, but {segments} handles came", tensor=name)
    rows = zip(schedule.names, schedule.dtypes, schedule.shapes, strict=True)
    return Manifest.of(TensorMeta(name, dtype, shape) for name, dtype, shape in rows)


class Segments:
    """The segments this worker has open, by handle, over all sessions of a connection."""

    def __init__(self) -> None:
        self._open: dict[Handle, Opened] = {}
        #: Those of which a loader was given tensors, which it may have written to, at any time since they were opened.
        self._lent: set[Opened] = set()

    def use(self, handles: Sequence[Handle]) -> list[Opened]:
        """Open what is not open yet, close what is no longer named, and verify the rest; raises ``LocationError``."""
        for handle in self._open.keys() - set(handles):
            self._close(self._open.pop(handle))
        fresh = [handle for handle in handles if handle not in self._open]
        self.verify()
        for handle in fresh:
            self._open[handle] = open_any(handle)
        return [self._open[handle] for handle in handles]

    def verify(self) -> None:
        """Prove that all that is open is what it was; raises ``LocationError``.

        Of each owner's memory one segment is compared with what the owner has now, the others by their sizes: what is
        open cannot be swapped, and an owner that moves one names another handle. Every push asks this of hundreds.
        """
        owners: set[ProcessIdentity] = set()
        for handle, segment in self._open.items():
            if not isinstance(segment, OpenedSegment):
                segment.verify()
            elif handle.owner in owners:
                segment.verify_size()
            else:
                segment.verify()
                owners.add(handle.owner)

    def verify_sizes(self) -> None:
        """Raise ``LocationError`` when a segment has shrunk since it was last verified, a moment ago."""
        for segment in self._open.values():
            segment.verify_size()

    def lend(self, segments: Iterable[Opened]) -> None:
        """Remember that a loader is going to be given tensors of ``segments``."""
        self._lent.update(segments)

    def refresh(self) -> None:
        """Forget what loaders wrote into tensors that they were given, so that the owners' bytes are read next.

        Segments that no loader ever saw cost nothing here.
        """
        for segment in self._lent:
            segment.refresh()

    def close(self) -> None:
        for segment in self._open.values():
            self._close(segment)
        self._open.clear()

    def _close(self, segment: Opened) -> None:
        self._lent.discard(segment)
        segment.close()


class Delivery:
    """The tensors of one prepared session, round by round, as zero-copy views of the trainer's segments."""

    def __init__(self, schedule: Schedule, opened: Sequence[Opened], installs: int) -> None:
        self._rounds: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(installs)]
        self._segments: list[list[OpenedSegment]] = [[] for _ in range(installs)]
        self._nbytes = [0] * installs
        columns = (schedule.names, schedule.dtypes, schedule.shapes, schedule.rounds, schedule.segments)
        for name, dtype, shape, turn, index, offset in zip(*columns, schedule.offsets, strict=True):
            segment = opened[index]
            if not isinstance(segment, OpenedSegment):
                raise LocationError(f"{name} is said to lie in a file, which no loader can be given", tensor=name)
            try:
                tensor = segment.tensor(dtype, shape, offset)
            except LocationError as fault:
                raise LocationError(f"{name}: {fault.message}", tensor=name) from None
            self._rounds[turn].append((name, tensor))
            self._nbytes[turn] += nbytes(dtype, shape)
            if segment not in self._segments[turn]:
                self._segments[turn].append(segment)

    @property
    def segments(self) -> frozenset[OpenedSegment]:
        """The segments that some tensor lies in."""
        return frozenset(segment for round_ in self._segments for segment in round_)

    def count(self, turn: int) -> int:
        """How many tensors come with round ``turn``."""
        return len(self._rounds[turn])

    def nbytes(self, turn: int) -> int:
        """How many bytes come with round ``turn``."""
        return self._nbytes[turn]

    def weights(self, turn: int) -> list[tuple[str, torch.Tensor]]:
        """The tensors of round ``turn``, once their segments are proved to be the ones that were prepared.

        Raises ``LocationError`` when a segment shrank or was replaced since: nothing of the round was read then.
        """
        for segment in self._segments[turn]:
            segment.verify()
            segment.refresh()
        return self._rounds[turn]

    def digests(self, turn: int) -> list[int]:
        """Of the tensors of round ``turn`` as they lie there now, in their order."""
        return [digest(tensor) for _, tensor in self._rounds[turn]]

    def drop(self) -> None:
        """Let go of every view, so that the segments below can be unmapped."""
        self._rounds = []
