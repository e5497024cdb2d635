"""A torch module as a weight source: its parameters and persistent buffers, under checkpoint names.

This module knows how names, dtypes and live tensors of a module make a manifest and a pass over it. It must not know
who receives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from rankcast.errors import ManifestError, SourceError
from rankcast.manifest import Manifest, TensorMeta, listed
from rankcast.trainer.sources.base import Weight, WeightSource
from rankcast.trainer.sources.dense import filler, lies_ready, whole_tensor, wire_dtype
from rankcast.trainer.sources.names import checkpoint_tensors

Dtypes = torch.dtype | Callable[[str], torch.dtype | None] | None


class ModuleSource(WeightSource):
    """The parameters and persistent buffers of a plain ``nn.Module``, in the module's own order.

    Names are the module's, without the segments of wrappers (``torch.compile``, DDP, FSDP, activation checkpointing,
    PEFT's outer two; ``module`` only where its parent holds nothing else or is a known wrapper), then through
    ``rename`` (a function from name to name), which must give each tensor a name of its own. A tied parameter comes
    once, under the first name at which the module has it. Buffers that are not persistent, and extra state, are left
    out, as they are of a checkpoint.

    ``dtype`` is the dtype on the wire: ``None`` keeps each tensor's; a ``torch.dtype`` is for all floating-point
    tensors, the others keep theirs, as with ``module.to(dtype)``; a function gets each checkpoint name and returns a
    dtype, or ``None`` to keep. Rounding is ``Tensor.to``'s and happens once, while a tensor is written.

    Tensors are looked up anew at each push, so an optimizer may move them; names, shapes and dtypes must stay as they
    were at connect. Between a call of ``push`` and its return the module must not change.

    Constructing does no work. ``manifest`` raises ``ManifestError`` when two tensors get one name, and
    ``UnsupportedError`` naming a tensor without plain values here: a sharded DTensor, a meta, lazy, sparse or quantised
    one, an adapter that is not merged. ``read`` raises ``SourceError`` when the module no longer fits its manifest.
    """

    stable = True

    def __init__(self, module: nn.Module, *, dtype: Dtypes = None, rename: Callable[[str], str] | None = None) -> None:
        self._module = module
        self._dtype = dtype
        self._rename = rename
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = Manifest.of(meta for meta, _ in self._tensors().values())
        return self._manifest

    def read(self) -> Iterator[Weight]:
        manifest = self.manifest()
        found = self._tensors()
        missing = [name for name in manifest.names if name not in found]
        if missing:
            raise SourceError(f"the module has lost tensors since connect: {listed(missing)}", tensor=missing[0])
        extra = [name for name in found if name not in manifest.index]
        if extra:
            raise SourceError(f"the module has new tensors since connect: {listed(extra)}", tensor=extra[0])
        for promised in manifest.rows():
            meta, _ = found[promised.name]
            if meta != promised:
                raise SourceError(
                    f"{promised.name} was {promised.dtype}{list(promised.shape)} at connect and is now "
                    f"{meta.dtype}{list(meta.shape)}: connect again after a module has changed",
                    tensor=promised.name,
                )
        for meta in manifest.rows():
            tensor = found[meta.name][1]
            ready = tensor if lies_ready(tensor, meta.dtype) else None
            yield Weight(meta, filler(tensor, meta.dtype), ready)

    def _tensors(self) -> dict[str, tuple[TensorMeta, torch.Tensor]]:
        found: dict[str, tuple[TensorMeta, torch.Tensor]] = {}
        paths: dict[str, str] = {}
        for stripped, path, given in checkpoint_tensors(self._module):
            name = stripped if self._rename is None else self._rename(stripped)
            if not isinstance(name, str):
                raise ManifestError(f"rename gave {name!r} for {stripped}: it must return a name", tensor=stripped)
            if name in paths:
                raise ManifestError(
                    f"{paths[name]} and {path} of the module both go by the checkpoint name {name}: give them "
                    "different names with rename=",
                    tensor=name,
                )
            paths[name] = path
            tensor = whole_tensor(name, given)
            dtype = wire_dtype(name, self._wire_dtype(name, tensor))
            found[name] = TensorMeta(name, dtype, tuple(tensor.shape)), tensor
        return found

    def _wire_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is None:
            return tensor.dtype
        if isinstance(self._dtype, torch.dtype):
            return self._dtype if tensor.is_floating_point() else tensor.dtype
        return self._dtype(name) or tensor.dtype
