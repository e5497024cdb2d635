"""``check="digest"`` among trainer ranks: whether those that hold the same tensor, or box of one, hold the same bits.

This module knows digests by trainer rank, the weights of a source that need no other rank, and how all ranks come to
the same verdict. It must not know plans, workers or sessions. Only one of several equal tensors is ever sent, so that a
rank whose replica went its own way would otherwise be found by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from rankcast.errors import DigestError
from rankcast.trainer.exports import Exports
from rankcast.trainer.group import TrainerGroup
from rankcast.trainer.sources.base import WeightSource
from rankcast.trainer.staging import digest_of


class Differing(NamedTuple):
    """Replicas that are not equal: ``what`` names the tensor ``name``, or a box of it; digests by trainer rank."""

    what: str
    name: str
    digests: Mapping[int, int]


class _Verdict(msgspec.Struct, frozen=True):
    """Rank 0's, for all ranks: why the push is refused, and by which tensor; empty when it is not."""

    text: str = ""
    tensor: str = ""


def agree(group: TrainerGroup, differing: Iterable[Differing]) -> None:
    """Raise ``DigestError`` on every rank when ``differing``, which counts on rank 0 only, has anything. Collective.

    Every rank has heard the verdict when it is raised: nobody needs to be told of the failure.
    """
    said = group.broadcast(msgspec.msgpack.encode(_verdict(list(differing))), "whether replicas are equal")
    verdict = msgspec.msgpack.decode(said, type=_Verdict)
    if verdict.text:
        refusal = DigestError(verdict.text, tensor=verdict.tensor)
        refusal.heard = True
        raise refusal


def _verdict(differing: list[Differing]) -> _Verdict:
    if not differing:
        return _Verdict()
    first = differing[0]
    holders: dict[int, list[int]] = {}
    for rank, found in sorted(first.digests.items()):
        holders.setdefault(found, []).append(rank)
    held = " and ".join(
        f"{found:016x} on trainer rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for found, ranks in holders.items()
    )
    names = len({one.name for one in differing})
    more = f" ({names} tensors differ so)" if names > 1 else ""
    return _Verdict(
        f"replicas of {first.what} differ: its digest is {held}{more}. Only one of them would be sent: make them "
        "equal, for example by a broadcast from one rank, or let one rank alone hold the tensor",
        first.name,
    )


class Replicas:
    """The tensors that are handed over whole by several ranks, of one push after the other. Every rank has one.

    A tensor that takes a collective to be whole is no replica, and is left out. What can be read at any time is
    compared before anything is written; what a source makes as it goes, in the round that it is made for.
    """

    def __init__(self, group: TrainerGroup, source: WeightSource, exports: Exports) -> None:
        self._group = group
        self._source = source
        self._exports = exports
        # Of such a source ``read`` costs nothing until a weight is written.
        self._readable = source.stable or source.shards() is not None
        self._heard: dict[int, dict[int, int]] = {}

    @property
    def later(self) -> frozenset[int]:
        """The tensors that this rank can digest only when they are staged, as indices of ``exports.rest``."""
        return frozenset() if self._readable else self._exports.shared

    def compare(self) -> None:
        """Compare what can be read now. Collective; raises ``DigestError``, on every rank, when something differs."""
        self._heard = {}
        shared = self._exports.shared
        if not shared:
            return
        mine: dict[int, int] = {}
        for weight in self._source.read() if self._readable else ():
            index = self._exports.rest.index.get(weight.meta.name)
            if index in shared and weight.alone:
                mine[index] = digest_of(weight)
            del weight
        self._compare(mine, "digests of replicas")

    def compare_round(self, turn: int, mine: Mapping[int, int]) -> None:
        """The same for round ``turn``, of which this rank found ``mine`` while it was staged."""
        if any(self._exports.rounds.rounds[index] == turn for index in self._exports.shared):
            self._compare(mine, f"digests of replicas in round {turn}")

    def _compare(self, mine: Mapping[int, int], what: str) -> None:
        differing = []
        for rank, reply in enumerate(self._group.gather(msgspec.msgpack.encode(mine), what)):
            for index, found in msgspec.msgpack.decode(reply, type=dict[int, int]).items():
                self._heard.setdefault(index, {})[rank] = found
        for index, digests in sorted(self._heard.items()):
            if len(set(digests.values())) > 1:
                row = self._exports.rest.row(index)
                differing.append(Differing(str(row), row.name, digests))
        agree(self._group, differing)
