"""Staging: one trainer rank's buffers, filled round by round from its source.

This module knows a source, the rounds and this rank's segments. It must not know other ranks, engines or sessions. A
buffer is written again only when the caller says so, which it does once every worker that reads it has answered. All
buffers are made and pre-faulted once: memory touched for the first time costs many times a warm copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from rankcast.errors import SourceError
from rankcast.manifest import Manifest
from rankcast.plan.rounds import ALIGNMENT, Rounds
from rankcast.trainer.sources.base import Weight, WeightSource
from rankcast.transports.digest import digest
from rankcast.transports.segment import Segment
from rankcast.transports.shm import create_segment
from rankcast.wire.handles import Handle


class Staging:
    """This rank's part of every push: ``begin`` once, then ``stage`` for each round in order."""

    def __init__(
        self,
        source: WeightSource,
        manifest: Manifest,
        rounds: Rounds,
        *,
        rank: int,
        held: Sequence[int],
        owners: Sequence[int],
        staged: Sequence[bool],
        bucket_bytes: int,
        kind: str,
        passed_over: Collection[str] = (),
    ) -> None:
        """Make the buffers; raises ``LimitError`` when the machine has no room for them.

        ``manifest`` is the union over all ranks; ``owners`` and ``staged`` are columns over it, ``held`` lists what
        this rank's source yields. ``passed_over`` names tensors that the source yields and nobody stages: they are not
        gathered either, on any rank.
        """
        self._source = source
        self._manifest = manifest
        self._rounds = rounds
        self._staged = tuple(staged)
        self._mine = [owner == rank and kept for owner, kept in zip(owners, staged, strict=True)]
        self._passed_over = frozenset(passed_over)
        self._expected = Counter(rounds.rounds[index] for index in held)
        self._places = [buffer_of(rounds, rank, turn, bucket_bytes) for turn in range(rounds.count)]
        sizes = [0] * BUFFERS
        for place, size in zip(self._places, rounds.buckets[rank], strict=True):
            sizes[place] = max(sizes[place], size)
        if rank == 0 and rounds.count and all(staged) and not any(map(any, rounds.buckets)):
            sizes[0] = ALIGNMENT  # tensors without bytes only: each must lie somewhere all the same
        self._buffers: list[Segment | None] = []
        try:
            for size in sizes:
                self._buffers.append(create_segment(size, kind=kind) if size else None)
        except BaseException:
            self.close()
            raise
        # A pass over a source that lies still and of which nothing is copied would only look at it once more.
        self._idle = source.stable and not any(self._mine)
        self._reader: Iterator[Weight] | None = None
        self._compared: Collection[int] = ()
        #: Digests of tensors of the last round that was staged, by index: of those that ``begin`` was given.
        self.digests: dict[int, int] = {}

    @property
    def handles(self) -> tuple[Handle | None, ...]:
        """The handles of the buffers, as ``buffer_of`` counts them; ``None`` for one that no round needs."""
        return tuple(buffer.handle if buffer is not None else None for buffer in self._buffers)

    def begin(self, compared: Collection[int] = ()) -> None:
        """Start a fresh pass over the source. Of the tensors ``compared`` digests are taken, also where another rank
        sends them, unless it takes other ranks to have them whole."""
        self.end()
        self._compared = compared
        if not self._idle:
            self._reader = iter(self._source.read())

    def stage(self, turn: int) -> int:
        """Write this rank's tensors of round ``turn`` into their buffer; returns how many bytes it wrote.

        Raises ``SourceError`` when the source deviates from its manifest.
        """
        self.digests = {}
        if self._idle:
            return 0
        buffer = self._buffers[self._places[turn]]
        written = 0
        # Never one ahead: a source may run a collective for its next tensor, which the other ranks reach only in the
        # next round, and that does not begin before this one is staged.
        for seen in range(self._expected[turn]):
            weight = self._next()
            if weight is None:
                raise SourceError(f"the source yielded {seen} of the {self._expected[turn]} tensors of round {turn}")
            index = self._index(weight)
            if self._rounds.rounds[index] != turn:
                raise SourceError(f"the source yields {weight.meta} out of its order", tensor=weight.meta.name)
            if self._staged[index]:
                # Also where another rank sends it: to have it whole may take every rank that holds it.
                weight.gather()
            if self._mine[index]:
                size = self._manifest.sizes[index]
                start = self._rounds.offsets[index]
                if buffer is not None and size:
                    weight.write(buffer.memory[start : start + size])
                written += size
            if index in self._compared and weight.alone:
                self.digests[index] = digest_of(weight)
            # Let go of this tensor before the source makes the next one.
            del weight
        if turn == self._rounds.count - 1 and (extra := self._next()) is not None:
            raise SourceError(f"the source yields {extra.meta} after its last tensor", tensor=extra.meta.name)
        return written

    def _next(self) -> Weight | None:
        assert self._reader is not None, "begin comes first"
        for weight in self._reader:
            if weight.meta.name not in self._passed_over:
                return weight
        return None

    def _index(self, weight: Weight) -> int:
        index = self._manifest.index.get(weight.meta.name)
        if index is None:
            raise SourceError(f"the source yields {weight.meta}, which its manifest lacks", tensor=weight.meta.name)
        if self._manifest.row(index) != weight.meta:
            raise SourceError(
                f"the source yields {weight.meta}, its manifest says {self._manifest.row(index)}",
                tensor=weight.meta.name,
            )
        return index

    def lying(self, index: int) -> torch.Tensor | None:
        """The bytes of tensor ``index`` in their buffer, once it is staged; ``None`` when it is not staged here."""
        buffer = self._buffers[self._places[self._rounds.rounds[index]]]
        if not self._mine[index] or buffer is None:
            return None
        start = self._rounds.offsets[index]
        return buffer.memory[start : start + self._manifest.sizes[index]]

    def end(self) -> None:
        """Leave the pass, finished or not; a generator behind it is closed."""
        close = getattr(self._reader, "close", None)
        self._reader = None
        if close is not None:
            close()

    def unlink(self) -> None:
        """Every reader has the buffers open: take away the names that some kinds of segment have."""
        for buffer in self._buffers:
            if buffer is not None:
                buffer.unlink()

    def close(self) -> None:
        """Give the buffers back."""
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()
        self._buffers = []


