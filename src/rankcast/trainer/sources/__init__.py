"""Weight sources: what a push may be given, and which kind of source that makes.

This package's front knows the kinds there are; it must not know what any of them does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import cast

from torch import nn

from rankcast.errors import UnsupportedError
from rankcast.trainer.sources.base import Weight, WeightSource
from rankcast.trainer.sources.declared import Declared, DeclaredSource
from rankcast.trainer.sources.exported import ExportedShards, RankShards, export_shards
from rankcast.trainer.sources.iterable import IterableSource, Stream
from rankcast.trainer.sources.module import ModuleSource
from rankcast.trainer.sources.safetensors import SafetensorsSource
from rankcast.trainer.sources.shards import FileRange, Shard

__all__ = [
    "Declared",
    "DeclaredSource",
    "ExportedShards",
    "FileRange",
    "IterableSource",
    "ModuleSource",
    "RankShards",
    "SafetensorsSource",
    "Shard",
    "Weight",
    "WeightSource",
    "as_source",
    "export_shards",
]


def as_source(source: object) -> WeightSource:
    """The source that ``source`` stands for: a ``WeightSource`` itself, a ``nn.Module``, a checkpoint's path (str or
    path), or a function without arguments that returns an iterator of (name, tensor).

    Raises ``UnsupportedError`` listing these for anything else.
    """
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, nn.Module):
        return ModuleSource(source)
    if isinstance(source, (str, os.PathLike)):
        return SafetensorsSource(source)
    if callable(source):
        return IterableSource(cast(Callable[[], Stream], source))
    hint = ""
    if hasattr(source, "__next__"):
        hint = "; a generator can be gone through only once, and every push needs a new pass: pass the function"
    elif isinstance(source, Mapping):
        hint = "; of a dict of whole tensors: lambda: iter(tensors.items())"
    raise UnsupportedError(
        f"{type(source).__name__} is no weight source: give a torch.nn.Module, a rankcast.WeightSource, the path of a "
        f"safetensors checkpoint, or a function that returns an iterator of (name, tensor){hint}"
    )
