"""Checkpoint directories as raw bits: config.json and safetensors files, one or several with an index.

It parses the safetensors format itself (an eight-byte length, a JSON header, the data), because numpy has no bfloat16
and values are none of the oracle's business. It knows no architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Bits = np.ndarray[Any, Any]

_ELEMENTS = {
    "F64": np.uint64,
    "I64": np.uint64,
    "F32": np.uint32,
    "I32": np.uint32,
    "U32": np.uint32,
    "BF16": np.uint16,
    "F16": np.uint16,
    "I16": np.uint16,
    "U16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "I8": np.uint8,
    "U8": np.uint8,
    "BOOL": np.uint8,
}
_CONFIG_ELEMENTS = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
}


def element_type(config: Mapping[str, Any]) -> np.dtype[Any]:
    """The unsigned type as wide as the config's ``dtype`` (or ``torch_dtype``; float32 when it names none)."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _CONFIG_ELEMENTS:
        raise ValueError(f"the oracle has no raw-bit form for dtype {name!r}")
    return np.dtype(_CONFIG_ELEMENTS[name])


def read_checkpoint(directory: str | Path) -> tuple[dict[str, Any], dict[str, Bits]]:
    """The config and every tensor's bits in full shape."""
    return read_config(directory), read_weights(directory)


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json as it stands."""
    config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    return config


def read_weights(directory: str | Path) -> dict[str, Bits]:
    """Every tensor's bits, from ``model.safetensors`` or from the files that the index names.

    Raises ValueError when the index and the files disagree, or a file is not whole.
    """
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return _read_file(directory / "model.safetensors")
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    weights: dict[str, Bits] = {}
    for file in dict.fromkeys(weight_map.values()):
        found = _read_file(directory / file)
        named = {name for name, where in weight_map.items() if where == file}
        if set(found) != named:
            raise ValueError(f"{file} and the index disagree about {sorted(set(found) ^ named)[:10]}")
        weights.update(found)
    return {name: weights[name] for name in weight_map}


def _read_file(path: Path) -> dict[str, Bits]:
    data = path.read_bytes()
    header_size = int.from_bytes(data[:8], "little")
    start = 8 + header_size
    if len(data) < start:
        raise ValueError(f"{path.name} ends inside its header")
    header: dict[str, Any] = json.loads(data[8:start])
    header.pop("__metadata__", None)
    weights: dict[str, Bits] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        element = np.dtype(_ELEMENTS[entry["dtype"]])
        shape = tuple(entry["shape"])
        if last > len(data) - start:
            raise ValueError(f"{path.name} ends inside {name}")
        if first != end or last - first != element.itemsize * int(np.prod(shape, dtype=np.int64)):
            raise ValueError(f"{path.name}: {name} does not lie where its shape and its predecessor put it")
        # Copied, so that the result is aligned and can be written to.
        weights[name] = np.frombuffer(data[start + first : start + last], dtype=element).reshape(shape).copy()
        end = last
    if start + end != len(data):
        raise ValueError(f"{path.name} has {len(data) - start - end} bytes more than its header names")
    return weights
