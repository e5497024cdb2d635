"""A source's shards, exported: which segment each lies in, from which byte, with which strides.

This module knows the columns that one trainer rank says about its shards, what is shared in place, what is packed and
copied again at each push, and what cannot be read where it lies. It must not know other ranks, plans or sessions.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from rankcast.errors import ManifestError, SourceError
from rankcast.geometry import contiguous_strides, extent, uncovered
from rankcast.manifest import DTYPES, Manifest
from rankcast.trainer.sources.base import WeightSource
from rankcast.trainer.sources.shards import FileRange, Shard
from rankcast.trainer.sources.sharing import SMALL, Sharing, share_in_place
from rankcast.transports.file import ExportedFile
from rankcast.transports.live import SharedMemoryMap, handle_for
from rankcast.transports.segment import Segment
from rankcast.transports.shm import create_segment
from rankcast.wire.handles import Handle

#: Every packed shard starts at a multiple of so many bytes, a cache line.
_ALIGNMENT = 64


class RankShards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trainer rank's shards as columns, one value a shard; plain data, which travels between trainer ranks.

    ``tensors`` are indices into the rank's own manifest, ``starts`` and ``sizes`` the box in checkpoint coordinates.
    The box's first element is ``offsets`` bytes into ``handles[segments]``, and ``strides`` count elements of
    ``dtypes``. ``staged`` has, by name, why a tensor, or a part of it, cannot be read where it lies: rows of such a
    tensor may be there nevertheless. Of the handles, ``packed`` is the segment of ``packed_bytes`` bytes into which
    small shards are copied at each push, or -1 where there is none.
    """

    tensors: tuple[int, ...] = ()
    starts: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    segments: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    handles: tuple[Handle, ...] = ()
    staged: dict[str, str] = {}
    packed: int = -1
    packed_bytes: int = 0

    def __len__(self) -> int:
        return len(self.tensors)


class ExportedShards:
    """What one trainer rank exports for the mode ``direct``; make it with ``export_shards``."""

    rows: RankShards

    def __init__(self, source: WeightSource, shards: Sequence[Shard]) -> None:
        self._source = source
        self._arena: Segment | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Weak, so that an offload frees memory, yet enough that no other storage gets a remembered one's address.
        self._storages: list[Remembered] = []
        self._addresses: tuple[int, ...] = ()
        self._files: list[ExportedFile] = []
        self.sharing = Sharing(0, 0, 0, {})
        self._export(shards)

    def renew(self, addresses: tuple[int, ...] | None = None) -> bool:
        """Export anew what lies elsewhere than before; returns whether ``rows`` changed.

        ``addresses`` are the source's, where they were just asked for. Costs next to nothing when nothing moved.
        Segments that did not move keep their handles. Raises as ``export_shards`` does, and ``SourceError`` when the
        source has no shards any more.
        """
        if (self._source.addresses() if addresses is None else addresses) == self._addresses:
            return False
        shards = self._source.shards()
        if shards is None:
            raise SourceError("the source had shards at connect and has none now: connect again")
        before = self.rows
        self._export(shards)
        return self.rows != before

    def refresh(self) -> int:
        """Copy what is packed once more; returns how many bytes. Called at each push, before workers read.

        Raises ``LocationError`` naming a file that is no longer the one at its path.
        """
        for file in self._files:
            file.verify()
        with torch.no_grad():
            for copy, tensor in self._copies:
                copy.copy_(tensor)
        return self.rows.packed_bytes

    def close(self) -> None:
        """Let go of what is exported; storages that moved into shared memory stay there. Idempotent."""
        self._copies = []
        self._files = []  # open while their source, or another export, refers to them
        self._close_arena()

    def _close_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _export(self, shards: Sequence[Shard]) -> None:
        manifest = self._source.manifest()
        solid = [shard for shard in shards if shard.box.volume]
        _check(solid, manifest)
        in_place, packed = _sorted_out(solid)
        self.sharing = share_in_place(tensor for _, tensor in in_place)
        table = _Table(manifest)
        shared = SharedMemoryMap()
        for shard, tensor in in_place:
            reason = self.sharing.reasons.get(tensor.untyped_storage()._cdata)
            if reason is not None or (reason := table.add_memory(shard, tensor, shared)) is not None:
                table.staged.setdefault(shard.meta.name, reason)
        for shard in solid:
            if isinstance(shard.memory, FileRange):
                table.add(shard, shard.memory.file.handle, shard.memory.offset, contiguous_strides(shard.box.sizes))
        files = (shard.memory.file for shard in solid if isinstance(shard.memory, FileRange))
        self._files = list(dict.fromkeys(files))
        self.rows = self._packed(packed, table)
        self.refresh()
        storages = (tensor.untyped_storage() for _, tensor in in_place)
        self._storages = [Remembered(one) for one in {storage._cdata: storage for storage in storages}.values()]
        # Only now: sharing has itself moved them.
        self._addresses = self._source.addresses()

    def _packed(self, packed: Sequence[tuple[Shard, torch.Tensor]], table: _Table) -> RankShards:
        offsets, size, total = [], 0, 0
        for _, tensor in packed:
            offsets.append(size)
            nbytes = tensor.numel() * tensor.element_size()
            total += nbytes
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._arena is not None and self._arena.size != size:
            self._close_arena()
        self._copies = []
        if not size:
            return table.rows(-1, 0)
        if self._arena is None:
            self._arena = create_segment(size)
        memory = self._arena.memory
        for (shard, tensor), offset in zip(packed, offsets, strict=True):
            nbytes = tensor.numel() * tensor.element_size()
            self._copies.append((memory[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape), tensor))
            table.add(shard, self._arena.handle, offset, contiguous_strides(shard.box.sizes))
        return table.rows(table.segment(self._arena.handle), total)


