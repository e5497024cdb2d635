"""Where tensors of this process lie, as spans of addresses, and which of them a trainer in it lets be read.

This module knows addresses, and names under which somebody in this process lends memory. It must not know why two
spans must not meet. Whoever finds nothing under a lender's name is in another process, and has paid nothing to know it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from rankcast.geometry import extent

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Spans:
    """Named spans of bytes, from ``starts`` to ``ends``, int64 [n]; sorted by start. They may overlap each other."""

    names: tuple[str, ...]
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, rows: Iterable[tuple[str, int, int]]) -> Spans:
        """From (name, start, end)."""
        ordered = sorted((row for row in rows if row[1] < row[2]), key=lambda row: row[1])
        columns = [np.array([row[at] for row in ordered], dtype=np.int64) for at in (1, 2)]
        return cls(tuple(row[0] for row in ordered), *columns)

    def meeting(self, other: Spans) -> tuple[str, str] | None:
        """The names of a span of this and one of ``other`` that have a byte in common, if there are such."""
        if not len(self.names) or not len(other.names):
            return None
        # Of all that begin before this one ends, the one that reaches farthest.
        before = np.searchsorted(other.starts, self.ends, side="left")
        farthest = np.maximum.accumulate(other.ends)
        found = np.flatnonzero((before > 0) & (farthest[before - 1] > self.starts))
        if not len(found):
            return None
        mine = int(found[0])
        theirs = int(np.flatnonzero(other.ends[: before[mine]] > self.starts[mine])[0])
        return self.names[mine], other.names[theirs]


def spans_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Spans:
    """The spans from each tensor's first byte to its last; tensors without memory have none."""
    return Spans.of(
        (name, start, start + extent(tensor.shape, tensor.stride()) * tensor.element_size())
        for name, tensor in tensors
        if (start := address_of(tensor)) and tensor.numel()
    )


def address_of(tensor: torch.Tensor) -> int:
    """Where ``tensor`` begins; 0 when it lies nowhere (meta, sparse, freed)."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):
        return 0


#: By the name under which memory is lent: what says where it is now, one for each lender.
#: Weakly: who lends keeps the lender, and with it the tensors, for as long as it wants them to be seen.
_lent: dict[str, list[weakref.ref[Callable[[], Spans]]]] = {}


def lend(name: str, spans: Callable[[], Spans]) -> Callable[[], None]:
    """Let whoever is in this process and knows ``name`` see ``spans()``; returns what ends that.

    It ends too when nobody refers to what is returned, or to ``spans``, any more.
    """
    lender = weakref.ref(spans, lambda lender: _forget(name, lender))
    _lent.setdefault(name, []).append(lender)
    kept = [spans]  # by whoever keeps what is returned

    def end() -> None:
        kept.clear()
        _forget(name, lender)

    return end


def _forget(name: str, lender: weakref.ref[Callable[[], Spans]]) -> None:
    left = [one for one in _lent.get(name, ()) if one is not lender]
    if left:
        _lent[name] = left
    else:
        _lent.pop(name, None)


def lent(name: str) -> list[Spans]:
    """What is lent in this process under ``name``, where it is now."""
    lenders = [lender() for lender in tuple(_lent.get(name, ()))]
    return [spans() for spans in lenders if spans is not None]
