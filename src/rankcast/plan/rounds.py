"""Which trainer rank stages each tensor, in which round, and where in its bucket.

This module knows sizes, holders and orders, as numbers. It must not know what a tensor is, where its bytes lie, or how
ranks talk to each other. All ranks compute the same result from the same arguments.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from rankcast.errors import ManifestError

#: Every tensor starts at a multiple of this many bytes in its bucket: enough for any dtype and for vector loads.
ALIGNMENT = 64

#: A tensor is large, for the choice of its owner, when it is more than one part in so many of what a rank owns.
LARGE = 32


class RoundsError(ManifestError, ValueError):
    """What the ranks hold, or the order in which they yield it, allows no schedule."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """A schedule of staging, the same for all ranks.

    ``rounds`` and ``offsets`` have one value a tensor: the round in which it is staged, and its byte offset in its
    owner's bucket of that round (0 for a tensor that is not staged or is empty). ``buckets[rank][round]`` is how many
    bytes of its bucket that rank fills. ``count`` is the number of rounds, 0 without tensors.
    """

    count: int
    rounds: tuple[int, ...]
    offsets: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]


def assign_owners(
    held: Sequence[Sequence[int]], sizes: Sequence[int], *, names: Sequence[str] | None = None
) -> list[int]:
    """The rank that stages each tensor: one of its holders, chosen so that ranks own about equally many bytes.

    ``held[rank]`` are the tensors that a rank holds, ``sizes`` their bytes, ``names`` only words for errors. Raises
    ``RoundsError`` when nobody holds a tensor, a rank holds one twice, or an index is out of range.
    """
    holders = _holders(held, sizes, names)
    owned = [0] * len(held)
    owners = [0] * len(sizes)
    shared = []
    for tensor, ranks in enumerate(holders):
        if len(ranks) == 1:
            owners[tensor] = ranks[0]
            owned[ranks[0]] += sizes[tensor]
        else:
            shared.append(tensor)
    # The few large ones first, largest first: the rest then evens out what they left. The rest in its own order, so
    # that ranks, which go through it together, also own about equally many bytes of every stretch of it.
    large = sum(sizes) / (LARGE * max(len(held), 1))
    shared.sort(key=lambda tensor: (-sizes[tensor] if sizes[tensor] > large else 0, tensor))
    for tensor in shared:
        owner = min(holders[tensor], key=owned.__getitem__)  # the lowest rank among equals
        owners[tensor] = owner
        owned[owner] += sizes[tensor]
    return owners


def cut_rounds(
    held: Sequence[Sequence[int]],
    owners: Sequence[int],
    sizes: Sequence[int],
    staged: Sequence[bool],
    bucket_bytes: int,
    *,
    names: Sequence[str] | None = None,
) -> Rounds:
    """Give every tensor the earliest round that keeps these promises.

    * In one round a rank's owned staged tensors take at most ``bucket_bytes``, each at a multiple of 64; a tensor
      larger than that has its owner's bucket of its round to itself. A tensor with ``staged`` False takes no bytes.
    * A tensor has one round, on all its holders, and along every rank's own order (``held[rank]``) rounds never
      decrease. So ranks whose source runs a collective for each tensor can wait for each other, and for the
      acknowledgement of an earlier round, and none waits in a circle.

    ``names`` are only words for errors. Raises ``RoundsError`` when a tensor's owner does not hold it, the arguments do
    not fit each other, or the ranks' orders of shared tensors contradict each other (naming tensors and ranks).
    """
    holders = _holders(held, sizes, names)
    if not len(owners) == len(staged) == len(sizes) or bucket_bytes <= 0:
        raise RoundsError(
            f"{len(sizes)} sizes, {len(owners)} owners and {len(staged)} staged flags with buckets of {bucket_bytes} "
            "bytes: one of each a tensor, and a positive bucket, are needed"
        )
    for tensor, owner in enumerate(owners):
        if owner not in holders[tensor]:
            raise RoundsError(f"trainer rank {owner} is to own {_named(tensor, names)} but does not hold it")
    rounds = [0] * len(sizes)
    offsets = [0] * len(sizes)
    at = [0] * len(held)  # the round in which each rank is
    fills: list[dict[int, int]] = [{} for _ in held]  # per rank: round -> bytes taken of its bucket
    # Each rank's tensors can be placed only in its order, so any order that respects all of them gives this result,
    # and as the earliest (round, fill) is never worse for a later tensor, no schedule for these owners is shorter.
    for tensor in _common_order(held, holders, names):
        ranks = holders[tensor]
        now = max([at[rank] for rank in ranks])
        if staged[tensor] and sizes[tensor]:
            fill = fills[owners[tensor]]
            now, offsets[tensor] = _fit(fill, now, sizes[tensor], bucket_bytes)
            fill[now] = offsets[tensor] + sizes[tensor]
        rounds[tensor] = now
        for rank in ranks:
            at[rank] = now
    count = max(rounds, default=-1) + 1
    buckets = tuple(tuple(fill.get(number, 0) for number in range(count)) for fill in fills)
    return Rounds(count, tuple(rounds), tuple(offsets), buckets)


def _fit(fill: dict[int, int], now: int, size: int, bucket_bytes: int) -> tuple[int, int]:
    taken = fill.get(now, 0)
    offset = -(-taken // ALIGNMENT) * ALIGNMENT
    if taken and offset + size > bucket_bytes:
        return now + 1, 0
    return now, offset


def _holders(held: Sequence[Sequence[int]], sizes: Sequence[int], names: Sequence[str] | None) -> list[list[int]]:
    """The ranks that hold each tensor, in rising order."""
    holders: list[list[int]] = [[] for _ in sizes]
    for rank, tensors in enumerate(held):
        for tensor in tensors:
            if not 0 <= tensor < len(sizes):
                raise RoundsError(f"trainer rank {rank} holds tensor {tensor}, but there are only {len(sizes)}")
            ranks = holders[tensor]
            if ranks and ranks[-1] == rank:
                raise RoundsError(
                    f"trainer rank {rank} holds {_named(tensor, names)} twice: a source yields a name once"
                )
            ranks.append(rank)
    for tensor, ranks in enumerate(holders):
        if not ranks:
            raise RoundsError(f"no trainer rank holds {_named(tensor, names)}: some rank's source must yield it")
        if sizes[tensor] < 0:
            raise RoundsError(f"{_named(tensor, names)} has {sizes[tensor]} bytes")
    return holders


def _common_order(
    held: Sequence[Sequence[int]], holders: Sequence[Sequence[int]], names: Sequence[str] | None
) -> list[int]:
    """An order of all tensors that contains every rank's own; raises ``RoundsError`` when there is none."""
    heads = [0] * len(held)
    absent = [len(ranks) for ranks in holders]  # holders that have not come as far as this tensor
    ready: deque[int] = deque()

    def arrive(rank: int) -> None:
        if heads[rank] < len(held[rank]):
            tensor = held[rank][heads[rank]]
            absent[tensor] -= 1
            if not absent[tensor]:
                ready.append(tensor)

    for rank in range(len(held)):
        arrive(rank)
    order = []
    while ready:
        tensor = ready.popleft()
        order.append(tensor)
        for rank in holders[tensor]:
            heads[rank] += 1
            arrive(rank)
    if len(order) < len(holders):
        raise RoundsError(_contradiction(held, holders, heads, names))
    return order


def _contradiction(
    held: Sequence[Sequence[int]], holders: Sequence[Sequence[int]], heads: Sequence[int], names: Sequence[str] | None
) -> str:
    """Follow "stands at a tensor for which another rank is not there yet" until a rank comes again."""
    stands = {rank: tensors[heads[rank]] for rank, tensors in enumerate(held) if heads[rank] < len(tensors)}
    rank = min(stands)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = next(other for other in holders[stands[rank]] if stands[other] != stands[rank])
    circle = path[path.index(rank) :]
    # A rank of the circle yields what it stands at before what the rank ahead of it in the circle stands at.
    lines = [
        f"trainer rank {rank} yields {_named(stands[rank], names)} before {_named(stands[circle[i - 1]], names)}"
        for i, rank in enumerate(circle)
    ]
    return (
        f"the trainer ranks yield shared tensors in contradicting orders: {'; '.join(lines)}. A source that gathers "
        "needs all holders of a tensor at it together: yield shared tensors in one order on every rank"
    )


def _named(tensor: int, names: Sequence[str] | None) -> str:
    return f"tensor {tensor}" if names is None else names[tensor]