class _Row(NamedTuple):
    tensor: int
    start: tuple[int, ...]
    size: tuple[int, ...]
    segment: int
    offset: int
    strides: tuple[int, ...]
    dtype: str


class _Table:
    """Rows being gathered; a segment gets its number when its first shard comes."""

    def __init__(self, manifest: Manifest) -> None:
        self.staged: dict[str, str] = {}
        self._manifest = manifest
        self._handles: dict[Handle, int] = {}
        self._by_descriptor: dict[int, Handle] = {}
        self._rows: list[_Row] = []

    def segment(self, handle: Handle) -> int:
        return self._handles.setdefault(handle, len(self._handles))

    def add(self, shard: Shard, handle: Handle, offset: int, strides: tuple[int, ...]) -> None:
        index = self._manifest.index[shard.meta.name]
        box = shard.box
        self._rows.append(_Row(index, box.offsets, box.sizes, self.segment(handle), offset, strides, shard.dtype))

    def add_memory(self, shard: Shard, tensor: torch.Tensor, shared: SharedMemoryMap) -> str | None:
        """Add a shard where it lies; or say why it cannot be read there."""
        if tensor.is_conj() or tensor.is_neg():
            return "its values are the conjugate or negative of its bytes: resolve it first (resolve_conj())"
        strides = tensor.stride()
        found = shared.find(tensor.data_ptr(), extent(tensor.shape, strides) * tensor.element_size())
        if found is None:
            return "its storage is in no shared memory that another process can open"
        if found.offset % DTYPES[shard.dtype]:
            return f"it starts {found.offset} bytes into its segment, no multiple of the size of {shard.dtype}"
        # One handle for each descriptor: a handle asks the kernel who this process is.
        handle = self._by_descriptor.get(found.descriptor)
        if handle is None:
            handle = self._by_descriptor[found.descriptor] = handle_for(found)
        self.add(shard, handle, found.offset, strides)
        return None

    def rows(self, packed: int, packed_bytes: int) -> RankShards:
        rows = sorted(self._rows)
        return RankShards(
            tensors=tuple(row.tensor for row in rows),
            starts=tuple(row.start for row in rows),
            sizes=tuple(row.size for row in rows),
            segments=tuple(row.segment for row in rows),
            offsets=tuple(row.offset for row in rows),
            strides=tuple(row.strides for row in rows),
            dtypes=tuple(row.dtype for row in rows),
            handles=tuple(self._handles),
            staged=self.staged,
            packed=packed,
            packed_bytes=packed_bytes,
        )


def export_shards(source: WeightSource) -> ExportedShards | None:
    """Export the shards of ``source`` where they lie; ``None`` when it has none that last.

    Storages of at least 64 KiB move into shared memory in place, once; smaller ones are packed into one segment and
    copied at each push. Raises ``SourceError`` when a shard is not of the source's manifest, ``ManifestError`` when two
    boxes of a tensor overlap, ``LimitError`` when the machine has no room, before anything has moved.
    """
    shards = source.shards()
    return None if shards is None else ExportedShards(source, shards)


class Remembered:
    """A weak reference to a storage, which keeps its ``_cdata`` from being given out again, but not its memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        reference = storage._weak_ref()
        weakref.finalize(self, torch.UntypedStorage._free_weak_ref, reference).atexit = False


def _sorted_out(
    shards: Sequence[Shard],
) -> tuple[list[tuple[Shard, torch.Tensor]], list[tuple[Shard, torch.Tensor]]]:
    """The shards in memory: those to be read where they lie, and those to be packed."""
    in_place: list[tuple[Shard, torch.Tensor]] = []
    packed: list[tuple[Shard, torch.Tensor]] = []
    for shard in shards:
        if isinstance(shard.memory, torch.Tensor):
            (packed if shard.memory.untyped_storage().nbytes() < SMALL else in_place).append((shard, shard.memory))
    return in_place, packed


def _check(shards: Sequence[Shard], manifest: Manifest) -> None:
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        index = manifest.index.get(shard.meta.name)
        if index is None or manifest.row(index) != shard.meta:
            raise SourceError(f"the source has a shard of {shard.meta}, its manifest differs", tensor=shard.meta.name)
        by_name.setdefault(shard.meta.name, []).append(shard)
    for name, several in by_name.items():
        if len(several) > 1:
            _, _, doubled = uncovered(several[0].meta.shape, [shard.box for shard in several])
            if doubled is not None:
                raise ManifestError(f"{several[0].meta}: {doubled} is in two shards of one trainer rank", tensor=name)
