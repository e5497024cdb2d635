"""What a worker wants in the direct mode: its trace as boxes with places, and the proof that a program fills them.

This module knows traces, boxes and programs. It must not know segments or sessions. The worker proves a program against
its own trace: whatever plan the trainer made, each element that the loader would have written is written exactly once,
and nothing else is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rankcast.errors import ManifestError, UnsupportedError
from rankcast.geometry import contiguous_strides
from rankcast.plan.views import destinations_of
from rankcast.rollout.program import boxes_of
from rankcast.trace.cells import View, grid_of
from rankcast.trace.record import Trace
from rankcast.wire.bodies import Program
from rankcast.wire.reports import Wanted


def wanted_of(trace: Trace, by_loader: Mapping[str, str], casts: Mapping[int, str], *, whole_modules: bool) -> Wanted:
    """The destinations of ``trace``, and for each tensor that must go through the loader the reason.

    ``by_loader`` gives reasons that the engine has of its own, by destination, and ``casts`` the destination's dtype
    for each tensor of the manifest that has another. With ``whole_modules`` a reason holds
    for all tensors of the module.
    """
    copies, manifest = trace.copies, trace.manifest
    routable = destinations_of(
        manifest,
        sources=copies.sources,
        source_offsets=copies.source_offsets,
        source_strides=copies.source_strides,
        sizes=copies.sizes,
        destinations=copies.destinations,
        offsets=copies.offsets,
        strides=copies.strides,
        throughs=copies.throughs,
        dtypes=trace.destinations.dtypes,
    )
    reasons = dict(routable.reasons)
    refused = dict(by_loader)
    for name, shape, layout in zip(trace.destinations.names, trace.destinations.shapes, trace.layouts, strict=True):
        if not _row_major(shape, layout):
            refused.setdefault(name, "its parameter is not row-major in memory")
    for sources, at in zip(copies.sources, copies.destinations, strict=True):
        reason = refused.get(trace.destinations.names[at])
        if reason is not None:
            for index in sources:
                reasons.setdefault(index, reason)
    if whole_modules:
        _spread(trace, reasons)
    found = routable.destinations
    found = found.take(~np.isin(found.tensor, list(reasons))) if reasons else found
    return Wanted(
        parameters=trace.destinations,
        tensors=tuple(found.tensor.tolist()),
        destinations=tuple(found.parameter.tolist()),
        starts=tuple(map(tuple, found.starts.tolist())),
        sizes=tuple(map(tuple, found.sizes.tolist())),
        offsets=tuple(found.offset.tolist()),
        strides=tuple(map(tuple, found.strides.tolist())),
        reasons=tuple(sorted(reasons.items())),
        casts=tuple(sorted(casts.items())),
        whole_modules=whole_modules,
    )


def _row_major(shape: Sequence[int], layout: Sequence[int]) -> bool:
    dense = contiguous_strides(shape)
    return 0 in shape or all(size == 1 or step == other for size, step, other in zip(shape, layout, dense, strict=True))


def _spread(trace: Trace, reasons: dict[int, str]) -> None:
    """Give every tensor of a module a reason, where one of them has one."""
    modules = [name.rpartition(".")[0] for name in trace.destinations.names]
    members: dict[str, set[int]] = {}
    for sources, at in zip(trace.copies.sources, trace.copies.destinations, strict=True):
        members.setdefault(modules[at], set()).update(sources)
    waiting = list(members.items())
    while True:
        mixed = [(module, held) for module, held in waiting if any(index in reasons for index in held)]
        if not mixed:
            return
        waiting = [(module, held) for module, held in waiting if not any(index in reasons for index in held)]
        for module, held in mixed:
            why = next(reasons[index] for index in sorted(held) if index in reasons)
            for index in held:
                reasons.setdefault(index, f"its module {module} goes through the loader: {why}")


def check_filled(trace: Trace, program: Program, by_loader: Collection[int]) -> None:
    """Prove that ``program`` writes exactly what the loader would have, but for the tensors at ``by_loader``.

    ``by_loader`` indexes the trace's manifest. Raises ``ManifestError`` naming a parameter of which elements would be
    left as they are, written twice, or written although no tensor goes there.
    """
    shapes = dict(zip(trace.destinations.names, trace.destinations.shapes, strict=True))
    layouts = dict(zip(trace.destinations.names, trace.layouts, strict=True))
    wanted, written = _wanted_views(trace, frozenset(by_loader)), _written_views(program)
    for name in sorted(wanted.keys() | written.keys()):
        if name in written and not _row_major(shapes[name], layouts[name]):
            raise ManifestError(f"the program writes {name}, which is not row-major in memory", tensor=name)
        ours, theirs = wanted.get(name, []), written.get(name, [])
        cells = grid_of(shapes[name], [*ours, *theirs])
        if cells is None:
            boxes_of(program, shapes)  # names the route, if it is one
            raise UnsupportedError(f"{name} is written in a form that no route has", tensor=name)
        by_us, counts = cells.array(np.bool_, False), cells.array(np.int32, 0)
        for i in range(len(ours)):
            cells.region(by_us, i)[...] = True
        for i in range(len(ours), len(ours) + len(theirs)):
            cells.region(counts, i)[...] += 1
        if (counts > 1).any():
            raise ManifestError(f"the program writes {name} twice at {cells.first_box(counts > 1)}", tensor=name)
        extra = cells.elements((counts > 0) & ~by_us)
        if extra:
            raise ManifestError(f"the program writes {extra:,} elements of {name} that no tensor goes to", tensor=name)
        left = cells.elements(by_us & (counts == 0))
        if left:
            raise ManifestError(f"the program leaves {left:,} elements of {name} as they are", tensor=name)


def _wanted_views(trace: Trace, by_loader: frozenset[int]) -> dict[str, list[View]]:
    """What the loader writes of each parameter, but for the tensors that come through it."""
    views: dict[str, list[View]] = {}
    copies, names = trace.copies, trace.destinations.names
    for sources, at, offset, sizes, strides in zip(
        copies.sources, copies.destinations, copies.offsets, copies.sizes, copies.strides, strict=True
    ):
        if 0 not in sizes and not by_loader.issuperset(sources):
            views.setdefault(names[at], []).append(View(offset, sizes, strides))
    return views


def _written_views(program: Program) -> dict[str, list[View]]:
    views: dict[str, list[View]] = {}
    for at, offset, sizes, strides in zip(
        program.destinations, program.offsets, program.sizes, program.strides, strict=True
    ):
        if 0 not in sizes:
            views.setdefault(program.parameters[at], []).append(View(offset, sizes, strides))
    return views
