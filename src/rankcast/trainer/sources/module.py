"""A torch module as a weight source: its parameters and persistent buffers, under checkpoint names.

This module knows how names, dtypes and live tensors of a module make a manifest, a pass over it and shards. It must not
know who receives them, nor placements (``dtensor``) or packings (``packed``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from rankcast.errors import ManifestError, SourceError
from rankcast.geometry import Box
from rankcast.manifest import Manifest, TensorMeta, listed
from rankcast.trainer.sources.base import Weight, WeightSource
from rankcast.trainer.sources.dense import filler, lies_ready, plain_tensor, wire_dtype
from rankcast.trainer.sources.dtensor import (
    check_placements,
    full_tensor,
    held_anywhere,
    is_sharded,
    local_tensor,
    parts,
    refuse_gathered,
)
from rankcast.trainer.sources.names import checkpoint_tensors
from rankcast.trainer.sources.packed import (
    AS_PACKED,
    RULES,
    Piece,
    Rule,
    checkpoint_name,
    looks_packed,
    pieces,
    refuse_packed,
    rule_named,
)
from rankcast.trainer.sources.places import places_of, versions_of
from rankcast.trainer.sources.shards import Shard
from rankcast.trainer.sources.walked import WalkedModule

Dtypes = torch.dtype | Callable[[str], torch.dtype | None] | None


class _Entry(NamedTuple):
    """A checkpoint tensor: all of a module's tensor, or a piece of a packed one."""

    meta: TensorMeta
    piece: Piece | None


class _Held(NamedTuple):
    """A tensor of the module, by its full path, and the checkpoint tensors that it is or packs."""

    path: str
    tensor: torch.Tensor
    entries: list[_Entry]


class ModuleSource(WeightSource):
    """The parameters and persistent buffers of a ``nn.Module``, plain or of DTensors, in the module's own order.

    Names are the module's, without the segments of wrappers (``torch.compile``, DDP, FSDP, activation checkpointing,
    PEFT's outer two; ``module`` only where its parent holds nothing else or is a known wrapper), then through
    ``rename`` (a function from name to name), which must give each tensor a name of its own; ``renamed`` says what
    became of them. A tied parameter comes once, under the first name at which the module has it. Buffers that are not
    persistent, and extra state, are left out, as they are of a checkpoint.

    Shapes are global. Of DTensors (``fully_shard``, tensor parallelism, replicas, over a mesh of any number of
    dimensions) each rank has the shards that it holds. Those that do not go direct are gathered, one by one, which
    every rank of their mesh joins in the order of the manifest.

    Experts that the module keeps packed in one 3-D tensor come under the names that checkpoints have for each of them.
    ``experts`` names the rule; ``None`` takes the one for the ``model_type`` of the module's ``config``, and
    ``"packed"`` leaves them packed.

    ``dtype`` is the dtype on the wire: ``None`` keeps each tensor's; a ``torch.dtype`` is for all floating-point
    tensors, the others keep theirs, as with ``module.to(dtype)``; a function gets each checkpoint name and returns a
    dtype, or ``None`` to keep. Rounding is ``Tensor.to``'s and happens once, while a tensor is written.

    Tensors are looked up anew at each push, so an optimizer may move them; names, shapes and dtypes must stay as they
    were at connect. Between a call of ``push`` and its return the module must not change.

    Constructing does no work. ``manifest`` raises ``ManifestError`` when two tensors get one name or ``experts`` names
    no rule, and ``UnsupportedError`` naming a tensor without plain values: a DTensor of partial sums, a meta, lazy,
    sparse or quantised one, an adapter that is not merged, packed experts without a rule. ``read`` and ``shards`` raise
    ``SourceError`` when the module no longer fits its manifest, or has parameters gathered by ``fully_shard``.
    """

    stable = True

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: Dtypes = None,
        rename: Callable[[str], str] | None = None,
        experts: str | None = None,
    ) -> None:
        self._module = module
        self._dtype = dtype
        self._rename = rename
        self._experts = experts
        self._manifest: Manifest | None = None
        self._renamed: dict[str, str] = {}
        self._walked = WalkedModule(module)

    def manifest(self) -> Manifest:
        if self._manifest is None:
            found = self._tensors()
            self._manifest = Manifest.of(entry.meta for held in found for entry in held.entries)
            self._renamed = {
                entry.meta.name: held.path
                for held in found
                for entry in held.entries
                if entry.piece is None and entry.meta.name != held.path
            }
            # Every rank of a mesh goes through all that is staged, also where it sends none of it itself.
            self.stable = not any(is_sharded(held.tensor) for held in found)
        return self._manifest

    @property
    def renamed(self) -> Mapping[str, str]:
        """Checkpoint name -> full path in the module, of the tensors whose names differ; packed ones are left out."""
        self.manifest()
        return self._renamed

    def read(self) -> Iterator[Weight]:
        for held in self._same_tensors():
            yield from _weights(held)

    def shards(self) -> list[Shard]:
        return [shard for held in self._same_tensors() for shard in _shards(held)]

    def addresses(self) -> tuple[int, ...]:
        tensors = self._walked.tensors()
        # With the names: other names over the same memory are other shards.
        return (hash(self._walked.paths), *places_of(tensors))

    def versions(self) -> tuple[int, ...]:
        return versions_of(self._walked.same_tensors())

    def version_names(self) -> tuple[str, ...]:
        """The checkpoint name of each tensor, or its path in the module where it packs several."""
        self.manifest()
        self._walked.same_tensors()
        by_path = {path: name for name, path in self._renamed.items()}
        return tuple(by_path.get(path, path) for path in self._walked.paths)

    def _same_tensors(self) -> list[_Held]:
        """The module's tensors as they are now; raises ``SourceError`` when they no longer fit the manifest."""
        manifest = self.manifest()
        held = self._tensors()
        found = {entry.meta.name: entry.meta for one in held for entry in one.entries}
        missing = [name for name in manifest.names if name not in found]
        if missing:
            raise SourceError(f"the module has lost tensors since connect: {listed(missing)}", tensor=missing[0])
        extra = [name for name in found if name not in manifest.index]
        if extra:
            raise SourceError(f"the module has new tensors since connect: {listed(extra)}", tensor=extra[0])
        for promised in manifest.rows():
            meta = found[promised.name]
            if meta != promised:
                raise SourceError(
                    f"{promised.name} was {promised.dtype}{list(promised.shape)} at connect and is now "
                    f"{meta.dtype}{list(meta.shape)}: connect again after a module has changed",
                    tensor=promised.name,
                )
        if tuple(found) != manifest.names:
            order = {name: at for at, name in enumerate(manifest.names)}
            held.sort(key=lambda one: order[one.entries[0].meta.name] if one.entries else -1)
        return held

    def _tensors(self) -> list[_Held]:
        refuse_gathered(self._module)
        rule, architecture = self._rule()
        found: list[_Held] = []
        paths: dict[str, str] = {}
        for stripped, path, given in checkpoint_tensors(self._module):
            if not held_anywhere(given):
                continue
            check_placements(stripped, given)
            plain_tensor(stripped, local_tensor(given))
            packed = pieces(rule, stripped, given.shape)
            if packed is None and self._experts != AS_PACKED and looks_packed(stripped, given.shape):
                raise refuse_packed(stripped, given.shape, architecture)
            entries = (
                [self._entry(piece.name, piece.shape, given, piece) for piece in packed or ()]
                if packed is not None
                else [self._entry(checkpoint_name(rule, stripped), tuple(given.shape), given, None)]
            )
            for entry in entries:
                name = entry.meta.name
                if name in paths:
                    raise ManifestError(
                        f"{paths[name]} and {path} of the module both go by the checkpoint name {name}: give them "
                        "different names with rename=",
                        tensor=name,
                    )
                paths[name] = path
            found.append(_Held(path, given, entries))
        return found

    def _entry(self, unnamed: str, shape: tuple[int, ...], tensor: torch.Tensor, piece: Piece | None) -> _Entry:
        name = unnamed if self._rename is None else self._rename(unnamed)
        if not isinstance(name, str):
            raise ManifestError(f"rename gave {name!r} for {unnamed}: it must return a name", tensor=unnamed)
        return _Entry(TensorMeta(name, wire_dtype(name, self._wire_dtype(name, tensor)), shape), piece)

    def _rule(self) -> tuple[Rule | None, str | None]:
        """The rule for packed experts, and the ``model_type`` that the module's configuration names."""
        configs = (getattr(module, "config", None) for module in self._module.modules())
        named = (getattr(config, "model_type", None) for config in configs)
        architecture = next((name for name in named if isinstance(name, str)), None)
        if self._experts is not None:
            return rule_named(self._experts), architecture
        return RULES.get(architecture or ""), architecture

    def _wire_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is None:
            return tensor.dtype
        if isinstance(self._dtype, torch.dtype):
            return self._dtype if tensor.is_floating_point() else tensor.dtype
        return self._dtype(name) or tensor.dtype


