"""A checkpoint as a source: its bytes arrive, in bounded memory, and everything odd about its files is refused.

Files are written here byte by byte, so that they can be odd; it must not know pushes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from rankcast.errors import SourceError
from rankcast.manifest import DTYPES
from rankcast.trainer.sources import SafetensorsSource
from rankcast.trainer.sources.header import FORMAT_DTYPES

INDEX = "model.safetensors.index.json"


def file_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(stop - start) // 4] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def written(source: SafetensorsSource) -> dict[str, bytes]:
    found = {}
    for weight in source.read():
        buffer = torch.full((weight.meta.nbytes,), 0xA5, dtype=torch.uint8)
        weight.write(buffer)
        found[weight.meta.name] = buffer.numpy().tobytes()
    return found


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_directory_arrives_bit_for_bit(tmp_path: Path, shards: int) -> None:
    config = tiny_config(dtype="bfloat16")
    weights = scaled_weights(config)
    source = SafetensorsSource(write_checkpoint(tmp_path, config, weights, shards))
    assert written(source) == {name: bits.tobytes() for name, bits in weights.items()}
    manifest = source.manifest()
    assert set(manifest.dtypes) == {"bfloat16"}
    assert dict(zip(manifest.names, manifest.shapes, strict=True)) == {n: b.shape for n, b in weights.items()}
    assert written(source) == {name: bits.tobytes() for name, bits in weights.items()}


def test_every_dtype_of_the_format_travels_by_its_bytes(tmp_path: Path) -> None:
    raw = torch.arange(32, dtype=torch.uint8)
    tensors = {
        name: (raw % 2 if name == "bool" else raw).view(getattr(torch, name)).reshape(2, -1).clone()
        for name in FORMAT_DTYPES.values()
    }
    save(tmp_path / "one.safetensors", tensors)
    source = SafetensorsSource(tmp_path / "one.safetensors")
    manifest = source.manifest()
    assert dict(zip(manifest.names, manifest.dtypes, strict=True)) == {name: name for name in tensors}
    assert written(source) == {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    assert set(FORMAT_DTYPES.values()) == DTYPES.keys() - {"complex32", "complex128"}


def test_scalars_and_empty_tensors_keep_their_shapes(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(-0.0), "one": torch.tensor([2.0]), "none": torch.zeros(0, 5)}
    save(tmp_path / "model.safetensors", tensors)
    source = SafetensorsSource(tmp_path)
    found = dict(zip(source.manifest().names, source.manifest().shapes, strict=True))
    assert found == {"scalar": (), "one": (1,), "none": (0, 5)}
    assert written(source) == {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_tensors_that_are_not_asked_for_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model.safetensors", {"a": torch.zeros(8), "b": torch.ones(8)})
    source = SafetensorsSource(tmp_path)
    source.manifest()
    read: list[int] = []
    original = os.preadv

    def counted(*arguments: Any) -> int:
        read.append(original(*arguments))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    for weight in source.read():
        if weight.meta.name == "b":
            weight.write(torch.empty(32, dtype=torch.uint8))
    assert read == [32]


def test_reads_that_come_up_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(100, dtype=torch.int64)
    save(tmp_path / "model.safetensors", {"a": tensor})
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: original(fd, [views[0][:7]], at))
    assert written(SafetensorsSource(tmp_path)) == {"a": tensor.numpy().tobytes()}


def test_no_descriptor_stays_open_whole_or_half_read(tmp_path: Path) -> None:
    config = tiny_config()
    source = SafetensorsSource(write_checkpoint(tmp_path, config, scaled_weights(config), 3))
    source.manifest()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        written(source)
        reader = source.read()
        weight = next(reader)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        reader.close()
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(SourceError) as caught:
        weight.write(torch.empty(weight.meta.nbytes, dtype=torch.uint8))
    assert weight.meta.name in str(caught.value)


GOOD = {"a": entry(0, 8), "b": entry(8, 12)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ["0 bytes"]),
        (b"\0" * 7, ["7 bytes"]),
        (file_bytes(GOOD, b"\0" * 12, length=10**6), ["1000000 bytes"]),
        (file_bytes(GOOD, b"\0" * 12, length=2**63), ["9223372036854775808"]),
        (file_bytes(b"[]"), ["does not begin with {"]),
        (file_bytes(b' {"a": 1}'), ["does not begin with {"]),
        (file_bytes(b'{"a": '), ["not the format's JSON"]),
        (file_bytes(b'{"\xff": 1}'), ["not the format's JSON"]),
        (file_bytes(b'{"a":' * 100_000), ["not the format's JSON"]),
        (file_bytes(b'{"a": {"dtype":"F32","shape":[],"data_offsets":[0,4]}, "a": 1}', b"\0" * 4), ["'a' twice"]),
        (file_bytes({"__metadata__": {"x": 1}}), ["__metadata__"]),
        (file_bytes({"a": 3}), ["header of a"]),
        (file_bytes({"a": {**entry(0, 8), "extra": 1}}, b"\0" * 8), ["header of a", "extra"]),
        (file_bytes({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), ["header of a", "data_offsets"]),
        (file_bytes({"a": {**entry(0, 8), "shape": [2.0]}}, b"\0" * 8), ["header of a", "float"]),
        (file_bytes({"a": {**entry(0, 8), "shape": [True]}}, b"\0" * 8), ["header of a", "bool"]),
        (file_bytes({"a": entry(0, 8, dtype="F4")}, b"\0" * 8), ["a", "'F4'"]),
        (file_bytes({"a": entry(0, 8, [-1, -2])}, b"\0" * 8), ["a", "negative"]),
        (file_bytes({"a": entry(-8, 0, [2])}), ["a", "negative"]),
        (file_bytes({"a": entry(0, 8, [3])}, b"\0" * 8), ["a float32[3]", "12 bytes", "0..8"]),
        (file_bytes({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12), ["b at bytes 4..12", "overlaps a"]),
        (file_bytes({"a": entry(0, 8), "b": entry(12, 16)}, b"\0" * 16), ["b", "hole of 4 bytes", "after a"]),
        (file_bytes({"a": entry(4, 8)}, b"\0" * 8), ["a", "hole of 4 bytes"]),
        (file_bytes(GOOD, b"\0" * 13), ["appended"]),
        (file_bytes(GOOD, b"\0" * 11), ["truncated"]),
        (file_bytes({}, b"\0"), ["appended"]),
    ],
)
def test_a_file_that_is_odd_is_refused_naming_it_and_the_fault(tmp_path: Path, content: bytes, said: list[str]) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        SafetensorsSource(path).manifest()
    assert all(part in str(caught.value) for part in [*said, str(path)])


def test_a_header_with_notes_and_padding_is_fine_and_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_bytes(json.dumps({"__metadata__": {"format": "pt"}, **GOOD}).encode() + b"   ", bytes(12)))
    assert SafetensorsSource(path).manifest().names == ("a", "b")
    path.write_bytes(file_bytes({}))
    assert len(SafetensorsSource(path).manifest()) == 0


def indexed(folder: Path, weight_map: object) -> SafetensorsSource:
    save(folder / "x-1.safetensors", {"a": torch.zeros(2), "b": torch.zeros(2)})
    save(folder / "x-2.safetensors", {"c": torch.zeros(2)})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map}))
    return SafetensorsSource(folder)


MAP = {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}


def test_files_that_the_index_does_not_name_are_not_part_of_the_checkpoint(tmp_path: Path) -> None:
    source = indexed(tmp_path, MAP)
    save(tmp_path / "consolidated.safetensors", {"a": torch.ones(2)})
    assert source.manifest().names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({**MAP, "d": "x-2.safetensors"}, ["does not hold", "d", "x-2.safetensors"]),
        ({**MAP, "b": "x-2.safetensors"}, ["also holds", "b", "x-1.safetensors"]),
        ({"a": "x-1.safetensors", "c": "x-2.safetensors"}, ["also holds", "b"]),
        ({**MAP, "d": "x-3.safetensors"}, ["d", "x-3.safetensors", "no such file"]),
        ({**MAP, "d": "../x-2.safetensors"}, ["d", "no plain file name"]),
        ({**MAP, "d": 3}, ["cannot be used"]),
        ([], ["cannot be used"]),
    ],
)
def test_an_index_that_its_files_contradict_is_refused(tmp_path: Path, weight_map: object, said: list[str]) -> None:
    with pytest.raises(SourceError) as caught:
        indexed(tmp_path, weight_map).manifest()
    assert all(part in str(caught.value) for part in said)


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(SourceError) as caught:
        SafetensorsSource(tmp_path).manifest()
    assert INDEX in str(caught.value)


@pytest.mark.parametrize("files", [[], ["a", "b"]])
def test_a_directory_without_one_file_or_an_index_is_refused(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        save(tmp_path / f"{name}.safetensors", {name: torch.zeros(1)})
    with pytest.raises(SourceError) as caught:
        SafetensorsSource(tmp_path).manifest()
    assert str(tmp_path) in str(caught.value)
    assert all(f"{name}.safetensors" in str(caught.value) for name in files)


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        SafetensorsSource(tmp_path / "absent").manifest()
    assert "absent" in str(caught.value)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(SourceError) as caught:
        SafetensorsSource(tmp_path).manifest()
    assert "not a regular file" in str(caught.value)


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    new.rename(path)


def rewrite(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # the clock's step may be longer than this test


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace, "was replaced"),
        (rewrite, "was rewritten"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "now has"),
        (lambda path: os.remove(path), "cannot be opened"),
    ],
)
def test_a_file_that_changed_since_connect_is_refused_before_a_byte_is_sent(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    source = indexed(tmp_path, MAP)
    source.manifest()
    change(tmp_path / "x-2.safetensors")
    with pytest.raises(SourceError) as caught:
        next(source.read())
    assert said in str(caught.value)
    assert "x-2.safetensors" in str(caught.value)


@pytest.mark.parametrize("change", [rewrite, lambda path: os.truncate(path, path.stat().st_size - 8)])
def test_a_file_that_changes_in_the_middle_of_a_pass_is_noticed_at_the_next_tensor(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    source = indexed(tmp_path, MAP)
    reader = source.read()
    next(reader).write(torch.empty(8, dtype=torch.uint8))
    change(tmp_path / "x-1.safetensors")
    with pytest.raises(SourceError) as caught:
        next(reader).write(torch.empty(8, dtype=torch.uint8))
    assert "x-1.safetensors" in str(caught.value)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    source = indexed(tmp_path, MAP)
    save(tmp_path / "x-2.safetensors", {"c": torch.zeros(2), "a": torch.ones(2)})
    with pytest.raises(SourceError) as caught:
        source.manifest()
    assert "also holds a" in str(caught.value)
