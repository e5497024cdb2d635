"""The direct mode's part of a trainer: shards exported and exchanged, and the plan made of them.

This module knows shards, what workers want, and which tensors can go by route. It must not know sessions or staging.
Shards are exchanged between trainer ranks once, and again only when one of them moved; the plan is made on rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from rankcast.errors import LimitError
from rankcast.manifest import Manifest
from rankcast.plan.columns import Destinations, Flags, Fleet, Shards, dimensions, dtype_codes
from rankcast.plan.routes import Plan, make_plan
from rankcast.trainer.group import TrainerGroup
from rankcast.trainer.sources.base import WeightSource
from rankcast.trainer.sources.exported import RankShards, export_shards
from rankcast.wire.handles import FileHandle, Handle
from rankcast.wire.reports import Wanted


class _Said(msgspec.Struct, frozen=True):
    """What one rank says of its shards: nothing new, all of them, or why it has none that can be read."""

    none: str = ""
    shards: RankShards | None = None


class DirectExports:
    """This rank's shards where they lie, and what the other ranks said of theirs."""

    def __init__(
        self, source: WeightSource, group: TrainerGroup, manifests: Sequence[Manifest], *, insist: bool
    ) -> None:
        """Move shards into shared memory, once, and exchange where they are. Collective.

        Where this machine has no room for them nothing moves, and this rank has no shards; with ``insist`` that is a
        ``LimitError`` instead.
        """
        self._group = group
        self._manifests = manifests
        self._exported = None
        self._why_none = "its source has no shards that last"
        try:
            self._exported = export_shards(source)
        except LimitError as error:
            if insist:
                raise
            self._why_none = error.message
        #: Counts the changes of where any rank's shards lie, so that a plan made before one is known to be old.
        self.generation = 0
        self._fresh = True
        self._said: list[_Said] = [_Said() for _ in manifests]
        self.refresh()

    @property
    def unusable(self) -> str:
        """Why not every trainer rank has shards that can be read where they lie; empty when they all have."""
        return next((f"trainer rank {rank}: {said.none}" for rank, said in enumerate(self._said) if said.none), "")

    def refresh(self, addresses: tuple[int, ...] | None = None) -> None:
        """Export anew what moved, copy what is packed, and tell the others. Collective.

        ``addresses`` are the source's, where they were just asked for.
        """
        if self._exported is None:
            mine = _Said(none=self._why_none)
        else:
            moved = self._exported.renew(addresses) or self._fresh
            self._exported.refresh()
            mine = _Said(shards=self._exported.rows if moved else None)
        self._fresh = False
        before = list(self._said)
        for rank, reply in enumerate(self._group.exchange(msgspec.msgpack.encode(mine), "where shards lie")):
            said = msgspec.msgpack.decode(reply, type=_Said)
            if said.none or said.shards is not None:
                self._said[rank] = said
        self.generation += self._said != before

    def say_again(self) -> None:
        """After a push that failed half-way nobody knows who heard what."""
        self._fresh = True

    @property
    def handles(self) -> list[tuple[Handle, ...]]:
        """The segments of each trainer rank."""
        return [said.shards.handles if said.shards is not None else () for said in self._said]

    @property
    def copied_bytes(self) -> int:
        """What all ranks together copy at each push: storages too small to be shared one by one."""
        return sum(said.shards.packed_bytes for said in self._said if said.shards is not None)

    def staged(self) -> dict[str, str]:
        """The tensors that some rank cannot let be read where they lie, with the reason."""
        reasons: dict[str, str] = {}
        for rank, said in enumerate(self._said):
            for name, reason in (said.shards.staged if said.shards is not None else {}).items():
                reasons.setdefault(name, f"on trainer rank {rank}: {reason}")
        return reasons

    def in_files(self) -> set[str]:
        """The tensors of which some rank holds a part in a file."""
        found: set[str] = set()
        for said, manifest in zip(self._said, self._manifests, strict=True):
            rows = said.shards or RankShards()
            files = {number for number, handle in enumerate(rows.handles) if isinstance(handle, FileHandle)}
            if files:
                lying = zip(rows.tensors, rows.segments, strict=True)
                found.update(manifest.names[tensor] for tensor, segment in lying if segment in files)
        return found

    def held(self) -> dict[str, str]:
        """The tensors whose shards have another dtype than the manifest says, with the shards' dtype."""
        found: dict[str, str] = {}
        for said, manifest in zip(self._said, self._manifests, strict=True):
            rows = said.shards or RankShards()
            for tensor, dtype in zip(rows.tensors, rows.dtypes, strict=True):
                if dtype != manifest.dtypes[tensor]:
                    found[manifest.names[tensor]] = dtype
        return found

    def columns(self, manifest: Manifest) -> Shards:
        """All ranks' shards of the tensors of ``manifest``, as columns."""
        dims = dimensions(manifest)
        parts = [self._rank_columns(rank, manifest, dims) for rank in range(len(self._said))]
        return Shards.joined(parts)

    def _rank_columns(self, rank: int, manifest: Manifest, dims: int) -> Shards:
        rows = self._said[rank].shards or RankShards()
        to_all = np.array([manifest.index.get(name, -1) for name in self._manifests[rank].names], dtype=np.int32)
        tensor = to_all[np.array(rows.tensors, dtype=np.int64)] if len(rows) else np.zeros(0, dtype=np.int32)
        count = len(rows)
        found = Shards(
            tensor=tensor,
            rank=np.full(count, rank, dtype=np.int32),
            host=np.zeros(count, dtype=np.int32),
            segment=np.array(rows.segments, dtype=np.int32),
            offset=np.array(rows.offsets, dtype=np.int64),
            starts=_padded(rows.starts, dims, 0),
            sizes=_padded(rows.sizes, dims, 1),
            strides=_padded(rows.strides, dims, 0),
            dtype=dtype_codes(rows.dtypes),
        )
        return found.take(tensor >= 0)

    def close(self) -> None:
        """Let go of what is exported; storages that moved into shared memory stay there."""
        if self._exported is not None:
            self._exported.close()


