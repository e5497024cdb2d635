"""Whether what an update writes and what it reads are one memory, as when a module is pushed into itself.

This module knows a worker's parameters, what a trainer in the same process lends, and the segments of a session. It
must not know sessions or loaders. Where they share memory the update would write the trainer's weights, or read what it
has just written: it is refused in prepare, while nothing is written.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch

from rankcast.errors import UnsupportedError
from rankcast.geometry import extent
from rankcast.manifest import DTYPES, nbytes
from rankcast.transports.live import SharedMemoryMap
from rankcast.transports.own_memory import Spans, address_of, lent, spans_of
from rankcast.wire.bodies import Program, Schedule
from rankcast.wire.handles import Handle, ShmHandle

_CURE = "push into a model of its own (copy.deepcopy), or stop sharing (parameter.data = parameter.data.clone())"
_File = tuple[int, int]


class Apart:
    """What one connection's sessions read; ``connection`` is the name under which its trainer lends memory."""

    def __init__(self, connection: str) -> None:
        self._connection = connection
        self._schedule: Schedule | None = None
        self._program: Program | None = None
        self._handles: tuple[Handle, ...] = ()
        #: The parameters' addresses, and what was lent, when nothing was found to be shared.
        self._looked: tuple[int, ...] | None = None
        self._read_here: list[Spans] = []

    def reads(self, schedule: Schedule, program: Program | None, handles: tuple[Handle, ...]) -> None:
        """From now on sessions read this."""
        self._schedule, self._program, self._handles = schedule, program, handles
        self._looked = None

    def check(self, written: Mapping[str, torch.Tensor]) -> None:
        """Raise ``UnsupportedError`` when a parameter of ``written``, by name, shares memory with what is read.

        In one process by address: the trainer's tensors are looked up by name. Between processes by the shared memory
        that both have mapped. Looked at again only when a parameter, a segment or what is lent is another one.
        """
        addresses, read_here = tuple(map(address_of, written.values())), lent(self._connection)
        same = addresses == self._looked and len(read_here) == len(self._read_here)
        if same and all(map(operator.is_, read_here, self._read_here)):
            return
        for read in read_here:
            met = read.meeting(spans_of(written.items()))
            if met is not None:
                tensor, parameter = met
                raise UnsupportedError(
                    f"the trainer's tensor {tensor} and the worker's parameter {parameter} share memory, so that the "
                    f"update would write what it reads: {_CURE}",
                    tensor=tensor,
                )
        self._check_segments(written)
        self._looked, self._read_here = addresses, read_here

    def _check_segments(self, written: Mapping[str, torch.Tensor]) -> None:
        files = {(h.device, h.inode): at for at, h in enumerate(self._handles) if isinstance(h, ShmHandle)}
        if not files:
            return
        shared = SharedMemoryMap()
        rows: dict[_File, list[tuple[str, int, int]]] = {}
        spans = spans_of(written.items())
        for name, start, end in zip(spans.names, spans.starts.tolist(), spans.ends.tolist(), strict=True):
            found = shared.file_at(start)
            if found is not None and found[:2] in files:
                rows.setdefault(found[:2], []).append((name, found[2], found[2] + end - start))
        for file, own in rows.items():
            met = self._read_from(files[file]).meeting(Spans.of(own))
            if met is not None:
                what, parameter = met
                raise UnsupportedError(
                    f"the worker's parameter {parameter} lies in the trainer's own memory, from which {what} is read, "
                    f"so that the update would write what it reads: {_CURE}",
                    tensor=parameter,
                )

    def _read_from(self, segment: int) -> Spans:
        """What is read from one segment, in bytes from its start, by the tensor or the parameter that it is for."""
        rows: list[tuple[str, int, int]] = []
        schedule, program = self._schedule, self._program
        if schedule is not None:
            columns = (schedule.names, schedule.dtypes, schedule.shapes, schedule.segments, schedule.offsets)
            for name, dtype, shape, at, offset in zip(*columns, strict=True):
                if at == segment:
                    rows.append((f"tensor {name}", offset, offset + nbytes(dtype, shape)))
        if program is not None:
            rows += [_route(program, i) for i, at in enumerate(program.segments) if at == segment]
        return Spans.of(rows)


def _route(program: Program, i: int) -> tuple[str, int, int]:
    sizes: Sequence[int] = program.sizes[i]
    span = extent(sizes, program.source_strides[i]) * DTYPES[program.dtypes[i]]
    name = program.parameters[program.destinations[i]]
    return f"a part of parameter {name}", program.addresses[i], program.addresses[i] + span
