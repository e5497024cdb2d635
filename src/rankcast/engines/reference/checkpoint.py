"""Read a safetensors checkpoint directory tensor by tensor.

This module knows the safetensors format and the index of a checkpoint in several files. It must not know which tensors
an architecture has, nor what becomes of them. Files are read with ``preadv`` and never mapped: a mapped file that
somebody truncates kills the process that looks at it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from rankcast.engines.reference.parameters import torch_dtype
from rankcast.errors import SourceError
from rankcast.manifest import Manifest, TensorMeta, listed, nbytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

#: The format's own limit on the length of a header, in bytes.
HEADER_LIMIT = 100_000_000

#: The format's dtype names -> canonical ones; what is not here is refused.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


class _Header(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint and where its bytes start in ``file``."""

    meta: TensorMeta
    file: str
    offset: int


def stored_tensors(directory: str | os.PathLike[str]) -> list[StoredTensor]:
    """Every tensor of a checkpoint directory, file by file in the order of their bytes; only headers are read.

    With an index, its files are read and must hold exactly the tensors that it says. Raises ``SourceError`` when there
    is no checkpoint, a file is cut short or odd, or index and files disagree.
    """
    root = Path(directory)
    if not (root / INDEX).exists():
        if not (root / SINGLE).exists():
            raise SourceError(f"{root} has neither {SINGLE} nor {INDEX}: name a safetensors checkpoint directory")
        return _read_header(root / SINGLE)
    try:
        weight_map = msgspec.json.decode((root / INDEX).read_bytes(), type=dict[str, Any])["weight_map"]
        expected = msgspec.convert(weight_map, dict[str, str])
    except (msgspec.DecodeError, KeyError) as error:
        raise SourceError(f"{root / INDEX} is no index of a checkpoint: {error}") from error
    found: list[StoredTensor] = []
    for name in sorted(set(expected.values())):
        if Path(name).name != name:
            raise SourceError(f"{root / INDEX} names the file {name!r}: only files beside the index are read")
        found.extend(_read_header(root / name))
    actual = [(row.meta.name, Path(row.file).name) for row in found]
    wrong = sorted({name for name, _ in set(actual) ^ set(expected.items())})
    if wrong or len(actual) != len(expected):
        raise SourceError(
            f"{root / INDEX} and the files beside it disagree about {listed(wrong)}: the checkpoint is not whole, or "
            "parts of two were mixed",
            tensor=wrong[0] if wrong else None,
        )
    return found


def checkpoint_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Names, dtypes and shapes of a checkpoint directory; raises as ``stored_tensors`` does."""
    return Manifest.of(row.meta for row in stored_tensors(directory))


def iterate_checkpoint(directory: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint directory, one in memory at a time, as a fresh dense CPU tensor.

    Raises ``SourceError`` as ``stored_tensors`` does, and when a file ends before a tensor's last byte.
    """
    descriptor, path = -1, ""
    try:
        for row in stored_tensors(directory):
            if row.file != path:
                if descriptor >= 0:
                    os.close(descriptor)
                    descriptor = -1
                descriptor, path = os.open(row.file, os.O_RDONLY | os.O_CLOEXEC), row.file
            yield row.meta.name, _read_tensor(descriptor, row)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _read_tensor(descriptor: int, row: StoredTensor) -> torch.Tensor:
    tensor = torch.empty(row.meta.shape, dtype=torch_dtype(row.meta.dtype))
    if not tensor.numel():
        return tensor
    target = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], row.offset + done)
        if count == 0:
            raise SourceError(
                f"{row.file} ends {len(target) - done} bytes before the end of {row.meta}: it was cut short",
                tensor=row.meta.name,
            )
        done += count
    return tensor


def _read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file in the order of their bytes, which must follow one another without gap or overlap."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_LIMIT, size - 8):
                raise SourceError(f"{path} of {size} bytes claims a header of {length}: it is no safetensors file")
            raw = msgspec.json.decode(file.read(length), type=dict[str, Any])
        raw.pop("__metadata__", None)
        headers = msgspec.convert(raw, dict[str, _Header])
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise SourceError(f"{path} has a header that is no safetensors header: {error}") from error
    rows: list[StoredTensor] = []
    end = 0
    for name, header in sorted(headers.items(), key=lambda item: item[1].data_offsets):
        if header.dtype not in _DTYPES:
            raise SourceError(f"{name} in {path} has dtype {header.dtype}: known are {', '.join(_DTYPES)}", tensor=name)
        meta = TensorMeta(name, _DTYPES[header.dtype], header.shape)
        start, stop = header.data_offsets
        if min(header.shape, default=0) < 0 or start != end or stop - start != nbytes(meta.dtype, meta.shape):
            raise SourceError(
                f"{meta} in {path} claims bytes {start} to {stop}, behind a tensor that ends at {end}: sizes must fit "
                "and tensors follow one another",
                tensor=name,
            )
        rows.append(StoredTensor(meta, str(path), 8 + length + start))
        end = stop
    if 8 + length + end != size:
        raise SourceError(f"{path} has {size} bytes, its header describes {8 + length + end}: it was cut or extended")
    return rows
