"""Names, dtypes and shapes of tensors in checkpoint coordinates, as columns with a hash.

This module knows how tensors are called and described. It must not know where their bytes are, who holds them, or any
framework's dtype objects: dtypes are the canonical strings of ``DTYPES``.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rankcast.errors import ManifestError

#: Canonical dtype name -> bytes per element. The names are torch's, without its prefix.
DTYPES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

#: How many names an error lists before it only counts.
LISTED = 10


def canonical_dtype(name: str) -> str:
    """``name`` without torch's prefix; raises ``ManifestError`` when it is no known dtype."""
    short = name.removeprefix("torch.")
    if short not in DTYPES:
        raise ManifestError(f"unknown dtype {name!r}: known are {', '.join(DTYPES)}")
    return short


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor; 0 when a dimension is 0, one element for an empty shape."""
    return DTYPES[dtype] * math.prod(shape)


def listed(names: Iterable[str]) -> str:
    """The first ten names and the count of the rest, for an error message."""
    ordered = list(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return f"{', '.join(ordered[:LISTED])}{more} ({len(ordered)} in all)"


def size(nbytes: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


class TensorMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its checkpoint name, canonical dtype and full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """An ordered set of tensors as columns; names are unique. Build one with ``Manifest.of`` to have it checked."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tensors: Iterable[TensorMeta]) -> Manifest:
        """Columns from rows; raises ``ManifestError`` on a name given twice or an unknown dtype."""
        rows = list(tensors)
        manifest = cls(tuple(r.name for r in rows), tuple(r.dtype for r in rows), tuple(r.shape for r in rows))
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ``ManifestError`` unless columns are equally long, names unique and UTF-8, dtypes known, sizes not
        negative."""
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ManifestError(
                f"a manifest has {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes"
            )
        odd = [name for name in self.names if not _encodable(name)]
        if odd:
            # By its repr, also where the name stands alone: the error must travel, and the name cannot.
            raise ManifestError(
                f"a tensor is called {odd[0]!a}, which is not UTF-8 and cannot travel ({len(odd)} such names): give it "
                "another name, of a module with ModuleSource(model, rename=...)",
                tensor=ascii(odd[0]),
            )
        if len(set(self.names)) != len(self.names):
            seen: set[str] = set()
            twice = [name for name in self.names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]  # set.add is None, hence falsy
            raise ManifestError(f"tensors given twice in one session: {listed(dict.fromkeys(twice))}", tensor=twice[0])
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            if dtype not in DTYPES:
                raise ManifestError(f"{name} has the unknown dtype {dtype!r}", tensor=name)
            if any(size < 0 for size in shape):
                raise ManifestError(f"{name} has a negative size in its shape {list(shape)}", tensor=name)

    def __len__(self) -> int:
        return len(self.names)

    def rows(self) -> Iterator[TensorMeta]:
        """The tensors one by one, in order."""
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            yield TensorMeta(name, dtype, shape)

    def row(self, index: int) -> TensorMeta:
        return TensorMeta(self.names[index], self.dtypes[index], self.shapes[index])

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Name -> position."""
        return {name: i for i, name in enumerate(self.names)}

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor, dense."""
        return tuple(nbytes(d, s) for d, s in zip(self.dtypes, self.shapes, strict=True))

    @functools.cached_property
    def hash(self) -> str:
        """A digest of names, dtypes, shapes and their order, equal on every process that has the same manifest."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    def take(self, indices: Iterable[int]) -> Manifest:
        """The tensors at ``indices``, in that order."""
        picked = list(indices)
        return Manifest(
            tuple(self.names[i] for i in picked),
            tuple(self.dtypes[i] for i in picked),
            tuple(self.shapes[i] for i in picked),
        )


def _encodable(name: str) -> bool:
    """Whether ``name`` has a UTF-8 form; a lone surrogate, as of a file name of another encoding, has none."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def union(manifests: Sequence[Manifest]) -> Manifest:
    """All tensors that any of ``manifests`` has, in order of first appearance.

    Raises ``ManifestError`` when two of them describe one name differently (the index of a manifest is the trainer
    rank that it came from).
    """
    merged: dict[str, tuple[TensorMeta, int]] = {}
    for rank, manifest in enumerate(manifests):
        for row in manifest.rows():
            known, first = merged.setdefault(row.name, (row, rank))
            if known != row:
                raise ManifestError(
                    f"{row.name} is {known.dtype}{list(known.shape)} on trainer rank {first} but "
                    f"{row.dtype}{list(row.shape)} on trainer rank {rank}: a source states full (global) shapes, so "
                    "a shard must be gathered, or declared as one, before it is handed over",
                    tensor=row.name,
                )
    return Manifest.of(row for row, _ in merged.values())
