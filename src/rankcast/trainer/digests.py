"""``check="digest"``: what trainer ranks have when a push begins, whether they have the same of what several of them
hold, and whether workers say that they took it.

This module knows digests, and which box or tensor each belongs to. It must not know sessions, or what becomes of a push
that fails. Every rank digests what it exports; only rank 0 hears what workers took, and compares. Costs about one more
pass over the bytes on either side.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from rankcast.geometry import Box, whole
from rankcast.plan.columns import DTYPE_NAMES, Ints
from rankcast.plan.routes import Plan
from rankcast.trainer.direct import DirectExports
from rankcast.trainer.exports import Exports
from rankcast.trainer.fleet import Fleet
from rankcast.trainer.group import TrainerGroup
from rankcast.trainer.planning import Planning
from rankcast.trainer.replicas import Differing, Replicas, agree
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

    def __init__(self, group: TrainerGroup, fleet: Fleet | None, replicas: Replicas) -> None:
        """``fleet`` is there on rank 0 only."""
        self.replicas = replicas
        self._group = group
        self._fleet = fleet
        self._names: dict[Who, list[str]] = {}
        self._programs: dict[Who, Digests] = {}
        self._staged: dict[str, int] = {}
        self._boxes = _Boxes(_HEAD, b"")
        self._of_worker: dict[Who, Ints] = {}
        self._planned: Plan | None = None
        #: Rows among all boxes of the shards that are replicas, and the piece of the plan that each of them is of.
        self._replicated: tuple[Ints, Ints] = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def take_shards(self, direct: DirectExports, planning: Planning | None) -> None:
        """Digest every box that some worker copies, or that several ranks hold. Collective.

        ``planning`` is there on rank 0 only. Raises ``DigestError``, on every rank, when replicas differ.
        """
        asked, plan = b"", None if planning is None else planning.plan
        if plan is not None and plan is not self._planned:
            self._planned = None  # until every rank has heard its boxes, and said so
            asked = msgspec.msgpack.encode(self._cut(plan))
        said = self._group.broadcast(asked, "which boxes to digest")
        if said:
            self._boxes = msgspec.msgpack.decode(said, type=list[_Boxes])[self._group.rank]
        mine = _digest_boxes(self._boxes, direct.handles[self._group.rank])
        replies = self._group.gather(mine.tobytes(), "digests of shards")
        if replies:
            all_boxes = np.concatenate([np.frombuffer(reply, dtype=np.uint64) for reply in replies])
            self._programs = {who: all_boxes[rows] for who, rows in self._of_worker.items()}
            self._planned = plan
            agree(self._group, self._differing_replicas(all_boxes))
        else:
            agree(self._group, ())

    def _differing_replicas(self, digests: Digests) -> list[Differing]:
        plan = self._planned
        assert plan is not None, "boxes are cut of a plan"
        rows, piece = self._replicated
        found, first = digests[rows], np.searchsorted(piece, piece)
        odd = np.unique(piece[found != found[first]])
        return [self._replica(plan, int(one), found[piece == one]) for one in odd]

    @staticmethod
    def _replica(plan: Plan, piece: int, digests: Digests) -> Differing:
        pieces = plan.pieces
        meta = plan.manifest.row(int(pieces.tensor[piece]))
        dims = len(meta.shape)
        box = Box(tuple(pieces.starts[piece, :dims].tolist()), tuple(pieces.sizes[piece, :dims].tolist()))
        what = str(meta) if box == whole(meta.shape) else f"{box} of {meta}"
        start = int(pieces.first[piece])
        ranks = pieces.shards.rank[start : start + len(digests)].tolist()
        return Differing(what, meta.name, dict(zip(ranks, digests.tolist(), strict=True)))

    def _cut(self, plan: Plan) -> list[_Boxes]:
        """The distinct boxes of every rank, in the order in which ``_of_worker`` counts them."""
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
        piece, replicas = _replicas(plan)
        parts.append(replicas)
        boxes, places = np.unique(np.concatenate(parts), axis=0, return_inverse=True)
        ends = np.cumsum([len(part) for part in parts])
        *of_workers, of_replicas = np.split(places.reshape(-1), ends[:-1])
        self._of_worker = dict(zip(workers, of_workers, strict=True))
        self._replicated = of_replicas, piece
        # Sorted by rank, which is the first column.
        by_rank = np.split(boxes, np.searchsorted(boxes[:, 0], np.arange(1, self._group.size)))
        return [_Boxes(boxes.shape[1], part.tobytes()) for part in by_rank]

    def take_round(self, exports: Exports, turn: int, what: str) -> None:
        """Digest the tensors of round ``turn``, which is staged. Collective, in place of the gather called ``what``.

        Raises ``DigestError``, on every rank, when replicas that could only be compared now differ.
        """
        mine = np.array([digest(memory) for memory in exports.lying(turn, self._group.rank)], dtype=np.uint64)
        replies = self._group.gather(mine.tobytes(), what)
        for rank, reply in enumerate(replies):
            names = exports.owned(turn, rank)
            self._staged.update(zip(names, np.frombuffer(reply, dtype=np.uint64).tolist(), strict=True))
        assert exports.staging is not None, "a round is staged"
        self.replicas.compare_round(turn, exports.staging.digests)

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


def _replicas(plan: Plan) -> tuple[Ints, Ints]:
    """The pieces of ``plan`` that several ranks hold, once for each of them, and there the box of that rank."""
    pieces, shards = plan.pieces, plan.pieces.shards
    of_row = np.repeat(np.arange(len(pieces.tensor)), pieces.count)
    rows = np.flatnonzero(pieces.count[of_row] > 1)
    piece, own = of_row[rows], shards.take(rows)
    sizes = pieces.sizes[piece]
    head = np.stack([own.rank, own.segment, own.offset, own.dtype, own.dtype], axis=1).astype(np.int64)
    # As routes have them, so that a box which a worker copies whole is digested once.
    return piece, np.concatenate([head, sizes, own.strides * (sizes > 1)], axis=1)


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
