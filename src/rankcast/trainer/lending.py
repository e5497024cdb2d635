"""Where a trainer rank's tensors lie in its own process, for workers of the same process to keep away from.

This module knows a source's shards. It must not know workers, nor what they do with it.
"""

from __future__ import annotations

import threading

import torch

from rankcast.trainer.sources.base import WeightSource
from rankcast.transports.own_memory import Spans, spans_of


class Lending:
    """The spans of ``source``'s tensors as they lie when it is called; found again only when one of them moved.

    A source that cannot say where its memory is now (``addresses``) has files, or nothing that lasts: no spans.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._addresses: tuple[int, ...] = ()
        self._spans: Spans | None = None
        # Workers of several engines ask from threads of their own, and a source is for one thread at a time.
        self._turn = threading.Lock()

    def __call__(self) -> Spans:
        with self._turn:
            return self._found()

    def _found(self) -> Spans:
        addresses = self._source.addresses()
        if self._spans is None or addresses != self._addresses:
            # Asked only of memory: of files it would open them, for modes that do not need them open.
            shards = (self._source.shards() or ()) if addresses else ()
            memory = ((shard.meta.name, shard.memory) for shard in shards)
            self._spans = spans_of((name, held) for name, held in memory if isinstance(held, torch.Tensor))
            self._addresses = addresses
        return self._spans
