"""A function that yields (name, tensor) as a weight source.

This module knows how to learn a stream's manifest, and how to hold a stream to it one tensor at a time. It must not
know where the tensors come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from rankcast.errors import SourceError
from rankcast.manifest import Manifest, TensorMeta, canonical_dtype
from rankcast.trainer.sources.base import Weight, WeightSource
from rankcast.trainer.sources.dense import filler, whole_tensor, wire_dtype

Stream = Iterable[tuple[str, torch.Tensor]]
Described = TensorMeta | tuple[str, torch.dtype | str, Iterable[int]]


class IterableSource(WeightSource):
    """The full tensors that ``factory()`` yields, as ``(checkpoint name, tensor)``.

    ``factory`` is called once for each push and must give a fresh iterator each time, which yields the same names,
    dtypes and shapes **in the same order** every time, whatever the values: ranks advance together by that order, and
    workers were told what comes. ``metadata`` states it (a ``Manifest``, or ``TensorMeta`` or ``(name, dtype, shape)``
    for each tensor); without it ``manifest`` makes one pass over the stream at connect, keeping nothing.

    One tensor is held at a time, and given up before the next is asked for. A stream that deviates, or raises, is found
    only when it does so, which is after earlier tensors have gone out: the workers are then unusable (or restored).
    Streams cannot do better; ``ModuleSource`` and ``SafetensorsSource`` can.

    Raises ``SourceError`` naming the tensor and both values on every deviation. The iterator is closed (``close()``)
    when a pass ends, however it ends; the stream's own errors come through as they are.
    """

    def __init__(
        self, factory: Callable[[], Stream], *, metadata: Manifest | Iterable[Described] | None = None
    ) -> None:
        self._factory = factory
        self._manifest = None if metadata is None else _stated(metadata)

    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = self._learn()
        return self._manifest

    def read(self) -> Iterator[Weight]:
        promised = self.manifest()
        count = 0
        with self._stream() as stream:
            for item in stream:
                name, tensor = _checked(item, count)
                meta = _matched(promised, count, _meta(name, tensor))
                count += 1
                # The weight may outlive this step in the caller's hands; its tensor must not.
                slot = [tensor]
                del item, tensor
                try:
                    yield Weight(meta, _from(slot, meta))
                finally:
                    slot.clear()
        if count < len(promised):
            hint = " (does the function give a fresh iterator at each call?)" if not count else ""
            raise SourceError(
                f"the stream ended after {count} of {len(promised)} tensors: {promised.names[count]} "
                f"did not come{hint}",
                tensor=promised.names[count],
            )

    def _learn(self) -> Manifest:
        rows: dict[str, TensorMeta] = {}
        with self._stream() as stream:
            for item in stream:
                name, tensor = _checked(item, len(rows))
                if name in rows:
                    raise SourceError(f"the stream yields {name} twice: each tensor is sent once", tensor=name)
                rows[name] = _meta(name, tensor)
                del item, tensor
        return Manifest.of(rows.values())

    @contextlib.contextmanager
    def _stream(self) -> Iterator[Iterator[object]]:
        stream = self._factory()
        try:
            yield iter(stream)
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()


def _stated(metadata: Manifest | Iterable[Described]) -> Manifest:
    if isinstance(metadata, Manifest):
        metadata.check()
        return metadata
    return Manifest.of(
        row if isinstance(row, TensorMeta) else TensorMeta(row[0], canonical_dtype(str(row[1])), tuple(row[2]))
        for row in metadata
    )


def _checked(item: object, position: int) -> tuple[str, torch.Tensor]:
    match item:
        case (str() as name, torch.Tensor() as tensor):
            return name, tensor
    shown = type(item).__name__
    if isinstance(item, tuple):
        shown = f"({', '.join(type(part).__name__ for part in item)})"
    raise SourceError(f"item {position} of the stream is {shown}: it must be (name, torch.Tensor)")


def _meta(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name, wire_dtype(name, tensor.dtype), tuple(whole_tensor(name, tensor).shape))


def _matched(promised: Manifest, position: int, meta: TensorMeta) -> TensorMeta:
    """``meta`` when it is what the manifest has at ``position``; raises ``SourceError`` saying how it differs."""
    place = promised.index.get(meta.name)
    if place is None:
        raise SourceError(f"the stream yields {meta.name}, which its manifest does not have", tensor=meta.name)
    if place < position:
        raise SourceError(f"the stream yields {meta.name} twice: each tensor is sent once", tensor=meta.name)
    if place > position:
        raise SourceError(
            f"the stream yields {meta.name} where its manifest has {promised.names[position]}: yield the same tensors "
            "in the same order at every push",
            tensor=promised.names[position],
        )
    row = promised.row(position)
    if row != meta:
        raise SourceError(
            f"{meta.name} came as {meta.dtype}{list(meta.shape)}, its manifest says {row.dtype}{list(row.shape)}",
            tensor=meta.name,
        )
    return row


def _from(slot: list[torch.Tensor], meta: TensorMeta) -> Callable[[torch.Tensor], None]:
    def fill(buffer: torch.Tensor) -> None:
        if not slot:
            raise SourceError(f"{meta.name} was asked for after the stream had moved on", tensor=meta.name)
        filler(whole_tensor(meta.name, slot[0]), meta.dtype)(buffer)

    return fill
