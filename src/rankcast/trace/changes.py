"""The difference between two traces, in words.

This module knows what a trace holds and how people name it. It must not know why a trace was taken again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rankcast.manifest import Manifest

if TYPE_CHECKING:
    from rankcast.trace.columns import Trace

#: What there is to say of each name, in order.
Words = dict[str, list[str]]


def changes(before: Trace, after: Trace) -> list[str]:
    """One line for each thing that ``after`` has otherwise than ``before``; empty when they are equal."""
    lines = before.fingerprint.changes(after.fingerprint)
    lines += _rows("tensor", before.manifest, after.manifest)
    lines += _rows("parameter", before.destinations, after.destinations)
    lines += _values("the strides of {}", _strides(before), _strides(after))
    lines += _values("what {} is tied to", _ties(before), _ties(after))
    lines += _values("what is copied of {}", _copies(before), _copies(after))
    lines += _values("what {} is filled with", _fills(before), _fills(after))
    if not lines and before != after:
        lines.append("the order of tensors, parameters or writes is another")
    return lines


def _rows(kind: str, before: Manifest, after: Manifest) -> Iterator[str]:
    for name in dict.fromkeys((*before.names, *after.names)):
        if name not in before.index:
            yield f"{kind} {after.row(after.index[name])} is new"
        elif name not in after.index:
            yield f"{kind} {before.row(before.index[name])} is gone"
        elif (was := before.row(before.index[name])) != (now := after.row(after.index[name])):
            yield f"{kind} {was} is now {now.dtype}{list(now.shape)}"


def _values(what: str, before: Words, after: Words) -> Iterator[str]:
    for name in dict.fromkeys((*before, *after)):
        was, now = ("; ".join(words.get(name, ())) or "nothing" for words in (before, after))
        if was != now:
            yield f"{what.format(name)} was {was} and is {now}"


def _strides(trace: Trace) -> Words:
    return {name: [str(list(at))] for name, at in zip(trace.destinations.names, trace.layouts, strict=True)}


def _ties(trace: Trace) -> Words:
    return {alias: [name] for alias, name in trace.aliases}


def _copies(trace: Trace) -> Words:
    """What becomes of each tensor, by name: which elements of it go to which of which parameter."""
    taken, found = trace.copies, Words()
    for i, sources in enumerate(taken.sources):
        into = trace.destinations.names[taken.destinations[i]]
        how = f" through {taken.throughs[i]}" if taken.throughs[i] else ""
        line = (
            f"{list(taken.sizes[i])} from {taken.source_offsets[i]} by {list(taken.source_strides[i])} to {into} at "
            f"{taken.offsets[i]} by {list(taken.strides[i])}{how}"
        )
        for index in sources:
            found.setdefault(trace.manifest.names[index], []).append(line)
    return found


def _fills(trace: Trace) -> Words:
    filled, found = trace.fills, Words()
    for i, at in enumerate(filled.destinations):
        line = f"{filled.values[i]} at {filled.offsets[i]}, {list(filled.sizes[i])} by {list(filled.strides[i])}"
        found.setdefault(trace.destinations.names[at], []).append(line)
    return found
