"""What one sync of a model would cost in each mode: calls, bytes that workers read, bytes that trainer ranks send.

This module joins a simulated trainer and rollout with the planner's own steps (``make_plan``, ``cut_rounds``). It must
not know how messages look (``requests``) or how anything is printed. ``broadcast`` and ``per_layer`` are how a trainer
that gathers feeds an engine's loader today: every layer's experts group by group, or one list of entries a layer, and
dense tensors in buckets; ``ranklocal`` and ``direct`` are rankcast's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankcast.plan.columns import Fleet, Ints
from rankcast.plan.families import family_of
from rankcast.plan.grids import RolloutGrid, TrainerGrid
from rankcast.plan.rounds import Rounds, assign_owners, cut_rounds
from rankcast.plan.routes import Plan, make_plan
from rankcast.plan.simulated_rollout import rollout_fleet
from rankcast.plan.simulated_trainer import RANKS_PER_HOST, holders, trainer_shards
from rankcast.plan.tensors import Tensors, tensors_of

MODES = ("broadcast", "per_layer", "ranklocal", "direct")


@dataclasses.dataclass(frozen=True, eq=False)
class Flushes:
    """The update calls of a gathering trainer, as ranges of tensors: dense buckets, and a layer's experts by group."""

    dense: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def broadcast(self) -> int:
        return len(self.dense) + sum(map(len, self.layers))

    @property
    def per_layer(self) -> int:
        return len(self.dense) + len(self.layers)


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated sync: the plan of ``direct``, the rounds and owners of ``ranklocal``, the flushes of the others.

    ``touched`` has for each distinct trace the tensors, sorted, of which such a worker takes anything.
    ``seconds_planning`` is what ``make_plan`` and the plan's hash took, ``seconds_columns`` the making of its columns.
    """

    tensors: Tensors
    trainer: TrainerGrid
    rollout: RolloutGrid
    plan: Plan
    owners: Ints
    rounds: Rounds
    flushes: Flushes
    touched: tuple[Ints, ...]
    seconds_columns: float
    seconds_planning: float

    def worker_calls(self) -> dict[str, int]:
        """Update calls that carry data, summed over all workers, by mode."""
        workers = len(self.plan.fleet)
        when = np.array(self.rounds.rounds, dtype=np.int64)
        calls = np.array([len(np.unique(when[own])) for own in self.touched], dtype=np.int64)
        return {
            "broadcast": self.flushes.broadcast * workers,
            "per_layer": self.flushes.per_layer * workers,
            "ranklocal": int(calls[self.plan.fleet.trace_of_worker].sum()),
            "direct": int((np.diff(self.plan.bounds) > 0).sum()),
        }

    def worker_bytes(self) -> dict[str, Ints]:
        """int64 [workers] by mode: what each worker is told to read."""
        sizes = self._sizes
        dense, expert = self._dense, ~self._dense
        whole = [int(sizes[own].sum()) for own in self.touched]
        listed = [int(sizes[dense].sum() + sizes[own[expert[own]]].sum()) for own in self.touched]
        of = self.plan.fleet.trace_of_worker
        return {
            "broadcast": np.full(len(of), int(sizes.sum()), dtype=np.int64),
            "per_layer": np.array(listed, dtype=np.int64)[of],
            "ranklocal": np.array(whole, dtype=np.int64)[of],
            "direct": self.plan.worker_bytes,
        }

    def sender_bytes(self) -> dict[str, Ints]:
        """int64 [trainer ranks] by mode: what workers read out of each rank's memory."""
        times = np.bincount(self.plan.fleet.trace_of_worker, minlength=len(self.touched))
        readers = np.zeros(len(self._sizes), dtype=np.int64)
        for count, own in zip(times.tolist(), self.touched, strict=True):
            readers[own] += count
        workers = len(self.plan.fleet)
        counts = {"broadcast": np.full_like(readers, workers), "ranklocal": readers}
        counts["per_layer"] = np.where(self._dense, workers, readers)
        direct = np.zeros(self.trainer.ranks, dtype=np.int64)
        direct[: len(self.plan.sender_bytes)] = self.plan.sender_bytes
        sent = {"direct": direct}
        for mode, count in counts.items():
            sent[mode] = np.zeros(self.trainer.ranks, dtype=np.int64)
            np.add.at(sent[mode], self.owners, count * self._sizes)
        return {mode: sent[mode] for mode in MODES}

    @property
    def _sizes(self) -> Ints:
        return np.array(self.tensors.manifest.sizes, dtype=np.int64)

    @property
    def _dense(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        dense: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.tensors.expert < 0
        return dense


def simulate(config: Mapping[str, Any], trainer: TrainerGrid, rollout: RolloutGrid, bucket_bytes: int) -> Simulation:
    """Plan a sync of the model with this ``config.json`` in every mode, without any process.

    Raises ``UnsupportedError`` for a model or a grid that cannot be planned, naming what does not divide what.
    """
    began = time.perf_counter()
    tensors = tensors_of(family_of(config))
    shards = trainer_shards(tensors, trainer)
    fleet = rollout_fleet(tensors, rollout, first_host=-(-trainer.ranks // RANKS_PER_HOST))
    ready = time.perf_counter()
    plan = make_plan(tensors.manifest, shards, fleet)
    assert plan.hash, "a plan without its hash is not ready to be sent"
    planned = time.perf_counter()
    held = holders(tensors, trainer)
    sizes = tensors.manifest.sizes
    owners = assign_owners(held, sizes, names=tensors.manifest.names)
    rounds = cut_rounds(held, owners, sizes, [True] * len(sizes), bucket_bytes, names=tensors.manifest.names)
    return Simulation(
        tensors,
        trainer,
        rollout,
        plan,
        np.array(owners, dtype=np.int64),
        rounds,
        _flushes(tensors, sizes, trainer, bucket_bytes),
        touched_by(fleet),
        ready - began,
        planned - ready,
    )


def touched_by(fleet: Fleet) -> tuple[Ints, ...]:
    """For each distinct trace the tensors that it takes anything of, sorted."""
    return tuple(np.unique(trace.tensor).astype(np.int64) for trace in fleet.traces)


def _flushes(tensors: Tensors, sizes: Sequence[int], trainer: TrainerGrid, bucket_bytes: int) -> Flushes:
    dense = _buckets(np.flatnonzero(tensors.expert < 0).tolist(), sizes, bucket_bytes)
    expert = np.flatnonzero(tensors.expert >= 0)
    layers: list[tuple[tuple[int, ...], ...]] = []
    groups = trainer.ep if tensors.family.experts else 1
    group = tensors.expert[expert] // max(tensors.family.experts // groups, 1)
    for layer in np.unique(tensors.layer[expert]).tolist():
        here = tensors.layer[expert] == layer
        parts = (expert[here & (group == number)].tolist() for number in range(groups))
        layers.append(tuple(bucket for part in parts for bucket in _buckets(part, sizes, bucket_bytes)))
    return Flushes(tuple(dense), tuple(layers))


def _buckets(rows: list[int], sizes: Sequence[int], bucket_bytes: int) -> list[tuple[int, ...]]:
    """``rows`` in order, cut where the next one no longer fits; one that never does has a bucket of its own."""
    found: list[tuple[int, ...]] = []
    current: list[int] = []
    filled = 0
    for row in rows:
        if current and filled + sizes[row] > bucket_bytes:
            found.append(tuple(current))
            current, filled = [], 0
        current.append(row)
        filled += sizes[row]
    return [*found, tuple(current)] if current else found
