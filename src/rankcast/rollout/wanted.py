"""What a worker wants in the direct mode: its trace as boxes with places, and the proof that a program fills them.

This module knows traces, boxes and programs. It must not know segments or sessions. The worker proves a program against
its own trace: whatever plan the trainer made, each element that the loader would have written is written exactly once,
and nothing else is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rankcast.errors import ManifestError, UnsupportedError
from rankcast.geometry import Box, box_of_view, contiguous_strides, uncovered
from rankcast.plan.views import destinations_of
from rankcast.rollout.program import boxes_of
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
    written = boxes_of(program, shapes)
    wanted: dict[str, list[Box]] = {}
    skip = frozenset(by_loader)
    copies = trace.copies
    for sources, at, offset, sizes, strides in zip(
        copies.sources, copies.destinations, copies.offsets, copies.sizes, copies.strides, strict=True
    ):
        if skip.issuperset(sources):
            continue
        name = trace.destinations.names[at]
        box = box_of_view(shapes[name], offset, sizes, strides)
        if box is None:
            raise UnsupportedError(f"{name} is written in a form that no route has", tensor=name)
        wanted.setdefault(name, []).append(box)
    layouts = dict(zip(trace.destinations.names, trace.layouts, strict=True))
    for name in sorted(wanted.keys() | written.keys()):
        if name in written and not _row_major(shapes[name], layouts[name]):
            raise ManifestError(f"the program writes {name}, which is not row-major in memory", tensor=name)
        ours, theirs = wanted.get(name, []), written.get(name, [])
        # Two sets of boxes are the same set of elements when neither alone leaves out more than both together do.
        left_by_loader, _, _ = uncovered(shapes[name], ours)
        left, _, twice = uncovered(shapes[name], theirs)
        left_by_both, _, _ = uncovered(shapes[name], [*ours, *theirs])
        if twice is not None:
            raise ManifestError(f"the program writes {name} twice at {twice}", tensor=name)
        if left_by_both != left_by_loader:
            extra = left_by_loader - left_by_both
            raise ManifestError(f"the program writes {extra:,} elements of {name} that no tensor goes to", tensor=name)
        if left != left_by_both:
            raise ManifestError(
                f"the program leaves {left - left_by_both:,} elements of {name} as they are", tensor=name
            )
