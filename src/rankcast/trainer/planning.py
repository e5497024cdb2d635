"""What rank 0 keeps of plans: which tensors go by route, the plan of those, and every worker's share.

This module joins what workers want with what trainer ranks export. It must not know sessions or how shares are sent.
A plan is made again only when a worker is new or a rank holds other boxes. Where shards merely lie elsewhere it keeps
its routes, and only the workers that read one of these get another share.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rankcast.errors import UnsupportedError
from rankcast.manifest import Manifest, listed
from rankcast.plan.columns import Flags
from rankcast.plan.routes import Plan
from rankcast.plan.schedule import Placed
from rankcast.telemetry.report import WayRow
from rankcast.trainer.direct import DirectExports, Ways, can_round, choose_ways, plan_of, planned_shards
from rankcast.trainer.engine import Engine, WorkerFault, refuse
from rankcast.trainer.fleet import Fleet
from rankcast.trainer.shares import Routes, Share, cut_share
from rankcast.wire.handles import Handle, plane_of
from rankcast.wire.reports import Fault, Wanted

#: Why nothing goes by route where that was not even tried.
UNREADABLE = "workers cannot open this trainer's memory where it lies"
_LYING = {"shm": "memory", "file": "a file"}


@dataclasses.dataclass(frozen=True, eq=False)
class _MadeOf:
    """What shares are cut from: where staged tensors lie, who was met, the plan, and each trainer rank's segments."""

    placed: Placed
    staged: tuple[Handle, ...]
    meetings: tuple[int, ...]
    plan: Plan | None
    handles: Sequence[tuple[Handle, ...]]

    def same(self, other: _MadeOf) -> bool:
        """Whether shares cut from ``other`` hold."""
        return self._stands(other) and self.plan is other.plan

    def moved_since(self, other: _MadeOf) -> Flags | None:
        """Which shards of the plan lie elsewhere than in ``other``; ``None`` when more than that has changed."""
        if not self._stands(other) or self.plan is None or other.plan is None:
            return None
        now, then = self.plan.pieces.shards, other.plan.pieces.shards
        if self.plan.crossings is not other.plan.crossings:
            return None
        # A segment may have another number and be the same, or the other way round.
        segments = np.stack([now.rank, now.segment, then.segment], axis=1)
        kinds, kind_of = np.unique(segments, axis=0, return_inverse=True)
        other_segment = np.array([self.handles[r][a] != other.handles[r][b] for r, a, b in kinds.tolist()], np.bool_)
        moved: Flags = other_segment[kind_of.reshape(-1)] | (now.offset != then.offset)
        moved |= (now.strides != then.strides).any(axis=1)
        return moved

    def _stands(self, other: _MadeOf) -> bool:
        return self.placed is other.placed and self.staged is other.staged and self.meetings == other.meetings


