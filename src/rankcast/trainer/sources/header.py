"""The header of one safetensors file, parsed strictly.

This module knows the file format: eight bytes of length, a JSON header, then tensors without holes. It reads no
tensor's data, and it must not know checkpoints of several files.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from rankcast.errors import SourceError
from rankcast.manifest import TensorMeta

#: The format's own limit on a header, in bytes.
HEADER_LIMIT = 100_000_000

#: The format's dtype names -> canonical ones. It has others, with elements smaller than a byte, which rankcast refuses.
FORMAT_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "C64": "complex64",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Located(msgspec.Struct, frozen=True):
    """One tensor of a file and the byte, from the file's start, at which its data begins."""

    meta: TensorMeta
    start: int


def read_header(descriptor: int, size: int, label: str) -> tuple[Located, ...]:
    """The tensors of the open file, in the order of their data.

    ``size`` is the file's in bytes, ``label`` names it in errors. Raises ``SourceError`` naming the file, and the
    tensor where it is about one, on anything odd: a length that lies, JSON that is malformed or repeats a key, an
    unknown field or dtype, sizes that do not follow from the shape, an overlap, a hole, or bytes after the last tensor.
    """
    if size < 8:
        raise SourceError(f"{label} has {size} bytes, too few for a safetensors file")
    (length,) = struct.unpack("<Q", _read(descriptor, 8, 0, label))
    if length > min(HEADER_LIMIT, size - 8):
        raise SourceError(
            f"{label} is no safetensors file, or a damaged one: by its first eight bytes its header has {length} "
            f"bytes; the file has {size} and the format allows {HEADER_LIMIT}"
        )
    return _laid_out(_records(_read(descriptor, length, 8, label), label), 8 + length, size, label)


def _read(descriptor: int, count: int, offset: int, label: str) -> bytes:
    data = os.pread(descriptor, count, offset)
    if len(data) != count:
        raise SourceError(
            f"{label} ended at byte {offset + len(data)} while its header was read: it is being rewritten"
        )
    return data


def _records(text: bytes, label: str) -> dict[str, _Record]:
    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise SourceError(f"{label}: the header has {twice!r} twice", tensor=twice)
        return found

    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with {")
        header = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as fault:
        raise SourceError(f"{label} has a header that is not the format's JSON: {fault}") from None
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise SourceError(f"{label}: __metadata__ must map strings to strings")
    records = {}
    for name, fields in header.items():
        try:
            records[name] = msgspec.convert(fields, _Record)
        except msgspec.ValidationError as fault:
            raise SourceError(f"{label}: the header of {name} is malformed: {fault}", tensor=name) from None
    return records


def _laid_out(records: dict[str, _Record], base: int, size: int, label: str) -> tuple[Located, ...]:
    found = []
    end = 0
    before = "the header"
    for name, record in sorted(records.items(), key=lambda item: item[1].data_offsets):
        meta = _described(name, record, label)
        start, stop = record.data_offsets
        if start != end:
            odd = "overlaps" if start < end else f"leaves a hole of {start - end} bytes after"
            raise SourceError(
                f"{label}: {name} at bytes {start}..{stop} {odd} {before}, which ends at {end}", tensor=name
            )
        if stop - start != meta.nbytes:
            raise SourceError(
                f"{label}: {meta} takes {meta.nbytes} bytes, the header gives it {start}..{stop}", tensor=name
            )
        found.append(Located(meta, base + start))
        end, before = stop, name
    if base + end != size:
        raise SourceError(
            f"{label}: the tensors end at byte {base + end} but the file has {size}: it is truncated, or something "
            "was appended"
        )
    return tuple(found)


def _described(name: str, record: _Record, label: str) -> TensorMeta:
    dtype = FORMAT_DTYPES.get(record.dtype)
    if dtype is None:
        raise SourceError(
            f"{label}: {name} has dtype {record.dtype!r}; rankcast reads {', '.join(FORMAT_DTYPES)}", tensor=name
        )
    if any(extent < 0 for extent in record.shape) or record.data_offsets[0] < 0:
        raise SourceError(f"{label}: {name} has a negative size or offset", tensor=name)
    return TensorMeta(name, dtype, record.shape)
