"""The parameters that an update writes as they were when the loader was traced, and whether they still are.

This module knows names, shapes, dtypes and strides. It must not know where an engine keeps its parameters (it is handed
them), nor what is going to be written to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from rankcast.errors import ManifestError
from rankcast.manifest import listed
from rankcast.rollout.apart import Apart
from rankcast.trace.dtypes import dtype_name, torch_dtype
from rankcast.trace.record import Trace

_CURE = "connect again after a model has changed"


class TracedTargets:
    """Shapes, dtypes and strides of the destinations of ``trace`` that something is written to."""

    def __init__(self, trace: Trace) -> None:
        names, dtypes, shapes = trace.destinations.names, trace.destinations.dtypes, trace.destinations.shapes
        written = sorted({*trace.copies.destinations, *trace.fills.destinations})
        self._forms = {names[at]: (shapes[at], torch_dtype(dtypes[at]), trace.layouts[at]) for at in written}
        self._known = frozenset(names).union(alias for alias, _ in trace.aliases)
        #: What the destinations must share no memory with; ``None`` where nobody says.
        self.apart: Apart | None = None

    def check(self, live: Mapping[str, torch.Tensor], required: Collection[str]) -> None:
        """Raise ``ManifestError`` naming a destination that is not in ``live`` as it was traced, ``UnsupportedError``
        naming one that lies in memory which is to be read.

        ``required`` are the names that a complete update fills, as they are now: one that was not there when the loader
        was traced would be left as it is.
        """
        for name, (shape, dtype, _) in self._forms.items():
            target = live.get(name)
            if target is None:
                raise ManifestError(
                    f"{name} is gone, and was {dtype_name(dtype)}{list(shape)} when its loader was traced: {_CURE}",
                    tensor=name,
                )
            self.check_one(name, target)
        fresh = [name for name in required if name not in self._known]
        if fresh:
            raise ManifestError(
                f"parameters that were not there when the loader was traced would be left as they are: "
                f"{listed(sorted(fresh))}: {_CURE}",
                tensor=min(fresh),
            )
        if self.apart is not None:
            self.apart.check({name: live[name] for name in self._forms})

    def check_one(self, name: str, target: torch.Tensor) -> None:
        """Raise ``ManifestError`` unless ``target`` is what destination ``name`` was."""
        shape, dtype, strides = self._forms[name]
        if target.shape != shape or target.dtype != dtype:
            raise ManifestError(
                f"{name} is now {dtype_name(target.dtype)}{list(target.shape)}, and was {dtype_name(dtype)}"
                f"{list(shape)} when its loader was traced: {_CURE}",
                tensor=name,
            )
        now = target.stride()
        if now != strides and any(
            size > 1 and one != other for size, one, other in zip(shape, now, strides, strict=True)
        ):
            raise ManifestError(
                f"{name} now has the strides {list(now)}, and had {list(strides)} when its loader was traced: {_CURE}",
                tensor=name,
            )