@dataclasses.dataclass(frozen=True)
class Ways:
    """Which tensors go by route, and why the others do not, by name."""

    direct: tuple[str, ...]
    reasons: dict[str, str]


def choose_ways(
    manifest: Manifest, staged: Mapping[str, str], held: Mapping[str, str], wanted: Sequence[Wanted]
) -> Ways:
    """Which tensors of ``manifest`` every worker that wants them can copy by itself from where they lie.

    ``staged`` has those that cannot be read there, with the reason, and ``held`` those whose shards have another dtype
    than the manifest. A tensor goes one way for the whole fleet. Workers that fill modules whole have all tensors of a
    module go the same.
    """
    reasons = dict(staged)
    for worker in wanted:
        for index, reason in worker.reasons:
            reasons.setdefault(manifest.names[index], reason)
        for index, destination in worker.casts:
            name, declared = manifest.names[index], manifest.dtypes[index]
            refused = uncastable(held.get(name, declared), declared, destination)
            if refused:
                reasons.setdefault(name, refused)
    spread = True
    while spread:
        spread = False
        for worker in wanted:
            if not worker.whole_modules:
                continue
            modules = [name.rpartition(".")[0] for name in worker.parameters.names]
            fills = [(manifest.names[t], modules[d]) for t, d in zip(worker.tensors, worker.destinations, strict=True)]
            mixed = {module: reasons[name] for name, module in fills if name in reasons}
            for name, module in fills:
                if module in mixed and name not in reasons:
                    reasons[name] = f"its module {module} goes through the loader: {mixed[module]}"
                    spread = True
    return Ways(tuple(name for name in manifest.names if name not in reasons), reasons)


#: The dtypes that are rounded into one another, with the bits of their exponents.
_EXPONENT_BITS = {"float64": 11, "float32": 8, "bfloat16": 8, "float16": 5}


def can_round(held: str, destination: str) -> bool:
    """Whether turning ``held`` into ``destination`` is rounding, or makes room."""
    return held in _EXPONENT_BITS and destination in _EXPONENT_BITS


def uncastable(held: str, declared: str, destination: str) -> str:
    """Why a copy must not turn ``held`` into ``destination`` on its own; empty when it may.

    ``declared`` is the dtype that the manifest says, and ``destination`` another one. A cast rounds once, between
    floating dtypes, and nobody is surprised by it: what was declared otherwise, or would overflow where the wider dtype
    has room, has to be declared.
    """
    if held != declared:
        return f"it is held as {held} and declared as {declared}, and a worker keeps {destination}: rounded twice"
    if not can_round(held, destination):
        return f"{held} is not turned into {destination} by rounding"
    if _EXPONENT_BITS[destination] < _EXPONENT_BITS[held]:
        return f"{destination} has a smaller range than {held}, so that a value might become infinite"
    return ""


def planned_shards(manifest: Manifest, shards: Shards, direct: Sequence[str]) -> Shards:
    """Those of ``shards`` that are of the tensors ``direct``, which alone are planned."""
    return shards.take(_kept(manifest, direct)[shards.tensor])


def _kept(manifest: Manifest, direct: Sequence[str]) -> Flags:
    keep = np.zeros(len(manifest), dtype=np.bool_)
    keep[[manifest.index[name] for name in direct]] = True
    return keep


def plan_of(manifest: Manifest, shards: Shards, wanted: Sequence[Wanted], direct: Sequence[str]) -> Plan:
    """The plan for all workers, whose wants come in fleet order; ``shards`` are those of the tensors ``direct``.

    Raises ``ManifestError`` naming the tensors of which a worker wants an element that no trainer rank holds.
    """
    keep = _kept(manifest, direct)
    distinct: dict[bytes, int] = {}
    traces: list[Destinations] = []
    names: list[tuple[str, ...]] = []
    of_worker: list[int] = []
    for worker in wanted:
        key = msgspec.msgpack.encode(worker)
        if key not in distinct:
            distinct[key] = len(traces)
            traces.append(_destinations(worker, manifest, keep))
            names.append(worker.parameters.names)
        of_worker.append(distinct[key])
    hosts = np.zeros(len(of_worker), dtype=np.int32)
    fleet = Fleet(tuple(traces), np.array(of_worker, dtype=np.int32), hosts, tuple(names))
    return make_plan(manifest, shards, fleet)


def _destinations(worker: Wanted, manifest: Manifest, keep: Flags) -> Destinations:
    dims = dimensions(manifest)
    tensor = np.array(worker.tensors, dtype=np.int32)
    parameter = np.array(worker.destinations, dtype=np.int32)
    found = Destinations(
        tensor=tensor,
        parameter=parameter,
        starts=_padded(worker.starts, dims, 0),
        sizes=_padded(worker.sizes, dims, 1),
        offset=np.array(worker.offsets, dtype=np.int64),
        strides=_padded(worker.strides, dims, 0),
        dtype=dtype_codes(worker.parameters.dtypes)[parameter] if len(parameter) else np.zeros(0, dtype=np.int16),
    )
    return found.take(keep[tensor]) if len(tensor) else found


def _padded(rows: Sequence[Sequence[int]], width: int, padding: int) -> np.ndarray:
    flat = [value for row in rows for value in (*row, *(padding,) * (width - len(row)))]
    return np.array(flat, dtype=np.int64).reshape(len(rows), width)
