"""The copy program: routes turned into pairs of views once, and run at every push.

This module knows strides, segments and parameters. It must not know plans, sessions or engines. Building proves what
the trainer claims of memory: every route lies inside its segment. What a program must fill is proved in ``wanted``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from rankcast.errors import ManifestError, PayloadError
from rankcast.geometry import Box, box_of_view
from rankcast.manifest import DTYPES, canonical_dtype, listed
from rankcast.rollout.padding import Padding
from rankcast.rollout.traced_targets import TracedTargets
from rankcast.trace.dtypes import torch_dtype
from rankcast.transports.digest import digest
from rankcast.transports.file_reads import FileRead, box_in
from rankcast.transports.opening import Opened
from rankcast.wire.bodies import Program

_COLUMNS = ("offsets", "strides", "sizes", "segments", "addresses", "source_strides", "dtypes")


def check_program(program: Program, parameters: Collection[str], segments: int) -> None:
    """Prove that the columns of ``program`` fit each other, before anything else is made of them.

    ``parameters`` are the names there are. Raises ``PayloadError`` on uneven columns and on indices out of range,
    ``ManifestError`` on a parameter that the worker does not have.
    """
    count = len(program.destinations)
    for column in _COLUMNS:
        if len(getattr(program, column)) != count:
            raise PayloadError(f"a program has {count} routes but {len(getattr(program, column))} {column}")
    unknown = [name for name in program.parameters if name not in parameters]
    if unknown:
        raise ManifestError(f"the program writes parameters that the worker does not have: {listed(unknown)}")
    for i in range(count):
        at, segment = program.destinations[i], program.segments[i]
        if not 0 <= at < len(program.parameters) or not 0 <= segment < segments:
            raise PayloadError(f"route {i} names parameter {at} and segment {segment}, which do not exist")
        if not len(program.sizes[i]) == len(program.strides[i]) == len(program.source_strides[i]):
            raise PayloadError(f"route {i} has {len(program.sizes[i])} sizes and other numbers of strides")
        numbers = (*program.sizes[i], *program.strides[i], *program.source_strides[i])
        if min(numbers, default=0) < 0 or program.offsets[i] < 0 or program.addresses[i] < 0:
            raise PayloadError(f"route {i} has a negative size, stride, offset or address")
        canonical_dtype(program.dtypes[i])


def boxes_of(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Box]]:
    """The boxes that ``program`` writes, by parameter; ``shapes`` gives the parameters' shapes, row-major.

    Raises ``ManifestError`` for a route that would write what is no box of its parameter.
    """
    boxes: dict[str, list[Box]] = {}
    for i, at in enumerate(program.destinations):
        name = program.parameters[at]
        box = box_of_view(shapes[name], program.offsets[i], program.sizes[i], program.strides[i])
        if box is None:
            raise ManifestError(
                f"route {i} would write {name} at element {program.offsets[i]} with sizes {list(program.sizes[i])} and "
                f"strides {list(program.strides[i])}, which is no box of its shape {list(shapes[name])}",
                tensor=name,
            )
        boxes.setdefault(name, []).append(box)
    return boxes


class CopyProgram:
    """The sources of one program, opened; bound to destinations whenever these are there.

    ``targets`` says how the worker's parameters were traced, and ``padding`` has the constants that its loader writes
    beside tensors.
    """

    def __init__(
        self, program: Program, opened: Sequence[Opened], targets: TracedTargets, padding: Sequence[Padding] = ()
    ) -> None:
        """Build the source views; raises ``LocationError`` where a route reaches outside its segment."""
        self._program = program
        self._traced = targets
        self._sources = [self._source(i, opened[segment]) for i, segment in enumerate(program.segments)]
        self._by_parameter: dict[str, list[int]] = {}
        for i, at in enumerate(program.destinations):
            self._by_parameter.setdefault(program.parameters[at], []).append(i)
        self._padding: dict[str, list[Padding]] = {}
        for one in padding:
            self._padding.setdefault(one.name, []).append(one)
        #: What was bound for a set of targets, by the first one's name, and where they were then.
        self._bound: dict[str, tuple[tuple[object, ...], BoundProgram]] = {}
        self._digests: list[int] | None = None
        self.routes = len(program.destinations)
        self.nbytes = sum(
            math.prod(sizes) * DTYPES[dtype] for sizes, dtype in zip(program.sizes, program.dtypes, strict=True)
        )

    def _source(self, i: int, opened: Opened) -> torch.Tensor | FileRead:
        program = self._program
        dtype, sizes, strides, address = (
            program.dtypes[i],
            program.sizes[i],
            program.source_strides[i],
            program.addresses[i],
        )
        return box_in(opened, dtype, sizes, strides, address, program.parameters[program.destinations[i]])

    def writes(self, name: str) -> bool:
        """Whether any route goes to parameter ``name``."""
        return name in self._by_parameter

    def fills(self, name: str) -> bool:
        """Whether parameter ``name`` has padding, or is nothing else."""
        return name in self._padding

    def run(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy into ``targets``, which are bound once and again only when one of them lies elsewhere than before.

        Targets that lie in memory of their own only while they are filled are for ``bind``. Raises as ``bind`` and
        ``BoundProgram.run`` do.
        """
        # A parameter whose storage was replaced since must not leave the program writing to memory that nobody reads.
        where = tuple((name, tensor.data_ptr(), tensor.stride()) for name, tensor in targets.items())
        first = next(iter(targets), "")
        known = self._bound.get(first)
        if known is None or known[0] != where:
            known = self._bound[first] = (where, self.bind(targets))
        known[1].run()

    def bind(self, targets: Mapping[str, torch.Tensor]) -> BoundProgram:
        """The pairs of views for the parameters in ``targets``, and their padding; other routes are left out.

        Raises ``ManifestError`` naming a target that is no longer what was traced, of another shape, dtype or layout,
        before anything is written.
        """
        for name, target in targets.items():
            if self.writes(name) or self.fills(name):
                self._traced.check_one(name, target)
        padding = [
            (_view(target, one.offset, one.sizes, one.strides), one.value)
            for name, target in targets.items()
            for one in self._padding.get(name, ())
        ]
        routes = [i for name in targets for i in self._by_parameter.get(name, ())]
        return BoundProgram(self, routes, self.pairs(targets), padding)

    def take_digests(self, wanted: bool) -> None:
        """Whether to digest, in every run from now on, what each route has filled."""
        self._digests = [0] * self.routes if wanted else None

    @property
    def digests(self) -> Sequence[int]:
        """Of what each route filled last, in the order of the program; empty unless they were wanted."""
        return self._digests or ()

    def filled(self, routes: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        """``routes`` have just filled ``views``."""
        if self._digests is None:
            return
        for i, view in zip(routes, views, strict=True):
            self._digests[i] = digest(view, rounded=view.dtype != torch_dtype(self._program.dtypes[i]))

    def pairs(self, targets: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | FileRead]]:
        """For each route into one of ``targets`` the view that it fills, and what it is filled from."""
        program = self._program
        pairs: list[tuple[torch.Tensor, torch.Tensor | FileRead]] = []
        for name, target in targets.items():
            whole, start = target.detach(), int(target.storage_offset())
            pairs += [
                (whole.as_strided(program.sizes[i], program.strides[i], start + program.offsets[i]), self._sources[i])
                for i in self._by_parameter.get(name, ())
            ]
        return pairs

    def drop(self) -> None:
        """Let go of every view, so that the segments below can be unmapped."""
        self._sources = []
        self._by_parameter = {}
        self._bound = {}


