"""The trace: every write of a loader into the parameters it loads, as columns.

This module knows which element of which tensor went where, and what follows from that: touched and ignored tensors,
gaps, overlaps and casts. It must not know how a trace is made (``record``), and it needs no torch. Offsets and strides
count elements. Source coordinates are those of the whole checkpoint tensor; destination coordinates are storage, from
the parameter's first element.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from rankcast.errors import ManifestError, UnsupportedError
from rankcast.manifest import Manifest, listed
from rankcast.trace.cells import View
from rankcast.trace.changes import changes
from rankcast.trace.coverage import Coverage
from rankcast.trace.fingerprint import NOTHING_SAID, Fingerprint


class Copies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copies into destinations, one value a copy; ``steps`` numbers all writes in order, fills included.

    Where ``throughs`` is empty the bytes are those of one tensor: ``sources`` has its index in the manifest and
    ``source_offsets`` and ``source_strides`` say which of its elements. Otherwise the loader computed what it copied:
    ``throughs`` names the operator, ``sources`` all tensors that went in, and offset and strides mean nothing.
    """

    steps: tuple[int, ...] = ()
    sources: tuple[tuple[int, ...], ...] = ()
    source_dtypes: tuple[str, ...] = ()
    source_offsets: tuple[int, ...] = ()
    source_strides: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    destinations: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    throughs: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


