"""``check="digest"``: what trainer ranks have when a push begins, and whether workers say that they took the same.

This module knows digests, and which box or tensor each belongs to. It must not know sessions, or what becomes of a push
that fails. Every rank digests what it exports; only rank 0 hears what workers took, and compares. Costs about one more
pass over the bytes on either side.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from rankcast.plan.columns import DTYPE_NAMES, Ints
from rankcast.trainer.direct import DirectExports
from rankcast.trainer.exports import Exports
from rankcast.trainer.fleet import Fleet
from rankcast.trainer.group import TrainerGroup
from rankcast.trainer.planning import Planning
from rankcast.trainer.shares import Share
from rankcast.transports.digest import Digests, digest, unpacked
from rankcast.transports.file_reads import FileRead, box_in
from rankcast.transports.opening import Opened, open_any
from rankcast.transports.segment import torch_dtype
from rankcast.wire.handles import Handle

Who = tuple[str, int]
#: Columns of a box: trainer rank, segment, byte offset, dtype, the worker's dtype; then its sizes and its strides.
_HEAD = 5


class _Boxes(msgspec.Struct, frozen=True):
    """Boxes of one rank, as int64 rows of ``width`` columns."""

    width: int
    rows: bytes


class Checking:
    """The digests of one push after the other. Every rank has one and makes the same calls."""

    def __init__(self, group: TrainerGroup, fleet: Fleet | None) -> None:
        """``fleet`` is there on rank 0 only."""
        self._group = group
        self._fleet = fleet
        self._names: dict[Who, list[str]] = {}
        self._programs: dict[Who, Digests] = {}
        self._staged: dict[str, int] = {}
        self._boxes = _Boxes(_HEAD, b"")
        self._of_worker: dict[Who, Ints] = {}
        self._planned: object = None

    def take_shards(self, direct: DirectExports, planning: Planning | None) -> None:
        """Digest every box that some worker copies. Collective; ``planning`` is there on rank 0 only."""
        asked = b""
        if planning is not None and planning.plan is not self._planned:
            asked = msgspec.msgpack.encode(self._cut(planning))
        said = self._group.broadcast(asked, "which boxes to digest")
        if said:
            self._boxes = msgspec.msgpack.decode(said, type=list[_Boxes])[self._group.rank]
        mine = _digest_boxes(self._boxes, direct.handles[self._group.rank])
        replies = self._group.gather(mine.tobytes(), "digests of shards")
        if replies:
            all_boxes = np.concatenate([np.frombuffer(reply, dtype=np.uint64) for reply in replies])
            self._programs = {who: all_boxes[rows] for who, rows in self._of_worker.items()}

    def _cut(self, planning: Planning) -> list[_Boxes]:
        """The distinct boxes of every rank, in the order in which ``_of_worker`` counts them."""
        plan = planning.plan
        assert plan is not None, "boxes are cut of a plan"
        assert self._fleet is not None, "boxes are cut on rank 0"
        parts: list[Ints] = []
        self._names, self._of_worker = {}, {}
        workers = [(engine.id, worker.rank) for engine, worker in self._fleet.workers()]
        for number, who in enumerate(workers):
            routes = plan.for_worker(number)
            targets, origins = routes.targets, routes.origins
            head = np.stack([origins.rank, origins.segment, origins.offset, origins.dtype, targets.dtype], axis=1)
            parts.append(np.concatenate([head.astype(np.int64), targets.sizes, origins.strides], axis=1))
            self._names[who] = [plan.manifest.names[tensor] for tensor in targets.tensor.tolist()]
        boxes, places = np.unique(np.concatenate(parts), axis=0, return_inverse=True)
        ends = np.cumsum([len(part) for part in parts])
        for who, rows in zip(workers, np.split(places.reshape(-1), ends[:-1]), strict=True):
            self._of_worker[who] = rows
        self._planned = plan
        # Sorted by rank, which is the first column.
        by_rank = np.split(boxes, np.searchsorted(boxes[:, 0], np.arange(1, self._group.size)))
        return [_Boxes(boxes.shape[1], part.tobytes()) for part in by_rank]

    def take_round(self, exports: Exports, turn: int, what: str) -> None:
        """Digest the tensors of round ``turn``, which is staged. Collective, in place of the gather called ``what``."""
        mine = np.array([digest(memory) for memory in exports.lying(turn, self._group.rank)], dtype=np.uint64)
        replies = self._group.gather(mine.tobytes(), what)
        for rank, reply in enumerate(replies):
            names = exports.owned(turn, rank)
            self._staged.update(zip(names, np.frombuffer(reply, dtype=np.uint64).tolist(), strict=True))

    def differing(self, who: Who, share: Share, number: int, said: str) -> list[str]:
        """The tensors of which worker ``who`` took other bytes with install ``number`` than some rank had.

        Raises ``PayloadError`` when ``said`` is no list of digests. A worker that said too few, or none, took nothing
        that anybody could vouch for: all tensors of the install differ then.
        """
        if share.program is not None and number == 0:
            names, expected = self._names[who], self._programs[who]
        else:
            turn = number - (share.program is not None)
            names = [name for name, at in zip(share.schedule.names, share.schedule.rounds, strict=True) if at == turn]
            expected = np.array([self._staged[name] for name in names], dtype=np.uint64)
        found = unpacked(said)
        if len(found) != len(expected):
            return list(dict.fromkeys(names))
        return list(dict.fromkeys(names[i] for i in np.flatnonzero(found != expected).tolist()))


def _digest_boxes(boxes: _Boxes, handles: Sequence[Handle]) -> Digests:
    rows = np.frombuffer(boxes.rows, dtype=np.int64).reshape(-1, boxes.width)
    dims = (boxes.width - _HEAD) // 2
    opened: dict[int, Opened] = {}
    found = np.zeros(len(rows), dtype=np.uint64)
    try:
        for i, (_, segment, address, code, destination, *rest) in enumerate(rows.tolist()):
            if segment not in opened:
                opened[segment] = open_any(handles[segment])
            sizes, strides = rest[:dims], rest[dims:]
            box = box_in(opened[segment], DTYPE_NAMES[code], sizes, strides, address, "a digest")
            if isinstance(box, FileRead):
                read, box = box, torch.empty(sizes, dtype=torch_dtype(DTYPE_NAMES[code]))
                read.into(box)
            if code != destination:
                box = box.to(torch_dtype(DTYPE_NAMES[destination]))
            found[i] = digest(box, rounded=code != destination)
            del box
    finally:
        for one in opened.values():
            one.close()
    return found
