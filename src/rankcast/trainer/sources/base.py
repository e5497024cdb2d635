"""The contract of a weight source: what it holds, and how it hands it over, tensor by tensor.

This module knows what a push asks of a source and what a source must promise. It must not know any kind of source, nor
where the bytes go.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Self

import torch

from rankcast.manifest import Manifest, TensorMeta
from rankcast.trainer.sources.shards import Shard


def _nothing() -> None:
    """A weight's ``gather`` where this rank has all that it takes."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of a push, handed over by a source; good until the source is asked for the next one.

    ``fill`` writes the tensor's bytes, dense and row-major in ``meta.dtype``, into a 1-D uint8 CPU tensor of
    ``meta.nbytes`` elements. ``gather`` comes before that, and does what this rank owes the others for one of them to
    have the tensor whole, above all a collective: it is called on every rank that holds the tensor when one of them is
    to write it, and on none when nobody is, because it goes direct or is read where it lies. A second call does
    nothing.

    ``tensor`` is the tensor itself where nothing has to be computed or moved: a dense row-major CPU tensor of
    ``meta``'s dtype and shape that stays at its address and keeps its values until the push has returned, so that its
    bytes may be read where they lie. It is ``None`` for every other tensor.
    """

    meta: TensorMeta
    fill: Callable[[torch.Tensor], None]
    tensor: torch.Tensor | None = None
    gather: Callable[[], None] = _nothing

    @property
    def alone(self) -> bool:
        """Whether this rank can write the tensor without any other."""
        return self.gather is _nothing

    def write(self, buffer: torch.Tensor) -> None:
        """Gather the tensor, and write it into ``buffer``, a dense 1-D uint8 CPU tensor of ``meta.nbytes`` elements.

        The buffer must start at a multiple of the element's size. Raises ``ValueError`` when it is another kind of
        buffer, and ``SourceError`` when the source has moved on or cannot deliver what ``meta`` says.
        """
        if (
            buffer.dtype != torch.uint8
            or buffer.device.type != "cpu"
            or buffer.shape != (self.meta.nbytes,)
            or not buffer.is_contiguous()
        ):
            raise ValueError(
                f"{self.meta} needs a dense 1-D uint8 CPU buffer of {self.meta.nbytes} bytes, got "
                f"{buffer.dtype}{list(buffer.shape)} on {buffer.device}"
            )
        self.gather()
        self.fill(buffer)


class WeightSource(ABC):
    """Where one trainer rank's new weights come from. Subclass it for a trainer that no source of rankcast's own fits.

    In an SPMD trainer every rank has a source of its own, which states what *that* rank holds. Tensors that several
    ranks hold must be equal on all of them, bit for bit: only one of them is sent (``check="digest"`` compares them).

    ``stable`` says that weights may have their ``tensor``, and that ``read`` does no work and no collective before a
    weight is written: it is then also read before a push, to see which tensors can be exported where they lie.
    """

    stable: bool = False

    @abstractmethod
    def manifest(self) -> Manifest:
        """Names (in checkpoint coordinates), wire dtypes and **full** (global) shapes of what this rank holds.

        The same for the lifetime of the source: workers are told once, at connect, and plan by it. A source that states
        a shard's shape as if it were the whole tensor's is refused there, or by the workers, which know the full shape.
        """

    @abstractmethod
    def read(self) -> Iterator[Weight]:
        """Hand over every tensor of ``manifest()``, each once and **in its order**.

        Called at most once for each push, and once more at a push before which the source's tensors moved, to look at
        where they lie; not at all when every tensor goes direct. A source that is ``stable`` or has ``shards`` is read
        once more with ``check="digest"``, where other ranks hold some of its tensors.

        Of a source that has ``shards``, some tensors may go direct. They are yielded all the same, and passed over: so
        a tensor must cost nothing until its weight is asked to ``gather`` or to write it, and one that this rank does
        not hold whole is yielded as well. A source without shards may gather while it yields.

        The order is an obligation: ranks advance together by it, so that a source may run a collective for each tensor,
        and a rank that yields in another order lets the others wait for ever in a collective that never comes. Every
        rank goes through all that it holds, also through tensors that another rank sends. Raises ``SourceError`` as
        soon as what it finds differs from the manifest; bytes that were sent before stay on the workers, half new,
        which is why a source compares before it yields. The caller closes the iterator when it stops early.
        """

    def shards(self) -> list[Shard] | None:
        """What this rank holds of each tensor of ``manifest()``, where it lies: for the mode ``direct``.

        ``None`` says that this source's weights lie nowhere that lasts (they are computed or gathered on the way), so
        that they go through ``read``. A tensor of which this rank holds nothing has no shard. Boxes of one tensor on
        one rank must not overlap; equal boxes on several ranks are replicas, equal bit for bit. Shards may be asked for
        again at any push, and do no collective. What they lie in must not change between a call of ``push`` and its
        return.
        """
        return None

    def check_whole(self, names: Collection[str]) -> None:
        """Raise ``UnsupportedError`` when one of the tensors ``names`` cannot be handed over whole by ``read``.

        Called, before anything is written, with all that goes through ``read``: in the mode ``auto`` that may be a few
        of this rank's tensors only. Does no collective. What it lets pass must be handed over at every later push.
        """
        return

    def addresses(self) -> tuple[int, ...]:
        """A cheap record of where the memory behind ``shards()`` lies now: equal records mean that none has moved, and
        that each is the same box of the same tensor as before.

        Compare it only with a record of the same source of this process, and while the storages that were exported
        then are remembered (weakly is enough), because addresses are given out again.
        """
        return ()

    def versions(self) -> tuple[int, ...]:
        """A cheap record of how often the memory behind ``shards()`` was written, taken before and after a push.

        Different records prove that it was written, or replaced, in between. Equal ones prove nothing about writes that
        torch does not count: through ``.data``, numpy, another process or a kernel of one's own, in inference mode, or
        by an optimizer with ``fused=True`` (or ``foreach=True`` over DTensors).
        """
        return ()

    def version_names(self) -> tuple[str, ...]:
        """What each value of ``versions()``, as it would be returned now, is about: a tensor's name, or a file's path.

        Empty where that is not known. Names may repeat. Asked for only to say in an error what has changed.
        """
        return ()

    def close(self) -> None:
        """Let go of whatever the source holds open. Idempotent, never raises."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
