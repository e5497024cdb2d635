"""A declared source: the user says which box of which checkpoint tensor each local view is.

This module knows what a declaration must satisfy. It must not know any layout: that knowledge is the declaring user's
(Megatron's interleaved query groups, fused gate and up of a tensor-parallel rank, and the like).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from rankcast.errors import ManifestError, SourceError, UnsupportedError
from rankcast.geometry import Box, uncovered, whole
from rankcast.manifest import Manifest, TensorMeta
from rankcast.trainer.sources.base import Weight, WeightSource
from rankcast.trainer.sources.dense import lies_ready, plain_tensor, wire_dtype
from rankcast.trainer.sources.dtensor import is_dtensor
from rankcast.trainer.sources.places import places_of, versions_of
from rankcast.trainer.sources.shards import Shard
from rankcast.transports.segment import torch_dtype


@dataclasses.dataclass(frozen=True)
class Declared:
    """``tensor`` is the box ``box`` of the checkpoint tensor ``name``, whose full (global) shape is ``full_shape``.

    ``box`` has a start and a stop for each dimension; ``None`` is the whole tensor. ``tensor`` is a view of the live
    weight, of any strides, and of the dtype that it goes by on the wire; of a DTensor it is the local tensor.
    """

    name: str
    full_shape: Sequence[int]
    tensor: torch.Tensor
    box: Sequence[tuple[int, int]] | None = None


class _Named(NamedTuple):
    meta: TensorMeta
    shards: list[Shard]


class DeclaredSource(WeightSource):
    """Weights in a layout that only the user knows, as boxes of checkpoint tensors and local views of them.

    ``declarations`` are what this trainer rank holds, or a function that returns them: then they are asked for anew
    when memory may have moved. Several may be of one tensor, as long as their boxes do not overlap.

    ``manifest`` raises ``ManifestError`` naming the tensor when a view's shape is not its box's, a box is not inside
    the full shape, two boxes overlap, or two declarations of a tensor differ in full shape or dtype; and
    ``UnsupportedError`` for a view without plain values, and for a DTensor. A tensor of which this rank declares less
    than all can go direct only: ``check_whole`` and its weight raise ``UnsupportedError``.
    """

    stable = True

    def __init__(self, declarations: Iterable[Declared] | Callable[[], Iterable[Declared]]) -> None:
        self._declare: Callable[[], Iterable[Declared]]
        if callable(declarations):
            self._declare = declarations
        else:
            fixed = tuple(declarations)
            self._declare = lambda: fixed
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = Manifest.of(named.meta for named in self._named())
        return self._manifest

    def shards(self) -> list[Shard]:
        return [shard for named in self._same() for shard in named.shards]

    def read(self) -> Iterator[Weight]:
        for meta, shards in self._same():
            first = shards[0].memory
            assert isinstance(first, torch.Tensor)
            alone = len(shards) == 1 and shards[0].box == whole(meta.shape) and lies_ready(first, meta.dtype)
            yield Weight(meta, _assembler(meta, shards), first if alone else None)

    def check_whole(self, names: Collection[str]) -> None:
        wanted = frozenset(names)
        for meta, shards in self._same():
            if meta.name in wanted:
                _check_whole(meta, shards)

    def addresses(self) -> tuple[int, ...]:
        declared = list(self._declare())
        # With the boxes: another box over the same memory is another shard.
        boxes = hash(tuple(map(_boxed, declared)))
        return (boxes, *places_of([one.tensor for one in declared]))

    def versions(self) -> tuple[int, ...]:
        return versions_of([one.tensor for one in self._declare()])

    def version_names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self._declare())

    def _same(self) -> list[_Named]:
        manifest = self.manifest()
        named = self._named()
        now = Manifest.of(one.meta for one in named)
        if now != manifest:
            differing = sorted(set(now.rows()) ^ set(manifest.rows()), key=str)
            which = f"{differing[0]} is declared before or now, not both" if differing else "their order changed"
            raise SourceError(f"the declarations changed since connect: {which}")
        return named

    def _named(self) -> list[_Named]:
        found: dict[str, _Named] = {}
        for declared in self._declare():
            shard = _shard(declared)
            named = found.setdefault(declared.name, _Named(shard.meta, []))
            if named.meta != shard.meta:
                raise ManifestError(
                    f"{declared.name} is declared as {named.meta} and as {shard.meta}", tensor=declared.name
                )
            named.shards.append(shard)
        for meta, shards in found.values():
            _, _, doubled = uncovered(meta.shape, [shard.box for shard in shards])
            if doubled is not None:
                raise ManifestError(f"{meta}: {doubled} is declared twice", tensor=meta.name)
        return list(found.values())


def _boxed(declared: Declared) -> tuple[object, ...]:
    """What is declared of a view, besides the view."""
    box = declared.box
    return declared.name, tuple(declared.full_shape), None if box is None else tuple(map(tuple, box))


def _shard(declared: Declared) -> Shard:
    name = declared.name
    if is_dtensor(declared.tensor):
        raise UnsupportedError(
            f"{name} is declared with a DTensor: declare its local tensor (to_local()) and the box of the whole that "
            "this rank holds in it, or pass the module itself, whose placements are known",
            tensor=name,
        )
    tensor = plain_tensor(name, declared.tensor)
    meta = TensorMeta(name, wire_dtype(name, tensor.dtype), tuple(declared.full_shape))
    box = whole(meta.shape)
    if declared.box is not None:
        if any(not 0 <= start <= stop for start, stop in declared.box):
            raise ManifestError(
                f"{meta} is declared with the box {list(declared.box)}, a stop before its start", tensor=name
            )
        box = Box(tuple(start for start, _ in declared.box), tuple(stop - start for start, stop in declared.box))
    if not box.inside(meta.shape):
        raise ManifestError(f"{meta} has no box {box}: it is not inside the full shape", tensor=name)
    if tuple(tensor.shape) != box.sizes:
        raise ManifestError(
            f"{meta}: the view for box {box} has the shape {list(tensor.shape)}, not {list(box.sizes)}", tensor=name
        )
    return Shard(meta, box, tensor)


def _check_whole(meta: TensorMeta, shards: Sequence[Shard]) -> None:
    missing, gap, _ = uncovered(meta.shape, [shard.box for shard in shards])
    if missing:
        raise UnsupportedError(
            f"{meta} goes through the engine's loader, which needs all of it, but it is declared in parts, and this "
            f"rank lacks {gap} of it: declare all of it on this rank, or gather it in a function that yields (name, "
            "tensor), or push with mode='direct', which takes parts and says what keeps a tensor from it",
            tensor=meta.name,
        )


def _assembler(meta: TensorMeta, shards: Sequence[Shard]) -> Callable[[torch.Tensor], None]:
    def fill(buffer: torch.Tensor) -> None:
        _check_whole(meta, shards)
        whole_of_it = buffer.view(torch_dtype(meta.dtype)).view(meta.shape)
        with torch.no_grad():
            for shard in shards:
                assert isinstance(shard.memory, torch.Tensor)
                target = whole_of_it
                for axis, (start, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
                    target = target.narrow(axis, start, size)
                target.copy_(shard.memory)

    return fill
