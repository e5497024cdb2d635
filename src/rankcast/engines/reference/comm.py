"""How the workers of one engine exchange activations.

This module knows the groups of a layout and the few exchanges that a decoder needs. It must not know the decoder, nor
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from rankcast.engines.reference.layout import Layout, WorkerPlace
from rankcast.errors import EngineError


class Comm(Protocol):
    """One worker's side of every exchange; all workers concerned make the same calls in the same order.

    Tensors given may be overwritten; those returned have the given shape and dtype unless said otherwise.
    """

    def all_reduce_tp(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the TP ranks of this replica and pipeline stage."""
        ...

    def all_reduce_ep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the workers among which the experts of this pipeline stage are spread."""
        ...

    def send_next(self, tensor: torch.Tensor) -> None:
        """Hand ``tensor`` to the worker of the next pipeline stage with the same dp and tp index."""
        ...

    def recv_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the worker of the previous stage with the same dp and tp index sent."""
        ...

    def gather_vocab(self, tensor: torch.Tensor) -> torch.Tensor:
        """Logits [T, V/tp] of this rank's vocabulary rows to logits [T, V] of all, in vocabulary order."""
        ...

    def share_choice(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the first worker of replica 0's last stage, on every worker of the engine."""
        ...


class SingleComm:
    """The ``Comm`` of an engine with one worker: there is nobody to talk to."""

    def all_reduce_tp(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_reduce_ep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send_next(self, tensor: torch.Tensor) -> None:
        raise EngineError("an engine of one worker has no next pipeline stage")

    def recv_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise EngineError("an engine of one worker has no previous pipeline stage")

    def gather_vocab(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def share_choice(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class GroupComm:
    """The ``Comm`` of one process per worker, over ``torch.distributed`` on CPU tensors.

    The default process group must be up, with gloo, one rank per worker and ranks equal to worker ranks; every worker
    makes one ``GroupComm`` at the same time. An exchange that waits longer than ``timeout`` seconds for a peer raises
    torch's error; a default group of another size or order raises ``EngineError``.
    """

    def __init__(self, place: WorkerPlace, *, timeout: float = 60.0) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        if (size, rank) != (place.layout.workers, place.rank):
            raise EngineError(
                f"{place.label} runs as rank {rank} of a process group of {size}: start one process per worker, with "
                "group ranks equal to worker ranks",
                worker=place.label,
            )
        self._place = place
        limit = timedelta(seconds=timeout)
        # Every process takes part in making every group, in one order, those that it is no member of included.
        self._tp = _own_group(place.rank, tp_groups(place.layout), limit)
        self._ep = _own_group(place.rank, ep_groups(place.layout), limit) if place.layout.expert_parallel else None
        # Not the default group: its timeout is somebody else's choice.
        self._all = _own_group(place.rank, [tuple(range(size))], limit)

    def all_reduce_tp(self, tensor: torch.Tensor) -> torch.Tensor:
        return _summed(tensor, self._tp) if self._place.layout.tp > 1 else tensor

    def all_reduce_ep(self, tensor: torch.Tensor) -> torch.Tensor:
        return _summed(tensor, self._ep) if self._place.ep_size > 1 else tensor

    def send_next(self, tensor: torch.Tensor) -> None:
        dist.send(tensor.contiguous(), self._place.rank + self._place.layout.tp, group=self._all)

    def recv_previous(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        dist.recv(tensor, self._place.rank - self._place.layout.tp, group=self._all)
        return tensor

    def gather_vocab(self, tensor: torch.Tensor) -> torch.Tensor:
        tp = self._place.layout.tp
        if tp == 1:
            return tensor
        shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(tp)]
        dist.all_gather(shards, tensor.contiguous(), group=self._tp)
        return torch.cat(shards, dim=-1)

    def share_choice(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, chooser(self._place.layout), group=self._all)
        return tensor


def tp_groups(layout: Layout) -> list[tuple[int, ...]]:
    """Worker ranks by TP group, each in order of tp index."""
    return _grouped(layout, lambda place: (place.dp_index, place.pp_index))


def ep_groups(layout: Layout) -> list[tuple[int, ...]]:
    """Worker ranks by EP group (DP x TP of one pipeline stage), each in order of ep rank."""
    return _grouped(layout, lambda place: (place.pp_index,))


def chooser(layout: Layout) -> int:
    """The rank of the worker whose choice of a token the whole engine follows."""
    return (layout.pp - 1) * layout.tp


def _grouped(layout: Layout, key: Callable[[WorkerPlace], tuple[int, ...]]) -> list[tuple[int, ...]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.workers):
        groups.setdefault(key(layout.place(rank)), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _own_group(rank: int, groups: Iterable[tuple[int, ...]], timeout: timedelta) -> dist.ProcessGroup | None:
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        if rank in ranks:
            own = group
    return own


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, group=group)
    return tensor