class Fills(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Writes of a constant into destinations (padding), one value a fill; ``values`` are Python numbers as text."""

    steps: tuple[int, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    destinations: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    values: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


class Cast(NamedTuple):
    """A copy that changes the dtype: tensor ``name`` goes from dtype ``source`` to ``destination`` in ``parameter``."""

    name: str
    source: str
    destination: str
    parameter: str


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """What one ``load_weights`` does with the tensors of ``manifest``.

    ``destinations`` are the parameters, each storage region once, ``layouts`` their strides; ``aliases`` pairs the
    name of a tied parameter with the one that stands for it. ``fingerprint`` is what the engine said of itself then:
    once it says something else, this is no longer what its loader does.
    """

    manifest: Manifest
    destinations: Manifest
    layouts: tuple[tuple[int, ...], ...]
    aliases: tuple[tuple[str, str], ...]
    copies: Copies
    fills: Fills
    fingerprint: Fingerprint = NOTHING_SAID

    def to_json(self) -> bytes:
        """The whole trace as JSON, which ``from_json`` makes an equal one of."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Trace:
        """The trace that ``to_json`` wrote; raises ``ManifestError`` when ``text`` is something else."""
        try:
            trace = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as fault:
            raise ManifestError(f"this is no trace: {fault}") from None
        for manifest in (trace.manifest, trace.destinations):
            manifest.check()
        return trace

    def diff(self, later: Trace) -> list[str]:
        """In words, one line each, what ``later`` has otherwise than this trace; empty when they are equal."""
        return changes(self, later)

    @functools.cached_property
    def hash(self) -> str:
        """A digest of the whole trace, equal on every process whose loader does the same."""
        return hashlib.blake2b(self.to_json(), digest_size=16).hexdigest()

    def touched(self) -> tuple[int, ...]:
        """Indices into the manifest, sorted, of the tensors that go into some destination."""
        return tuple(sorted({index for sources in self.copies.sources for index in sources}))

    def ignored(self) -> tuple[int, ...]:
        """Indices into the manifest, sorted, of the tensors that the loader was given and copied nothing of."""
        return tuple(sorted(set(range(len(self.manifest))) - set(self.touched())))

    def casts(self) -> list[Cast]:
        """The copies whose tensor, as the manifest has it, is of another dtype than the destination."""
        found: dict[Cast, None] = {}
        for sources, destination in zip(self.copies.sources, self.copies.destinations, strict=True):
            target = self.destinations.row(destination)
            for index in sources:
                given = self.manifest.row(index)
                if given.dtype != target.dtype:
                    found[Cast(given.name, given.dtype, target.dtype, target.name)] = None
        return list(found)

    def missing(self, required: Collection[str] | None = None) -> list[str]:
        """One line for each destination of which some elements are written by nothing: name, first gap, how many.

        ``required`` names the destinations that count, by any of their names; ``None``: all of them.
        A fill covers what it fills (padding), unless a copy overlaps it: then it only cleared the parameter before
        parts of it were copied, and what no copy reached is missing. Raises ``UnsupportedError`` when the writes are
        too finely scattered to be counted.
        """
        counted = set(self.destinations.names if required is None else required)
        counted.update(name for alias, name in self.aliases if alias in counted)
        lines = []
        for index, name in enumerate(self.destinations.names):
            if name in counted and (gap := self._coverage(index).gap) is not None:
                lines.append(
                    f"{self.destinations.row(index)}: {gap.elements:,} of {gap.total:,} elements are filled by no "
                    f"tensor of the update, the first of them {gap.box}"
                )
        return lines

    def untouched(self, names: Collection[str]) -> tuple[str, ...]:
        """Those destinations of ``names`` of which some elements, or all, are written by nothing."""
        found = []
        for index, name in enumerate(self.destinations.names):
            if name not in names:
                continue
            try:
                written = (self._copies_of(index) or self._fills_of(index)) and self._coverage(index).gap is None
            except UnsupportedError:  # too scattered to be counted: better named in vain than not at all
                written = False
            if not written:
                found.append(name)
        return tuple(found)

    def overlaps(self) -> list[str]:
        """One line for each destination of which elements are copied to twice, or filled after they were copied."""
        lines = []
        for index in range(len(self.destinations)):
            copies, fills = self._copies_of(index), self._fills_of(index)
            if len(copies) + len(fills) < 2:
                continue
            coverage, row = self._coverage(index), self.destinations.row(index)
            if (pair := coverage.doubled) is not None:
                first, second = (self._sources_of(copies[i]) for i in (pair.first, pair.second))
                lines.append(f"{row}: {pair.box} is copied to twice, from {first} and from {second}")
            copy_steps, fill_steps = [self.copies.steps[i] for i in copies], [self.fills.steps[j] for j in fills]
            for late in coverage.late(copy_steps, fill_steps):
                value, source = self.fills.values[fills[late.second]], self._sources_of(copies[late.first])
                lines.append(f"{row}: {late.box} is filled with {value} after {source} came there")
        return lines

    @functools.cached_property
    def cleared(self) -> frozenset[int]:
        """Rows of the fills of which some copy takes an element: they only cleared what was copied to."""
        return frozenset(
            self._fills_of(index)[i] for index in set(self.fills.destinations) for i in self._coverage(index).cleared
        )

    def _coverage(self, index: int) -> Coverage:
        """What is written of one destination, judged once for every question."""
        found = self._coverages.get(index)
        if found is None:
            found = self._coverages[index] = Coverage(
                self.destinations.names[index],
                self.destinations.shapes[index],
                self.layouts[index],
                [self._copy_view(i) for i in self._copies_of(index)],
                [self._fill_view(i) for i in self._fills_of(index)],
            )
        return found

    @functools.cached_property
    def _coverages(self) -> dict[int, Coverage]:
        return {}

    def _copies_of(self, destination: int) -> list[int]:
        return self._rows[0][destination]

    def _fills_of(self, destination: int) -> list[int]:
        return self._rows[1][destination]

    @functools.cached_property
    def _rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each destination its rows in ``copies`` and in ``fills``."""
        both: tuple[list[list[int]], list[list[int]]] = (
            [[] for _ in range(len(self.destinations))],
            [[] for _ in range(len(self.destinations))],
        )
        for rows, column in zip(both, (self.copies.destinations, self.fills.destinations), strict=True):
            for i, destination in enumerate(column):
                rows[destination].append(i)
        return both

    def _copy_view(self, i: int) -> View:
        return View(self.copies.offsets[i], self.copies.sizes[i], self.copies.strides[i])

    def _fill_view(self, i: int) -> View:
        return View(self.fills.offsets[i], self.fills.sizes[i], self.fills.strides[i])

    def _sources_of(self, copy: int) -> str:
        return listed(self.manifest.names[i] for i in self.copies.sources[copy]).removesuffix(" (1 in all)")
