"""Reading a checkpoint directory: every bit, and a named refusal of anything odd."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import oracle
from checkpoints import bits_of, tiny_config, write_checkpoint
from rankcast.engines.reference.checkpoint import checkpoint_manifest, iterate_checkpoint, stored_tensors
from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.parts import checkpoint_names
from rankcast.errors import SourceError

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_comes_once_bit_for_bit(tmp_path, shards, dtype):
    raw = tiny_config(dtype=dtype)
    weights = oracle.unique_weights(raw)
    write_checkpoint(tmp_path, raw, weights, shards=shards)
    read = list(iterate_checkpoint(tmp_path))
    assert len(read) == len(weights)
    assert not oracle.compare(weights, {name: bits_of(tensor) for name, tensor in read})
    assert sorted(checkpoint_manifest(tmp_path).rows(), key=str) == sorted(
        checkpoint_names(parse_config(raw)).rows(), key=str
    )


def test_what_the_safetensors_library_writes_reads_back_in_every_dtype(tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64, torch.float8_e4m3fn]
    tensors = {str(d): torch.tensor([0, 1, 2, 3, 4, 5]).to(d).reshape(2, 3) for d in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = dict(iterate_checkpoint(tmp_path))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert (
            bits_of(read[name].reshape(-1).view(torch.uint8)) == bits_of(tensor.reshape(-1).view(torch.uint8))
        ).all()


def test_a_directory_without_a_checkpoint_is_refused_by_path(tmp_path):
    with pytest.raises(SourceError, match=str(tmp_path)):
        list(iterate_checkpoint(tmp_path))


@pytest.mark.parametrize("change", [-1, 1, -400])
def test_a_file_cut_short_or_extended_is_refused(tmp_path, change):
    raw = tiny_config()
    write_checkpoint(tmp_path, raw, oracle.unique_weights(raw))
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content + b"x" if change > 0 else content[:change])
    with pytest.raises(SourceError, match="cut or extended"):
        stored_tensors(tmp_path)


def test_a_file_cut_short_while_it_is_read_is_an_error_and_not_a_crash(tmp_path):
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "model.safetensors")
    tensors = iterate_checkpoint(tmp_path)
    next(tensors)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(SourceError, match="100 bytes before the end of b"):
        next(tensors)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
        ["a"],
    ],
)
def test_an_odd_header_is_refused(tmp_path, header):
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234567", (1 << 60).to_bytes(8, "little"), bytes(7) + b"\x01" + b"{}"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match="no safetensors file"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("how", ["absent tensor", "extra tensor", "other file", "absent file", "outside"])
def test_an_index_that_disagrees_with_the_files_is_refused(tmp_path, how):
    raw = tiny_config()
    write_checkpoint(tmp_path, raw, oracle.unique_weights(raw), shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    if how == "absent tensor":
        index["weight_map"]["lm_head.bias"] = files[0]
    elif how == "extra tensor":
        del index["weight_map"]["model.norm.weight"]
    elif how == "other file":
        index["weight_map"]["model.embed_tokens.weight"] = files[1]
    elif how == "absent file":
        (tmp_path / files[1]).unlink()
    else:
        index["weight_map"]["model.norm.weight"] = "../" + files[1]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(SourceError) as caught:
        stored_tensors(tmp_path)
    said = {"absent tensor": "lm_head.bias", "other file": "model.embed_tokens.weight", "absent file": files[1]}
    assert said.get(how, "../" if how == "outside" else "model.norm.weight") in str(caught.value)