class Planning:
    """Shares for a fleet; ``direct`` is None in modes in which nothing goes by route."""

    def __init__(self, fleet: Fleet, manifest: Manifest, *, mode: str, transport: str) -> None:
        self.plan: Plan | None = None
        self.ways = Ways((), {})
        self._fleet = fleet
        self._manifest = manifest
        self._mode = mode
        self._transport = transport
        self._planes: tuple[str, ...] = ()
        self._direct: DirectExports | None = None
        self._shares: dict[tuple[str, int], Share] = {}
        self._rows: tuple[WayRow, ...] = ()
        self._made_of: _MadeOf | None = None
        self._planned_for: tuple[int, tuple[int, ...]] | None = None

    def use(self, direct: DirectExports) -> Ways:
        """Plan with ``direct``; returns which tensors go which way.

        Raises ``ManifestError`` when a worker wants what no rank holds, and in mode ``direct``, and for transport
        ``file``, ``UnsupportedError`` with the reasons of the tensors that cannot go that way.
        """
        if direct.unusable:
            self.ways = Ways((), dict.fromkeys(self._manifest.names, direct.unusable))
        else:
            self.ways = self._choose(direct)
        self.refuse_casts()
        insisted = {"mode": self._mode == "direct", "transport": self._transport == "file"}
        for option in (option for option, insists in insisted.items() if insists and self.ways.reasons):
            name, reason = next(iter(self.ways.reasons.items()))
            value = getattr(self, f"_{option}")
            raise UnsupportedError(
                f"{option}={value!r}, but {listed(self.ways.reasons)} cannot go by route; {name}: {reason}; "
                f"use {option}='auto'",
                tensor=name,
            )
        self._direct = direct if self.ways.direct else None
        if self._direct is not None:
            self._replan(self._direct)
        return self.ways

    def _choose(self, direct: DirectExports) -> Ways:
        staged = direct.staged()
        if self._transport != "auto":
            files = direct.in_files()
            for name in self._manifest.names:
                lies = "file" if name in files else "shm"
                if lies != self._transport:
                    staged.setdefault(name, f"transport={self._transport!r}, and it lies in {_LYING[lies]}")
        return choose_ways(self._manifest, staged, direct.held(), self._wanted())

    def refuse_casts(self) -> None:
        """Raise ``PushError`` for a tensor that is not to go by route and has another dtype than a worker's parameter.

        A loader would cast without a word, and where it does so is not ours to prove.
        """
        direct = set(self.ways.direct)
        for engine, worker in self._fleet.workers():
            for index, dtype in engine.wanted[worker.rank].casts:
                row = self._manifest.row(index)
                if row.name not in direct:
                    why = self.ways.reasons.get(row.name, UNREADABLE)
                    cure = (
                        f"declare the wire dtype at the source, for example ModuleSource(model, dtype=torch.{dtype}), "
                        f"or yield tensor.to(torch.{dtype})"
                        if can_round(row.dtype, dtype)
                        else f"give the source a {dtype} tensor of that name"
                    )
                    text = (
                        f"{row.name} is {row.dtype} at the trainer but {dtype} in the worker, and goes through the "
                        f"loader ({why}): {cure}"
                    )
                    refuse(
                        [WorkerFault(engine.where, worker.label, Fault("manifest", text, row.name))], "connect refused"
                    )

    def _wanted(self) -> list[Wanted]:
        return [engine.wanted[worker.rank] for engine, worker in self._fleet.workers()]

    def _replan(self, direct: DirectExports) -> None:
        shards = planned_shards(self._manifest, direct.columns(self._manifest), self.ways.direct)
        meetings = self._fleet.meetings
        moved = None
        if self.plan is not None and self._planned_for is not None and self._planned_for[1] == meetings:
            moved = self.plan.moved(shards)
        self.plan = moved or plan_of(self._manifest, shards, self._wanted(), self.ways.direct)
        self._planned_for = (direct.generation, meetings)

    def renew(self) -> None:
        """Bring the plan up to date when workers were met anew or shards moved since; raises as ``use`` does.

        A worker that turns out to want tensors another way than was agreed at connect is an ``UnsupportedError``.
        """
        if self._direct is None or self._planned_for == (self._direct.generation, self._fleet.meetings):
            return
        ways = self._choose(self._direct)
        if set(ways.direct) != set(self.ways.direct):
            odd = sorted(set(ways.direct) ^ set(self.ways.direct))
            reasons = {**self.ways.reasons, **ways.reasons}
            why = "; ".join(dict.fromkeys(reasons[name] for name in odd if name in reasons))
            text = f"{listed(odd)} cannot go the way that was agreed at connect"
            raise UnsupportedError(f"{text}{f' ({why})' if why else ''}: connect again", tensor=odd[0])
        self._replan(self._direct)

    def shares(self, rest: Manifest, placed: Placed, staged: tuple[Handle, ...]) -> Mapping[tuple[str, int], Share]:
        """What each worker, by engine id and rank, receives: ``rest`` by schedule, all else by program."""
        handles = self._direct.handles if self._direct is not None else []
        made_of = _MadeOf(placed, staged, self._fleet.meetings, self.plan, handles)
        if self._made_of is None or not made_of.same(self._made_of):
            self._shares = self._cut(rest, made_of)
            self._rows = self._count(rest)
            used = {handle for share in self._shares.values() for handle in share.handles}
            self._planes = tuple(sorted({plane_of(handle) for handle in used}))
            self._made_of = made_of
        return self._shares

    def _cut(self, rest: Manifest, made_of: _MadeOf) -> dict[tuple[str, int], Share]:
        made: dict[tuple[int, ...], Share] = {}
        shares: dict[tuple[str, int], Share] = {}
        moved = None if self._made_of is None else made_of.moved_since(self._made_of)
        for number, (engine, worker) in enumerate(self._fleet.workers()):
            who = (engine.id, worker.rank)
            touched = self._touched(engine, worker.rank, rest)
            if made_of.plan is not None:
                if moved is not None and not made_of.plan.reads(number, moved):
                    shares[who] = self._shares[who]
                    continue
                parameters = engine.wanted[worker.rank].parameters.names
                routes = Routes(made_of.plan.for_worker(number), parameters, made_of.handles)
                shares[who] = cut_share(rest, made_of.placed, made_of.staged, touched, routes)
                continue
            # Without routes, workers that touch the same tensors have the same share.
            if touched not in made:
                made[touched] = cut_share(rest, made_of.placed, made_of.staged, touched, None)
            shares[who] = made[touched]
        return shares

    def _touched(self, engine: Engine, rank: int, rest: Manifest) -> tuple[int, ...]:
        if self._mode == "broadcast":
            return tuple(range(len(rest)))
        touched = engine.touched[rank].names
        if rest is self._manifest:
            return touched
        names = self._manifest.names
        return tuple(rest.index[names[i]] for i in touched if names[i] in rest.index)

    @property
    def planes(self) -> tuple[str, ...]:
        """The transports of the last shares: ``shm``, ``file`` or both."""
        return self._planes

    @property
    def way_rows(self) -> tuple[WayRow, ...]:
        """How many tensors and bytes of the last shares go which way, and why."""
        return self._rows

    @property
    def direct_nbytes(self) -> int:
        """What all workers together read by route, of the last shares."""
        return sum(share.nbytes_by_install[0] for share in self._shares.values() if share.program is not None)

    def _count(self, rest: Manifest) -> tuple[WayRow, ...]:
        # Workers that touch the same tensors are counted at once: there are few kinds of them.
        kinds = Counter(self._touched(engine, worker.rank, rest) for engine, worker in self._fleet.workers())
        readers = [0] * len(rest)
        for touched, many in kinds.items():
            for index in touched:
                readers[index] += many
        way = "broadcast" if self._mode == "broadcast" else "ranklocal"
        untried = f"mode={self._mode!r}"
        if self._mode not in ("broadcast", "ranklocal"):
            untried = UNREADABLE
        tensors: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for index, name in enumerate(rest.names):
            why = self.ways.reasons.get(name, untried)
            tensors[why] += 1
            nbytes[why] += readers[index] * rest.sizes[index]
        rows = [WayRow(way, why, count, nbytes[why]) for why, count in tensors.items()]
        if self.ways.direct:
            why = "every trainer rank lets it be read where it lies, and every worker can copy it"
            rows.insert(0, WayRow("direct", why, len(self.ways.direct), self.direct_nbytes))
        return tuple(rows)