def digest_of(weight: Weight) -> int:
    """The digest of a weight's bytes as they would be sent; they are written to memory of its own where they must."""
    if weight.tensor is not None:
        return digest(weight.tensor)
    memory = torch.empty(weight.meta.nbytes, dtype=torch.uint8)
    weight.write(memory)
    return digest(memory)


#: Each rank's buffers: for even rounds, for odd rounds, and for rounds of one tensor that is larger than a bucket. Were
#: those rounds to share the other two, a large tensor of each parity would make both of them large.
BUFFERS = 3


def buffer_of(rounds: Rounds, rank: int, turn: int, bucket_bytes: int) -> int:
    """Which of a rank's buffers it fills in round ``turn``."""
    return BUFFERS - 1 if rounds.buckets[rank][turn] > bucket_bytes else turn % 2


def fills_again(rounds: Rounds, turn: int, bucket_bytes: int) -> bool:
    """Whether some rank fills in round ``turn`` the very buffer that it filled in the round before."""
    return turn > 0 and any(
        buffer_of(rounds, rank, turn, bucket_bytes) == buffer_of(rounds, rank, turn - 1, bucket_bytes)
        for rank in range(len(rounds.buckets))
    )


def locations(
    rounds: Rounds,
    owners: Sequence[int],
    live: Mapping[int, tuple[int, int]],
    *,
    buffers: Sequence[int],
    bucket_bytes: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where each tensor lies: columns of segment index and byte offset.

    ``buffers`` gives for each rank and each of its ``BUFFERS``, in that order, the buffer's index among all segments;
    ``live`` has (segment, offset) of the tensors that are exported as they lie.
    """
    segments: list[int] = []
    offsets: list[int] = []
    for index, owner in enumerate(owners):
        place = buffer_of(rounds, owner, rounds.rounds[index], bucket_bytes)
        segment, offset = live.get(index) or (buffers[BUFFERS * owner + place], rounds.offsets[index])
        segments.append(segment)
        offsets.append(offset)
    return tuple(segments), tuple(offsets)
