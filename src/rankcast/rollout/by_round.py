"""Whether a loader does the same with tensors that come round by round as it does with all of them at once.

This module knows traces. It must not know sessions, segments or bytes. A loader is traced once with everything, but
called once for each round with what is staged for it, and never with what goes direct. One that waits for a partner,
clears a parameter, or fills one tensor from another because a third is not there, would leave other weights than the
trace says: so each round is traced by itself, and must do exactly its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rankcast.errors import ManifestError
from rankcast.geometry import box_of_view
from rankcast.manifest import Manifest, listed
from rankcast.trace.record import Trace

_WAY_OUT = (
    "a loader must do the same with a tensor whatever comes with it; where it needs several at once, raise "
    "bucket_bytes until they come in one round, or hold them where they can go direct"
)


def check_rounds(
    whole: Trace, trace: Callable[[Manifest], Trace], scheduled: Manifest, rounds: Sequence[int], *, again: bool
) -> None:
    """Raise ``ManifestError``, naming a tensor, unless every round of ``scheduled`` does its part of ``whole``.

    ``rounds`` has the round of each tensor of ``scheduled``, and ``trace`` runs the loader as it is now. ``again`` says
    that a round of everything is traced too, because the loader may do something else since ``whole`` was taken.
    """
    round_of = dict(zip(scheduled.names, rounds, strict=True))
    expected: dict[int, Counter[Any]] = {turn: Counter() for turn in set(rounds)}
    for copy in _copies(whole):
        turns = {round_of.get(name) for name in copy[0]}
        if turns == {None}:
            continue
        if len(turns) > 1:
            raise ManifestError(
                f"the loader makes one copy of {listed(copy[0])}, which do not all come in one round: {_WAY_OUT}",
                tensor=copy[0][0],
            )
        expected[turns.pop()][copy] += 1  # type: ignore[index]  # None was passed over
    filled: set[Any] = set()
    for turn in sorted(expected):
        part = scheduled.take(i for i, at in enumerate(rounds) if at == turn)
        alone = whole if part.names == whole.manifest.names and not again else trace(part)
        found = Counter(_copies(alone))
        for copy in (*(found - expected[turn]), *(expected[turn] - found)):
            raise ManifestError(
                f"the loader does not do with {copy[0][0]} in round {turn} what it does when all tensors come at "
                f"once ({'it also fills' if copy in found else 'it does not fill'} {copy[1]}): {_WAY_OUT}",
                tensor=copy[0][0],
            )
        filled.update(_fills(alone))
        _check_clearing(whole, alone, turn, set(part.names))
    written = {copy[1] for copies in expected.values() for copy in copies}
    for fill in _fills(whole):
        if fill[0] in written and fill not in filled:
            raise ManifestError(f"the loader fills a part of {fill[0]} only when all tensors come at once: {_WAY_OUT}")


def _check_clearing(whole: Trace, alone: Trace, turn: int, names: set[str]) -> None:
    """No round may wipe what another round, or a copy program, has brought."""
    others: dict[str, list[tuple[str, Any]]] = {}
    for copy in _copies(whole):
        if not names.intersection(copy[0]):
            others.setdefault(copy[1], []).append((copy[0][0], copy[2:5]))
    for parameter, _, *fill in _fills(alone):
        shape = alone.destinations.shapes[alone.destinations.index[parameter]]
        for name, view in others.get(parameter, ()):
            if _meet(shape, fill, view):
                raise ManifestError(
                    f"the loader clears {parameter} in round {turn}, where {name} lies, which does not come in that "
                    f"round: {_WAY_OUT}",
                    tensor=name,
                )


def _meet(shape: Sequence[int], one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two views of a parameter share an element; views that are no boxes are taken to."""
    boxes = [box_of_view(shape, offset, sizes, strides) for offset, sizes, strides in (one, other)]
    if boxes[0] is None or boxes[1] is None:
        return True
    spans = zip(boxes[0].offsets, boxes[0].sizes, boxes[1].offsets, boxes[1].sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in spans)


def _copies(trace: Trace) -> list[Any]:
    """Each copy by names: its tensors, its parameter, where it goes there, and what it takes."""
    taken = trace.copies
    return [
        (
            tuple(trace.manifest.names[index] for index in taken.sources[i]),
            trace.destinations.names[taken.destinations[i]],
            taken.offsets[i],
            taken.sizes[i],
            taken.strides[i],
            taken.source_offsets[i],
            taken.source_strides[i],
            taken.throughs[i],
        )
        for i in range(len(taken))
    ]


def _fills(trace: Trace) -> list[Any]:
    """Each fill by names: its parameter, its value, and where it goes."""
    filled = trace.fills
    return [
        (trace.destinations.names[at], filled.values[i], filled.offsets[i], filled.sizes[i], filled.strides[i])
        for i, at in enumerate(filled.destinations)
    ]
