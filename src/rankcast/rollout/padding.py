"""Padding: what a loader writes into parameters besides tensors, which a copy program has to write in its place.

This module knows traces and constant fills. It must not know programs, segments or sessions. A fill is padding when no
tensor goes where it goes. One that is copied over later only cleared the parameter: its tensors stay with the loader,
because a later fill of another tensor's round would wipe what a program had copied.
"""

from __future__ import annotations

import dataclasses

from rankcast.trace.record import Trace


@dataclasses.dataclass(frozen=True)
class Padding:
    """A constant region of the parameter ``name``: ``value`` at ``sizes`` elements from ``offset``, by ``strides``."""

    name: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    value: complex


def padding_of(trace: Trace) -> tuple[Padding, ...]:
    """The fills of ``trace`` that no copy touches, in the loader's order."""
    fills = trace.fills
    return tuple(
        Padding(trace.destinations.names[at], fills.offsets[i], fills.sizes[i], fills.strides[i], _number(value))
        for i, (at, value) in enumerate(zip(fills.destinations, fills.values, strict=True))
        if i not in trace.cleared
    )


def cleared_by(trace: Trace) -> dict[str, str]:
    """The parameters that the loader clears before it copies into them, with the reason why no program may."""
    names = {trace.destinations.names[trace.fills.destinations[i]] for i in trace.cleared}
    return dict.fromkeys(sorted(names), "the loader clears its parameter before it copies into it")


def _number(text: str) -> complex:
    """A fill's value, which traces keep as text: truth values, whole numbers, reals with nan and inf, complex ones."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float, complex):
        try:
            return kind(text)
        except ValueError:
            continue
    raise AssertionError(f"a trace has a fill with {text!r}, which is no number")
