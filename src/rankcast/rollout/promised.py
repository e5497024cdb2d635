"""Whether a loader, when it runs, copies as much as it did when it was traced.

This module knows traces and the copies that torch makes. It must not know sessions or segments. A trace says what a
loader did once. One that remembers (names it has had, a first time, a flag) may do less when it counts, and leave old
weights under a new name: so every run is counted, by elements and by storage, and held against the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankcast.errors import ManifestError
from rankcast.trace.record import Trace
from rankcast.trace.targets import storage_key

_COPY = torch.ops.aten.copy_.default


class Promised:
    """What a loader copies of each tensor, by its latest trace."""

    def __init__(self) -> None:
        #: Of each tensor its copies: all tensors that went in, the destination, and how many elements.
        self._copies: dict[str, list[tuple[tuple[str, ...], str, int]]] = {}

    def take(self, trace: Trace) -> None:
        """Believe ``trace`` of its tensors; of others what was traced before holds."""
        names, into, copies = trace.manifest.names, trace.destinations.names, trace.copies
        self._copies.update((name, []) for name in names)
        for sources, destination, sizes in zip(copies.sources, copies.destinations, copies.sizes, strict=True):
            together = tuple(names[index] for index in sources)
            # Of several tensors that go in together the first one stands for the copy.
            self._copies[together[0]].append((together, into[destination], torch.Size(sizes).numel()))

    def run(
        self,
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
        weights: Iterable[tuple[str, torch.Tensor]],
        live: Mapping[str, torch.Tensor],
    ) -> None:
        """Let ``load`` have ``weights``; ``live`` has the destinations by name.

        Raises ``ManifestError`` naming a destination into which it has copied less than its trace says.
        """
        given = list(weights)
        with _Counting() as counted:
            load(iter(given))
        expected: Counter[int] = Counter()
        names: dict[int, tuple[str, str]] = {}
        here = {name for name, _ in given}
        for name, _ in given:
            for together, destination, elements in self._copies.get(name, ()):
                target = live.get(destination)
                if target is not None and here.issuperset(together):
                    key = storage_key(target)
                    expected[key] += elements
                    names.setdefault(key, (name, destination))
        for key, elements in expected.items():
            if counted.elements[key] < elements:
                tensor, destination = names[key]
                raise ManifestError(
                    f"the loader has copied {counted.elements[key]:,} elements to where {destination} lies, and "
                    f"{elements:,} when it was traced with the same tensors ({tensor} for one): it must do the same "
                    "every time that it is called, and must not remember which tensors it has had",
                    tensor=tensor,
                )


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the elements that are copied into each storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.elements: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY:
            self.elements[storage_key(args[0])] += args[0].numel()
        return func(*args, **(kwargs or {}))
