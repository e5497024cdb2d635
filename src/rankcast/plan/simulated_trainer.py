"""The shards that the ranks of a trainer grid would hold of a model, without any trainer.

This module joins tensors and a trainer grid into columns. It must not know rollout. Every rank has one segment, in
which its shards lie dense, one after another, as optimizers with flat buffers keep them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rankcast.plan.columns import ITEM_BYTES, Ints, Shards, dtype_codes, product
from rankcast.plan.grids import TrainerGrid, share
from rankcast.plan.tensors import Tensors

#: How many trainer ranks, or workers, one host has.
RANKS_PER_HOST = 8

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """Who holds what: int64 columns of tensors, ranks, and which part of how many (by column of the tables)."""

    tensor: Ints
    rank: Ints
    part: Ints


def trainer_shards(tensors: Tensors, grid: TrainerGrid) -> Shards:
    """All shards of all ranks. Raises ``UnsupportedError`` when the grid does not divide the model."""
    grid.check(tensors.family)
    return _fsdp(tensors, grid) if grid.fsdp else _megatron(tensors, grid)


def holders(tensors: Tensors, grid: TrainerGrid) -> list[list[int]]:
    """For each rank the tensors that it would yield whole after gathering: all of which it holds a part.

    Under fsdp a gather gives every rank everything.
    """
    if grid.fsdp:
        return [list(range(len(tensors.manifest)))] * grid.ranks
    shards = trainer_shards(tensors, grid)
    order = np.argsort(shards.rank, kind="stable")
    cuts = np.searchsorted(shards.rank[order], np.arange(1, grid.ranks))
    return [np.unique(part).tolist() for part in np.split(shards.tensor[order], cuts)]


def _megatron(tensors: Tensors, grid: TrainerGrid) -> Shards:
    family = tensors.family
    stage_of_layer = np.empty(family.layers + 2, dtype=np.int64)
    for number, layers in enumerate(grid.stage_layers(family.layers)):
        stage_of_layer[layers.start + 1 : layers.stop + 1] = number
    stage_of_layer[0], stage_of_layer[-1] = 0, grid.pp - 1
    stage = stage_of_layer[tensors.layer + 1]
    is_expert = tensors.expert >= 0
    dense, expert = np.flatnonzero(~is_expert), np.flatnonzero(is_expert)
    parts = [_spread(dense, stage[dense] * grid.stage, np.arange(grid.stage), grid.tp)]
    if family.tied and grid.pp > 1:
        # The last stage keeps a copy of the embedding, for the head.
        copy = np.flatnonzero(tensors.layer < 0)
        last = np.full(len(copy), (grid.pp - 1) * grid.stage)
        parts.append(_spread(copy, last, np.arange(grid.stage), grid.tp))
    if len(expert):
        groups = family.experts // grid.ep
        first = stage[expert] * grid.stage + tensors.expert[expert] // groups * grid.etp
        replicas = np.arange(grid.stage // (grid.ep * grid.etp)) * grid.ep * grid.etp
        slots = (replicas[:, None] + np.arange(grid.etp)).reshape(-1)
        parts.append(_spread(expert, first, slots, grid.etp))
    held = _Held(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(_Held)))
    ways = max(grid.tp, grid.etp)
    starts, sizes = _tables(tensors, grid, ways)
    kind = tensors.kind[held.tensor]
    return _shards(tensors, held.tensor, held.rank, starts[kind, held.part], sizes[kind, held.part])


def _spread(tensor: Ints, first: Ints, slots: Ints, ways: int) -> _Held:
    """Every tensor on the ranks ``first`` + each of ``slots``; a slot's part is its number modulo ``ways``."""
    rank = (first[:, None] + slots).reshape(-1)
    return _Held(np.repeat(tensor, len(slots)), rank, np.tile(slots % ways, len(tensor)))


def _tables(tensors: Tensors, grid: TrainerGrid, ways: int) -> tuple[Ints, Ints]:
    """Starts and sizes int64 [kinds, ways, D] of each kind's parts."""
    starts = np.zeros((len(tensors.kinds), ways, tensors.shapes.shape[1]), dtype=np.int64)
    sizes = np.repeat(tensors.shapes[:, None], ways, axis=1)
    for number, kind in enumerate(tensors.kinds):
        count = grid.etp if kind.expert else grid.tp
        for part in range(count):
            own = share(kind, count, part)
            starts[number, part, kind.dimension] = own.start
            sizes[number, part, kind.dimension] = len(own)
    return starts, sizes


def _fsdp(tensors: Tensors, grid: TrainerGrid) -> Shards:
    shapes = tensors.shapes[tensors.kind]
    is_expert = tensors.expert >= 0
    dense, expert = np.flatnonzero(~is_expert), np.flatnonzero(is_expert)
    chunk = -(-shapes[dense, 0] // grid.fsdp)
    tensor = np.repeat(dense, grid.fsdp)
    rank = np.tile(np.arange(grid.fsdp), len(dense))
    starts = np.zeros((len(tensor), shapes.shape[1]), dtype=np.int64)
    sizes = shapes[tensor]
    starts[:, 0] = np.minimum(rank * np.repeat(chunk, grid.fsdp), sizes[:, 0])
    sizes[:, 0] = np.minimum(np.repeat(chunk, grid.fsdp), sizes[:, 0] - starts[:, 0])
    some = sizes[:, 0] > 0
    owner = tensors.expert[expert] // -(-max(tensors.family.experts, 1) // grid.fsdp)
    tensor = np.concatenate([tensor[some], expert])
    rank = np.concatenate([rank[some], owner])
    starts = np.concatenate([starts[some], np.zeros((len(expert), starts.shape[1]), dtype=np.int64)])
    sizes = np.concatenate([sizes[some], shapes[expert]])
    replica = np.repeat(np.arange(grid.dp) * grid.fsdp, len(tensor))
    every = np.tile(np.arange(len(tensor)), grid.dp)
    return _shards(tensors, tensor[every], rank[every] + replica, starts[every], sizes[every])


def _shards(tensors: Tensors, tensor: Ints, rank: Ints, starts: Ints, sizes: Ints) -> Shards:
    kind = tensors.kind[tensor]
    strides = dense_strides(sizes)
    dtype = dtype_codes(each.dtype for each in tensors.kinds)[kind]
    nbytes = product(sizes) * ITEM_BYTES[dtype]
    return Shards(
        tensor.astype(np.int32),
        rank.astype(np.int32),
        (rank // RANKS_PER_HOST).astype(np.int32),
        np.zeros(len(tensor), dtype=np.int32),
        _offsets(rank, -(-nbytes // _ALIGNMENT) * _ALIGNMENT),
        starts,
        sizes,
        strides,
        dtype,
    )


def dense_strides(sizes: Ints) -> Ints:
    """Row-major strides int64 [n, D] of dense tensors of ``sizes``; 0 where the size is 1."""
    strides = np.ones_like(sizes)
    strides[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    strides[sizes == 1] = 0
    return strides


def _offsets(rank: Ints, nbytes: Ints) -> Ints:
    """Where each shard begins in its rank's segment when they lie one after another."""
    order = np.argsort(rank, kind="stable")
    ends = np.cumsum(nbytes[order])
    new = np.flatnonzero(np.diff(rank[order], prepend=-1))
    begins = ends - nbytes[order]
    offsets = np.empty_like(nbytes)
    offsets[order] = begins - np.repeat(begins[new], np.diff(new, append=len(rank)))
    return offsets
