"""All workers of an engine as threads of one process: a ``Comm`` over barriers, and a run of one layout.

It knows the reference model's surface; it must not know what any test expects.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from rankcast.engines.reference.comm import Comm, chooser, ep_groups, tp_groups
from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout

T = TypeVar("T")
TIMEOUT = 60.0


class Meeting:
    """Every member leaves a tensor and takes all of them, in order of ``ranks``."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(len(ranks), timeout=TIMEOUT)
        self.left: dict[int, torch.Tensor] = {}

    def meet(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.left[rank] = tensor.clone()
        self.barrier.wait()
        taken = [self.left[other] for other in self.ranks]
        self.barrier.wait()
        return taken


class Rooms:
    """The meetings and mailboxes of one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.tp = {rank: room for room in map(Meeting, tp_groups(layout)) for rank in room.ranks}
        spread = ep_groups(layout) if layout.expert_parallel else [(rank,) for rank in range(layout.workers)]
        self.ep = {rank: room for room in map(Meeting, spread) for rank in room.ranks}
        self.all = Meeting(tuple(range(layout.workers)))
        self.mail: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(layout.workers)]

    def abort(self) -> None:
        for room in (*self.tp.values(), *self.ep.values(), self.all):
            room.barrier.abort()


class ThreadComm:
    def __init__(self, rooms: Rooms, rank: int) -> None:
        self.rooms, self.rank = rooms, rank

    def all_reduce_tp(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.rooms.tp[self.rank].meet(self.rank, tensor)).sum(0)

    def all_reduce_ep(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.rooms.ep[self.rank].meet(self.rank, tensor)).sum(0)

    def send_next(self, tensor: torch.Tensor) -> None:
        self.rooms.mail[self.rank + self.rooms.layout.tp].put(tensor.clone())

    def recv_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = self.rooms.mail[self.rank].get(timeout=TIMEOUT)
        assert tuple(tensor.shape) == tuple(shape)
        assert tensor.dtype == dtype
        return tensor

    def gather_vocab(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.rooms.tp[self.rank].meet(self.rank, tensor), dim=-1)

    def share_choice(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.rooms.all.meet(self.rank, tensor)[chooser(self.rooms.layout)]


def on_every_worker(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    layout: Layout,
    work: Callable[[ReferenceModel, Comm], T],
    spoil: Callable[[ReferenceModel], None] = lambda model: None,
) -> list[T]:
    """Load ``weights`` on every worker of ``layout``, ``spoil`` each, and do ``work`` on all at once; by rank."""
    parsed = parse_config(config)
    rooms = Rooms(layout)

    def one(rank: int) -> T:
        try:
            model = ReferenceModel(parsed, layout.place(rank))
            model.load_weights(weights.items())
            spoil(model)
            return work(model, ThreadComm(rooms, rank))
        except BaseException:
            rooms.abort()
            raise

    with ThreadPoolExecutor(layout.workers) as pool:
        futures = [pool.submit(one, rank) for rank in range(layout.workers)]
        failures = [error for future in futures if (error := future.exception()) is not None]
        # A broken barrier is what the others saw of somebody's failure.
        for error in sorted(failures, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