def _view(target: torch.Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    return torch.as_strided(target.detach(), sizes, strides, int(target.storage_offset()) + offset)


class BoundProgram:
    """Pairs of views; running it is the whole install of a worker whose parameters stay where they are."""

    def __init__(
        self,
        program: CopyProgram,
        routes: Sequence[int],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor | FileRead]],
        padding: Sequence[tuple[torch.Tensor, complex]],
    ) -> None:
        self._padding = padding
        self._program = program
        self._routes = routes
        self._views = [view for view, _ in pairs]
        self._destinations: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._reads: list[tuple[torch.Tensor, FileRead]] = []
        for destination, source in pairs:
            if isinstance(source, FileRead):
                self._reads.append((destination, source))
            else:
                self._destinations.append(destination)
                self._sources.append(source)

    def run(self) -> None:
        """Fill the padding and copy every box. Where dtypes differ a copy rounds, once, exactly as ``Tensor.to``.

        Raises ``LocationError`` when a file was truncated while it was read.
        """
        with torch.no_grad():
            # Every time: memory that was discarded and came back at the same address has lost it.
            for view, value in self._padding:
                view.fill_(value)
            if self._destinations:
                torch._foreach_copy_(self._destinations, self._sources)
            for view, read in self._reads:
                read.into(view)
            self._program.filled(self._routes, self._views)
