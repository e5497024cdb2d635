"""The copy program: routes turned into pairs of views once, and run at every push.

This module knows strides, segments and parameters. It must not know plans, sessions or engines. Building proves what
the trainer claims: every route lies inside its segment and inside its parameter, and no element is written twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from rankcast.errors import LocationError, ManifestError, PayloadError
from rankcast.geometry import Box, box_of_view, extent, uncovered
from rankcast.manifest import DTYPES, canonical_dtype, listed
from rankcast.transports.segment import OpenedSegment
from rankcast.wire.bodies import Program

_COLUMNS = ("offsets", "strides", "sizes", "segments", "addresses", "source_strides", "dtypes")


def check_program(program: Program, shapes: Mapping[str, tuple[int, ...]], segments: int) -> None:
    """Prove ``program`` on its own terms, before anything is opened.

    ``shapes`` gives the full shape of each destination. Raises ``PayloadError`` on uneven columns and on indices out of
    range, ``ManifestError`` naming a parameter that would be written outside, twice, or not wholly.
    """
    count = len(program.destinations)
    for column in _COLUMNS:
        if len(getattr(program, column)) != count:
            raise PayloadError(f"a program has {count} routes but {len(getattr(program, column))} {column}")
    unknown = [name for name in program.parameters if name not in shapes]
    if unknown:
        raise ManifestError(f"the program writes parameters that the worker does not have: {listed(unknown)}")
    boxes: list[list[Box]] = [[] for _ in program.parameters]
    for i in range(count):
        at, segment = program.destinations[i], program.segments[i]
        if not 0 <= at < len(program.parameters) or not 0 <= segment < segments:
            raise PayloadError(f"route {i} names parameter {at} and segment {segment}, which do not exist")
        if not len(program.sizes[i]) == len(program.strides[i]) == len(program.source_strides[i]):
            raise PayloadError(f"route {i} has {len(program.sizes[i])} sizes and other numbers of strides")
        canonical_dtype(program.dtypes[i])
        name = program.parameters[at]
        box = box_of_view(shapes[name], program.offsets[i], program.sizes[i], program.strides[i])
        if box is None:
            raise ManifestError(
                f"route {i} would write {name} at element {program.offsets[i]} with sizes {list(program.sizes[i])} and "
                f"strides {list(program.strides[i])}, which is no box of its shape {list(shapes[name])}",
                tensor=name,
            )
        boxes[at].append(box)
    for name, parts in zip(program.parameters, boxes, strict=True):
        # What no route writes is padding or comes through the loader: that is for the scope to prove.
        _, _, double = uncovered(shapes[name], parts)
        if double is not None:
            raise ManifestError(f"{name} would be written twice at {double}", tensor=name)


class CopyProgram:
    """The sources of one program, opened; bound to destinations whenever these are there."""

    def __init__(self, program: Program, opened: Sequence[OpenedSegment]) -> None:
        """Build the source views; raises ``LocationError`` where a route reaches outside its segment."""
        self._program = program
        self._sources = [self._source(i, opened) for i in range(len(program.destinations))]
        self._by_parameter: dict[str, list[int]] = {}
        for i, at in enumerate(program.destinations):
            self._by_parameter.setdefault(program.parameters[at], []).append(i)
        self.nbytes = sum(
            math.prod(sizes) * DTYPES[dtype] for sizes, dtype in zip(program.sizes, program.dtypes, strict=True)
        )

    def _source(self, i: int, opened: Sequence[OpenedSegment]) -> torch.Tensor:
        program = self._program
        dtype, sizes, strides = program.dtypes[i], program.sizes[i], program.source_strides[i]
        flat = opened[program.segments[i]].tensor(dtype, (extent(sizes, strides),), program.addresses[i])
        if any(stride < 0 for stride in strides):
            raise LocationError(f"route {i} has a negative stride {list(strides)}")
        return torch.as_strided(flat, sizes, strides)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that the program writes."""
        return tuple(self._by_parameter)

    def bind(self, targets: Mapping[str, torch.Tensor]) -> BoundProgram:
        """The pairs of views for the parameters in ``targets``; other routes are left out."""
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, target in targets.items():
            for i in self._by_parameter.get(name, ()):
                start = int(target.storage_offset()) + self._program.offsets[i]
                destinations.append(
                    torch.as_strided(target.detach(), self._program.sizes[i], self._program.strides[i], start)
                )
                sources.append(self._sources[i])
        return BoundProgram(destinations, sources)

    def drop(self) -> None:
        """Let go of every view, so that the segments below can be unmapped."""
        self._sources = []
        self._by_parameter = {}


class BoundProgram:
    """Pairs of views; running it is the whole install of a worker whose parameters stay where they are."""

    def __init__(self, destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._destinations = destinations
        self._sources = sources
        # Where dtypes differ the copy rounds, once, exactly as Tensor.to does.
        self.casts = sum(d.dtype != s.dtype for d, s in zip(destinations, sources, strict=True))

    def __len__(self) -> int:
        return len(self._destinations)

    def run(self) -> None:
        """Copy every box. No metadata is touched: the views were made before."""
        with torch.no_grad():
            torch._foreach_copy_(self._destinations, self._sources)
