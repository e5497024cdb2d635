"""Whether a trainer changes its weights while they are being read, as far as that can be seen.

This module knows a source's counters: how often tensors were written, as torch counts it, or which file lies at a path.
It must not know who reads, or what a push is. What the counters miss is listed in ``docs/direct.md``.
"""

from __future__ import annotations

from rankcast.errors import SourceError
from rankcast.manifest import listed
from rankcast.trainer.sources.base import WeightSource


class Watch:
    """The counters of ``source`` on trainer rank ``rank``, from now on."""

    def __init__(self, source: WeightSource, rank: int) -> None:
        self._source = source
        self._rank = rank
        # Tensors that were replaced since the last push are other tensors, and no change: look at who is there now.
        #: Where they lie, for those that ask at once after this.
        self.addresses = source.addresses()
        self._before = source.versions()

    def check(self) -> None:
        """Raise ``SourceError`` when a tensor was written, or its file replaced, since this watch began."""
        now = self._source.versions()
        if now == self._before:
            return
        names = self._source.version_names()
        changed = []
        if len(names) == len(now) == len(self._before):
            columns = zip(names, self._before, now, strict=True)
            changed = list(dict.fromkeys(name for name, before, after in columns if before != after))
        raise SourceError(
            f"trainer rank {self._rank} changed its weights, or the files that they are in, while they were being "
            f"read{': ' if changed else ''}{listed(changed) if changed else ''}; push returns when they may change "
            "again, and an optimizer step must wait for it",
            tensor=changed[0] if changed else None,
        )
