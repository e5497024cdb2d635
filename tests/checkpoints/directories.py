"""Checkpoint directories in Hugging Face's form, written byte by byte. It knows the file format, no architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oracle import as_bits

Bits = np.ndarray[Any, Any]

_FORMAT_NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_FORMAT_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


def write_checkpoint(
    directory: str | Path, config: Mapping[str, Any], weights: Mapping[str, Bits], shards: int = 1
) -> Path:
    """Write config.json and the weights (raw bits in the config's dtype) as ``shards`` safetensors files.

    One file is ``model.safetensors``; several have an index and hold consecutive tensors, about equally many. The
    directory is made if it is absent; files of an earlier checkpoint in it are removed first. Returns the directory.
    Raises ValueError when the bits' width is not the config's dtype's, or there are fewer tensors than files.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for old in [*directory.glob("model*.safetensors"), *directory.glob("model*.safetensors.index.json")]:
        old.unlink()
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True))
    kind = _FORMAT_NAMES[str(config.get("dtype") or config.get("torch_dtype"))]
    names = list(weights)
    if shards < 1 or shards > len(names):
        raise ValueError(f"{len(names)} tensors cannot fill {shards} files")
    if shards == 1:
        _write_file(directory / "model.safetensors", weights, names, kind)
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        _write_file(directory / file, weights, part, kind)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(bits.nbytes for bits in weights.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return directory


def _write_file(path: Path, weights: Mapping[str, Bits], names: list[str], kind: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        bits = weights[name]
        if bits.dtype.itemsize != _FORMAT_SIZES[kind]:
            raise ValueError(f"{name} has {bits.dtype.itemsize} bytes an element, {kind} has {_FORMAT_SIZES[kind]}")
        header[name] = {"dtype": kind, "shape": list(bits.shape), "data_offsets": [end, end + bits.nbytes]}
        end += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded with spaces so that the data starts on a multiple of eight, as the format asks.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(as_bits(weights[name]).tobytes())
