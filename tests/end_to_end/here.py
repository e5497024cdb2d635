"""A trainer of one rank in the test's own process.

It knows how to connect and push a checkpoint's bits. It must not know what a test breaks meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import rankcast
from checkpoints import as_torch
from rankcast import IterableSource, PushReport, Sync

Bits = Mapping[str, Any]


class Trainer:
    """A sync over a stream of ``weights``, which a test may change between pushes; a context manager."""

    def __init__(self, target: Any, weights: Bits, **options: Any) -> None:
        self.tensors = as_torch(weights)
        given = {"timeout": 60, "bucket_bytes": 16384, **options}
        self.sync: Sync = rankcast.connect(target, IterableSource(lambda: iter(self.tensors.items())), **given)

    def push(self, weights: Bits, version: str) -> PushReport:
        self.tensors.update(as_torch(weights))
        return self.sync.push(version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync.close()


def push(target: Any, weights: Bits, version: str, **options: Any) -> PushReport:
    """Connect, push once, and leave."""
    with Trainer(target, weights, **options) as trainer:
        return trainer.push(weights, version)
