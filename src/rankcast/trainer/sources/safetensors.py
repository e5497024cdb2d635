"""A safetensors checkpoint as a weight source: one file, or several with an index, never whole in memory.

This module knows which files make a checkpoint and whether they are still the same files. It must not know the format
inside a file (``header``), nor who receives the bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from rankcast.errors import LocationError, SourceError
from rankcast.geometry import whole
from rankcast.manifest import Manifest, listed
from rankcast.trainer.sources.base import Weight, WeightSource
from rankcast.trainer.sources.header import Located, read_header
from rankcast.trainer.sources.shards import FileRange, Shard
from rankcast.transports.file import ExportedFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: The kernel reads at most 2 GiB less a page in one call; this is a round number below that.
_READ_AT_ONCE = 2**30


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _File(msgspec.Struct, frozen=True):
    """One file as it was when its header was read: ``identity`` is device, inode, size and modification time."""

    path: Path
    identity: tuple[int, int, int, int]
    tensors: tuple[Located, ...]


class SafetensorsSource(WeightSource):
    """The tensors of a checkpoint ``path``: a ``.safetensors`` file, or a directory in Hugging Face's form.

    A directory has one ``*.safetensors`` file, or several with ``model.safetensors.index.json``, which must name
    exactly the tensors that its files hold. Order is by file name, then by place in the file. Headers are read once,
    strictly, by ``manifest``; data goes from the file straight into the buffer that a tensor is written to.

    Files must stay as they are while the source is used: each is compared (inode, size, modification time) whenever a
    tensor of it is read, and a file that was replaced, truncated or rewritten raises ``SourceError`` naming it, as does
    everything odd about an index or a header. To push a checkpoint that was saved anew, make a new source.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._files: tuple[_File, ...] | None = None
        self._manifest: Manifest | None = None
        self._exported: list[ExportedFile] = []

    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._files = _checkpoint_files(self._path)
            self._manifest = Manifest.of(located.meta for file in self._files for located in file.tensors)
        return self._manifest

    def read(self) -> Iterator[Weight]:
        self.manifest()
        assert self._files is not None
        # All of them first: a checkpoint that has changed is refused before its first byte goes out.
        for file in self._files:
            with _opened(file.path) as descriptor:
                _check_same(descriptor, file)
        for file in self._files:
            with _opened(file.path) as descriptor:
                for located in file.tensors:
                    live = [descriptor]
                    try:
                        yield Weight(located.meta, _from(live, file, located))
                    finally:
                        live.clear()  # the number may be somebody else's descriptor later

    def shards(self) -> list[Shard]:
        """Every tensor as a range of its file, which stays open from the first call on until ``close``."""
        self.manifest()
        assert self._files is not None
        if not self._exported:
            for file in self._files:
                try:
                    self._exported.append(ExportedFile(file.path))
                except LocationError as fault:
                    self.close()
                    raise SourceError(fault.message) from None
        for file, exported in zip(self._files, self._exported, strict=True):
            handle = exported.handle
            _compare(file, (handle.device, handle.inode, handle.size, handle.mtime_ns))
        return [
            Shard(located.meta, whole(located.meta.shape), FileRange(exported, located.start))
            for file, exported in zip(self._files, self._exported, strict=True)
            for located in file.tensors
        ]

    def versions(self) -> tuple[int, ...]:
        """What the files' paths lead to now; zeros for one that is gone."""
        self.manifest()
        found: list[int] = []
        for file in self._files or ():
            try:
                status = os.stat(file.path)
            except OSError:
                found += (0, 0, 0, 0)
            else:
                found += (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        return tuple(found)

    def version_names(self) -> tuple[str, ...]:
        """Each file's path, once for each of its four values."""
        self.manifest()
        return tuple(str(file.path) for file in self._files or () for _ in range(4))

    def close(self) -> None:
        """Close the files; what workers have open of them stays readable to them."""
        for exported in self._exported:
            exported.close()
        self._exported = []


def _from(live: list[int], file: _File, located: Located) -> Callable[[torch.Tensor], None]:
    def fill(buffer: torch.Tensor) -> None:
        if not live:
            raise SourceError(
                f"{located.meta.name} was asked for after the source had moved on", tensor=located.meta.name
            )
        _check_same(live[0], file)
        view = buffer.numpy().data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(live[0], [view[done : done + _READ_AT_ONCE]], located.start + done)
            except OSError as fault:
                raise SourceError(
                    f"{located.meta.name} cannot be read from {file.path}: {fault.strerror}", tensor=located.meta.name
                ) from fault
            if not count:
                raise SourceError(
                    f"{file.path} ended while {located.meta.name} was read: it was truncated since connect",
                    tensor=located.meta.name,
                )
            done += count
        # A file that was rewritten in place meanwhile may have given a mix.
        _check_same(live[0], file)

    return fill


def _checkpoint_files(path: Path) -> tuple[_File, ...]:
    if not path.is_dir():
        return (_scanned(path),)
    if (path / INDEX).exists():
        return _indexed(path)
    found = sorted(path.glob("*.safetensors"))
    if (path / SINGLE) in found:
        found = [path / SINGLE]
    if len(found) != 1:
        raise SourceError(
            f"{path} has {len(found)} safetensors files ({listed(file.name for file in found)}) and no {INDEX}: which "
            "of them make the checkpoint is not known; give the file's own path, or save it with an index"
            if found
            else f"{path} has no safetensors file: give a checkpoint directory or a .safetensors file"
        )
    return (_scanned(found[0]),)


def _indexed(path: Path) -> tuple[_File, ...]:
    where = path / INDEX
    try:
        weight_map = msgspec.convert(json.loads(where.read_bytes()), _Index).weight_map
    except (OSError, ValueError, RecursionError) as fault:
        raise SourceError(f"{where} cannot be used: {fault}") from None
    expected: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if Path(shard).name != shard:
            raise SourceError(f"{where} says that {tensor} is in {shard!r}, which is no plain file name", tensor=tensor)
        expected.setdefault(shard, set()).add(tensor)
    files = []
    for shard in sorted(expected):
        if not (path / shard).exists():
            first = min(expected[shard])
            raise SourceError(f"{where} says that {first} is in {shard}, but there is no such file", tensor=first)
        file = _scanned(path / shard)
        held = {located.meta.name for located in file.tensors}
        for names, odd in ((expected[shard] - held, "does not hold"), (held - expected[shard], "also holds")):
            if names:
                raise SourceError(
                    f"{path / shard} {odd} {listed(sorted(names))}, unlike what {INDEX} says", tensor=min(names)
                )
        files.append(file)
    return tuple(files)


def _scanned(path: Path) -> _File:
    with _opened(path) as descriptor:
        identity = _identity(descriptor, path)
        return _File(path, identity, read_header(descriptor, identity[2], str(path)))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        # Without O_NONBLOCK, opening a pipe somebody put there would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as fault:
        raise SourceError(f"{path} cannot be opened: {fault.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _identity(descriptor: int, path: Path) -> tuple[int, int, int, int]:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise SourceError(f"{path} is not a regular file")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_same(descriptor: int, file: _File) -> None:
    _compare(file, _identity(descriptor, file.path))


def _compare(file: _File, now: tuple[int, int, int, int]) -> None:
    if now == file.identity:
        return
    if now[:2] != file.identity[:2]:
        how = "was replaced by another file"
    elif now[2] != file.identity[2]:
        how = f"had {file.identity[2]} bytes and now has {now[2]}"
    else:
        how = "was rewritten"
    raise SourceError(f"{file.path} {how} since connect: make a new source (connect again) for a new checkpoint")
