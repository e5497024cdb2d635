"""Whether a loader does the same with tensors that come part by part as it does with all of them at once.

This module knows traces. It must not know sessions, segments or bytes. A loader is traced once with everything, but
called once for each round with what is staged for it (a client without rankcast's sessions: with each message), and
never with what goes direct. One that waits for a partner, clears a parameter, or fills one tensor from another because
a third is not there, would leave other weights than the trace says: so each part is traced by itself, and must do
exactly its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rankcast.errors import ManifestError
from rankcast.geometry import box_of_view
from rankcast.manifest import Manifest, listed
from rankcast.trace.record import Trace

_SAME = "a loader must do the same with a tensor whatever comes with it; where it needs several at once, "
_ROUND_WAY_OUT = f"{_SAME}raise bucket_bytes until they come in one round, or hold them where they can go direct"
_MESSAGE_WAY_OUT = f"{_SAME}send them in one update call"


class Part(NamedTuple):
    """What the loader did with some tensors of an update: their names, its copies and its fills, by names."""

    names: tuple[str, ...]
    copies: list[Any]
    fills: list[Any]


def part_of(trace: Trace) -> Part:
    """What can be compared of ``trace``, which is much less than a trace has."""
    return Part(trace.manifest.names, _copies(trace), _fills(trace))


def check_rounds(whole: Trace, trace: Callable[[Manifest], Trace], scheduled: Manifest, rounds: Sequence[int]) -> None:
    """Raise ``ManifestError``, naming a tensor, unless every round of ``scheduled`` does its part of ``whole``.

    ``rounds`` has the round of each tensor of ``scheduled``, and ``trace`` runs the loader as it is now. A round of
    everything is traced too: a loader may do something else the second time.
    """

    def alone(turn: int) -> Part:
        part = scheduled.take(i for i, at in enumerate(rounds) if at == turn)
        done = part_of(trace(part))
        _check_clearing(whole, done, turn)
        return done

    _check(whole, dict(zip(scheduled.names, rounds, strict=True)), alone, "round", _ROUND_WAY_OUT)


def check_messages(whole: Trace, messages: Sequence[Part]) -> None:
    """Raise ``ManifestError``, naming a tensor, unless every message did its part of ``whole``, of them all."""
    number = {name: i for i, message in enumerate(messages) for name in message.names}
    _check(whole, number, messages.__getitem__, "message", _MESSAGE_WAY_OUT)


def _check(whole: Trace, turn_of: Mapping[str, int], alone: Callable[[int], Part], what: str, way_out: str) -> None:
    expected: dict[int, Counter[Any]] = {turn: Counter() for turn in set(turn_of.values())}
    for copy in _copies(whole):
        turns = {turn_of.get(name) for name in copy[0]}
        if turns == {None}:
            continue
        if len(turns) > 1:
            raise ManifestError(
                f"the loader makes one copy of {listed(copy[0])}, which do not all come in one {what}: {way_out}",
                tensor=copy[0][0],
            )
        expected[turns.pop()][copy] += 1  # type: ignore[index]  # None was passed over
    filled: set[Any] = set()
    for turn in sorted(expected):
        part = alone(turn)
        found = Counter(part.copies)
        for copy in (*(found - expected[turn]), *(expected[turn] - found)):
            raise ManifestError(
                f"the loader does not do with {copy[0][0]} in {what} {turn} what it does when all tensors come at "
                f"once ({'it also fills' if copy in found else 'it does not fill'} {copy[1]}): {way_out}",
                tensor=copy[0][0],
            )
        filled.update(part.fills)
    written = {copy[1] for copies in expected.values() for copy in copies}
    for fill in _fills(whole):
        if fill[0] in written and fill not in filled:
            raise ManifestError(f"the loader fills a part of {fill[0]} only when all tensors come at once: {way_out}")


def _check_clearing(whole: Trace, alone: Part, turn: int) -> None:
    """No round may wipe what another round, or a copy program, has brought."""
    names = set(alone.names)
    others: dict[str, list[tuple[str, Any]]] = {}
    for copy in _copies(whole):
        if not names.intersection(copy[0]):
            others.setdefault(copy[1], []).append((copy[0][0], copy[2:5]))
    for parameter, _, *fill in alone.fills:
        for name, view in others.get(parameter, ()):
            if _meet(whole.destinations.shapes[whole.destinations.index[parameter]], fill, view):
                raise ManifestError(
                    f"the loader clears {parameter} in round {turn}, where {name} lies, which does not come in that "
                    f"round: {_ROUND_WAY_OUT}",
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
