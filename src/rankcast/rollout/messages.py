"""What the messages of one session of bare entries have written, and whether they fit together.

This module knows traces. It must not know entries, segments or bytes. There is no prepare in which the whole session
could be proved: what can be said before a message is written is that it writes nothing twice, and nothing that an
earlier one wrote. Whether each did its part of the whole can be said at the end.
"""

from __future__ import annotations

from typing import NamedTuple

from rankcast.errors import ManifestError
from rankcast.manifest import listed
from rankcast.rollout.by_round import Part, check_messages, part_of
from rankcast.trace.cells import View
from rankcast.trace.coverage import Coverage
from rankcast.trace.record import Trace

_WAY_OUT = "send each tensor once, and in one update call those that the loader fills one from the other"


class _Write(NamedTuple):
    """One copy or fill into a parameter: when, where, and what of (tensors, or a fill's value)."""

    step: int
    view: View
    what: str


_Writes = dict[str, list[_Write]]


class Messages:
    """The messages of a session that were installed, in the order in which they came."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._copies: _Writes = {}
        self._fills: _Writes = {}
        self._steps = 0

    def check_next(self, trace: Trace) -> None:
        """Raise ``ManifestError`` when a message that does ``trace`` would write what was written already, or twice."""
        copies, fills = self._writes(trace)
        for name in dict.fromkeys((*copies, *fills)):
            copied = [*self._copies.get(name, ()), *copies.get(name, ())]
            filled = [*self._fills.get(name, ()), *fills.get(name, ())]
            at = trace.destinations.index[name]
            coverage = Coverage(
                name,
                trace.destinations.shapes[at],
                trace.layouts[at],
                [one.view for one in copied],
                [one.view for one in filled],
            )
            if (pair := coverage.doubled) is not None:
                raise ManifestError(
                    f"{name}: {pair.box} is copied to twice in one session, from {copied[pair.first].what} and from "
                    f"{copied[pair.second].what}: {_WAY_OUT}",
                    tensor=name,
                )
            for late in coverage.late([one.step for one in copied], [one.step for one in filled]):
                raise ManifestError(
                    f"{name}: {late.box} is filled with {filled[late.second].what} after {copied[late.first].what} "
                    f"came there in the same session: {_WAY_OUT}",
                    tensor=name,
                )

    def add(self, trace: Trace) -> None:
        """Remember the message that did ``trace``."""
        for known, new in zip((self._copies, self._fills), self._writes(trace), strict=True):
            for name, writes in new.items():
                known.setdefault(name, []).extend(writes)
        self._steps += len(trace.copies) + len(trace.fills)
        self._parts.append(part_of(trace))

    def check_whole(self, whole: Trace) -> None:
        """Raise ``ManifestError`` unless each message did its part of ``whole``, which is of all their tensors."""
        check_messages(whole, self._parts)

    def _writes(self, trace: Trace) -> tuple[_Writes, _Writes]:
        """The copies and the fills of ``trace`` by destination, as what comes after all that is known."""
        copies, fills = _Writes(), _Writes()
        names, taken, filled = trace.destinations.names, trace.copies, trace.fills
        for i, at in enumerate(taken.destinations):
            sources = listed(trace.manifest.names[index] for index in taken.sources[i]).removesuffix(" (1 in all)")
            view = View(taken.offsets[i], taken.sizes[i], taken.strides[i])
            copies.setdefault(names[at], []).append(_Write(self._steps + taken.steps[i], view, sources))
        for i, at in enumerate(filled.destinations):
            view = View(filled.offsets[i], filled.sizes[i], filled.strides[i])
            fills.setdefault(names[at], []).append(_Write(self._steps + filled.steps[i], view, filled.values[i]))
        return copies, fills
