"""Which boxes of a tensor a DTensor holds on this rank, and where each lies in its local tensor.

This module knows placements over meshes of any number of dimensions. It must not know names' meaning or modules. It
imports no part of ``torch.distributed.tensor`` until somebody has made a DTensor.

Positions along a tensor's dimension are followed as runs, mesh dimension by mesh dimension from left to right, the
order in which DTensor itself applies its placements. A strided placement (FSDP over tensor parallelism) may leave
several runs, and then there are several boxes: an offset and a size would be wrong for it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rankcast.errors import SourceError, UnsupportedError
from rankcast.geometry import Box, whole

#: Consecutive positions: the first of them, and how many.
Run = tuple[int, int]


class Part(NamedTuple):
    """A box of the whole tensor, and the box of the local tensor that holds it."""

    box: Box
    local: Box


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor."""
    return _is_dtensor_class(type(tensor))


def _is_dtensor_class(kind: type) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only where this was imported
    return distributed is not None and issubclass(kind, distributed.DTensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor of which one rank may hold a part only."""
    return is_dtensor(tensor) and not all(placement.is_replicate() for placement in _placements(tensor))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds: the local tensor of a DTensor, any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]  # DTensor's
    return local


def local_tensors(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``local_tensor`` of each; ``tensors`` itself when none of them is a DTensor."""
    if not any(_is_dtensor_class(kind) for kind in set(map(type, tensors))):
        return tensors
    with torch.no_grad():
        return [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]  # DTensor's


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached; of a sharded DTensor by a collective, which every rank of its mesh must join."""
    with torch.no_grad():
        full: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]  # DTensor's
    return full.detach()


def held_anywhere(tensor: torch.Tensor) -> bool:
    """False for a DTensor over a mesh that this rank is no part of."""
    return not is_dtensor(tensor) or _coordinate(tensor) is not None


def parts(name: str, tensor: torch.Tensor) -> tuple[Part, ...]:
    """What this rank holds of ``tensor``, called ``name`` in messages; nothing when its local shard is empty.

    Raises ``UnsupportedError`` naming the tensor for a placement whose values are not plain (a partial sum), or is of
    a kind not known here, and when the local tensor is not of the size that its placements say.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return (Part(whole(shape), whole(shape)),)
    check_placements(name, tensor)
    coordinate = _coordinate(tensor)
    if coordinate is None:
        return ()
    placements = _placements(tensor)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]  # DTensor's
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for at, placement in enumerate(placements):
        if not placement.is_replicate():
            split = getattr(placement, "split_factor", 1)
            runs[placement.dim] = _taken(runs[placement.dim], split, mesh.size(at), coordinate[at])
    local = tuple(local_tensor(tensor).shape)
    stated = tuple(sum(size for _, size in along) for along in runs)
    if local != stated and 0 not in (*local, *stated):
        raise UnsupportedError(
            f"{name} is a DTensor {list(shape)} with placements {list(map(str, placements))}, of which rank "
            f"{list(coordinate)} of the mesh holds {list(local)} where {list(stated)} was expected: gather it "
            "(full_tensor()) in a function that yields (name, tensor), or declare its boxes",
            tensor=name,
        )
    if 0 in (*local, *stated):
        return ()
    return tuple(_boxes(runs))


def refuse_gathered(module: torch.nn.Module) -> None:
    """Raise ``SourceError`` when ``fully_shard`` has parameters of ``module`` gathered at this moment.

    What it has gathered are copies, which the next step of an optimizer leaves stale and which it frees without asking.
    """
    for path, child in module.named_modules():
        state = getattr(child, "_get_fsdp_state", None)
        if state is None:
            continue
        found = state()
        groups = getattr(found, "_fsdp_param_groups", None) or [getattr(found, "_fsdp_param_group", None)]
        if any(group is not None and not group.is_sharded for group in groups):
            raise SourceError(
                f"{path or type(child).__name__} has its parameters gathered by fully_shard, as after a forward pass "
                "without a backward one: call reshard() on it and on each FSDPModule below it before a push"
            )


def check_placements(name: str, tensor: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` naming a DTensor with a placement that no box of plain values stands for."""
    for placement in _placements(tensor) if is_dtensor(tensor) else ():
        kind = type(placement).__name__
        if kind not in ("Shard", "_StridedShard", "Replicate"):
            raise UnsupportedError(
                f"{name} is a DTensor with the placement {placement} ({kind}), whose local values are no part of the "
                "tensor's: redistribute it to shards or replicas first",
                tensor=name,
            )


def _placements(tensor: torch.Tensor) -> Sequence[Any]:
    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]  # DTensor's
    return placements


def _coordinate(tensor: torch.Tensor) -> Sequence[int] | None:
    coordinate: Sequence[int] | None = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]  # DTensor's
    return coordinate


def _taken(runs: Sequence[Run], split: int, ranks: int, rank: int) -> list[Run]:
    """Of the positions in ``runs``, those that go to ``rank`` of ``ranks``: its chunk of each of ``split`` chunks."""
    total = sum(size for _, size in runs)
    found: list[Run] = []
    for outer in range(split):
        start, stop = _chunk(total, split, outer)
        inner_start, inner_stop = _chunk(stop - start, ranks, rank)
        for first, size in _between(runs, start + inner_start, start + inner_stop):
            if found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], found[-1][1] + size)
            else:
                found.append((first, size))
    return found


def _chunk(total: int, count: int, index: int) -> Run:
    """Start and stop of a chunk as ``torch.chunk`` cuts, where later chunks may be smaller or empty."""
    size = -(-total // count)
    return min(index * size, total), min((index + 1) * size, total)


def _between(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    passed = 0
    for first, size in runs:
        a, b = max(start - passed, 0), min(stop - passed, size)
        if a < b:
            yield first + a, b - a
        passed += size


def _boxes(runs: Sequence[Sequence[Run]]) -> Iterator[Part]:
    """Every combination of one run for each dimension; the local tensor has them one behind the other."""
    placed = [[(run, sum(size for _, size in along[:at])) for at, run in enumerate(along)] for along in runs]
    for combination in itertools.product(*placed):
        sizes = tuple(size for (_, size), _ in combination)
        yield Part(
            Box(tuple(first for (first, _), _ in combination), sizes), Box(tuple(at for _, at in combination), sizes)
        )