def _weights(held: _Held) -> Iterator[Weight]:
    if is_sharded(held.tensor):
        gathered = _Gathered(held)
        try:
            for meta, piece in held.entries:
                yield Weight(meta, gathered.filler(meta, piece), gather=gathered.gather)
        finally:
            gathered.let_go()  # before the next tensor is gathered
        return
    whole_of_it = local_tensor(held.tensor).detach()
    for meta, piece in held.entries:
        tensor = _cut(whole_of_it, piece)
        yield Weight(meta, filler(tensor, meta.dtype), tensor if lies_ready(tensor, meta.dtype) else None)


class _Gathered:
    """A sharded tensor, gathered when the first of its entries is asked for, and kept for the others."""

    def __init__(self, held: _Held) -> None:
        self._held = held
        self._full: torch.Tensor | None = None
        self._over = False

    def gather(self) -> None:
        if self._over:
            # The other ranks are past it: a collective now would wait for them for ever.
            raise SourceError(f"{self._held.path} was asked for after the source had moved on", tensor=self._held.path)
        if self._full is None:
            self._full = full_tensor(self._held.tensor)

    def filler(self, meta: TensorMeta, piece: Piece | None) -> Callable[[torch.Tensor], None]:
        def fill(buffer: torch.Tensor) -> None:
            self.gather()
            assert self._full is not None
            filler(_cut(self._full, piece), meta.dtype)(buffer)

        return fill

    def let_go(self) -> None:
        self._full, self._over = None, True


def _cut(tensor: torch.Tensor, piece: Piece | None) -> torch.Tensor:
    return tensor if piece is None else tensor[piece.expert, piece.start : piece.stop]


def _shards(held: _Held) -> Iterator[Shard]:
    local = local_tensor(held.tensor).detach()
    for part in parts(held.path, held.tensor):
        for meta, piece in held.entries:
            if piece is None:
                yield Shard(meta, part.box, _boxed(local, part.local))
            elif (mine := piece.of(part.box)) is not None:
                box, packed = mine
                steps = zip(packed.offsets, part.box.offsets, part.local.offsets, strict=True)
                starts = tuple(wanted - start + at for wanted, start, at in steps)
                yield Shard(meta, box, _boxed(local, Box(starts, packed.sizes))[0])


def _boxed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    slices = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    return tensor[slices] if slices else tensor
