"""Who is who: workers, what they say of themselves, and whether a set of them makes an engine.

This module knows identities and how to check them against each other. It must not know how to reach a worker, and it
computes nobody's identity from somebody else's formula: a ``Worker`` record is made by the worker's own process.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import msgspec

from rankcast.errors import EngineError
from rankcast.process import ProcessIdentity


def new_engine_id() -> str:
    """A fresh engine id: 128 random bits as 32 hex digits."""
    return secrets.token_hex(16)


def engine_rank(*, dp_index: int, world_size: int, rank: int) -> int:
    """A worker's rank in its engine, over all data-parallel replicas, from what its own configuration says.

    ``dp_index`` is the replica's lasting index: its data-parallel *rank* is reset to 0 when a dense replica is
    re-created as an engine of its own, and picks another replica's entry (vLLM 0.29 and 0.30). ``world_size`` is the
    number of workers of one replica and ``rank`` the worker's rank among them. Raises ``ValueError`` when out of range.
    """
    if dp_index < 0 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} in replica {dp_index} is not a worker's place")
    return dp_index * world_size + rank


class Worker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rollout worker's identity, as it says itself.

    ``rank`` counts the workers of the engine over all its data-parallel replicas, ``workers`` is their number; ``dp``,
    ``pp``, ``tp`` and ``ep`` are coordinates. ``device`` is a device UUID, or empty on CPU.
    """

    engine: str = msgspec.field(default_factory=new_engine_id)
    rank: int = 0
    workers: int = 1
    dp: int = 0
    pp: int = 0
    tp: int = 0
    ep: int = 0
    device: str = ""
    process: ProcessIdentity | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.workers:
            raise ValueError(f"worker rank {self.rank} is not one of the engine's {self.workers} workers")

    @property
    def label(self) -> str:
        """How messages name this worker."""
        place = f"dp {self.dp}, pp {self.pp}, tp {self.tp}"
        return f"worker {self.rank} of {self.workers} ({place}) of engine {self.engine[:8]}"


def check_engine(workers: Sequence[Worker], *, where: str) -> None:
    """Raise ``EngineError`` unless ``workers`` are exactly one engine: one id, one count, ranks 0..n-1 once each.

    ``where`` names the engine's endpoint for the message.
    """
    if not workers:
        raise EngineError(f"no worker of {where} reported: none of them can reach the report channel")
    ids = {worker.engine for worker in workers}
    counts = {worker.workers for worker in workers}
    if len(ids) > 1 or len(counts) > 1:
        raise EngineError(
            f"the workers of {where} do not agree on who they are: engine ids {sorted(ids)}, numbers of workers "
            f"{sorted(counts)}; give every worker of one engine the same engine id and count"
        )
    count = counts.pop()
    ranks = [worker.rank for worker in workers]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise EngineError(f"{where}: worker ranks {twice} are claimed by more than one worker of {count}")
    absent = missing_ranks(ranks, count)
    if absent:
        raise EngineError(
            f"{where}: {len(ranks)} of {count} workers reported; workers {absent} cannot reach the report channel"
        )


def missing_ranks(ranks: Iterable[int], workers: int) -> list[int]:
    """The ranks of an engine of ``workers`` that are not among ``ranks``."""
    return sorted(set(range(workers)) - set(ranks))
