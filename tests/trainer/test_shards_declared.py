"""Declared shards and ranges of checkpoint files: what is handed over is what was declared, and what is odd is refused.

It knows sources in one process and files; it must not know layouts other than those it declares.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rankcast.errors import ManifestError, SourceError, UnsupportedError
from rankcast.trainer.sources import Declared, DeclaredSource, SafetensorsSource, WeightSource, export_shards
from rankcast.wire.handles import FileHandle
from trainer.shard_reading import assembled, bits

ROOT = Path(__file__).resolve().parents[2]
Z = torch.zeros


def special(*shape: int) -> torch.Tensor:
    tensor = torch.randint(0, 256, (*shape, 4), dtype=torch.uint8).view(torch.float32).reshape(shape).clone()
    tensor.view(-1)[:1] = -0.0
    return tensor


def found_in(source: WeightSource) -> dict[str, np.ndarray]:
    export = export_shards(source)
    assert export is not None
    assert export.rows.staged == {}
    return assembled([(source.manifest(), export.rows)])


def read(source: WeightSource) -> dict[str, bytes]:
    found = {}
    for weight in source.read():
        buffer = torch.full((weight.meta.nbytes,), 0xA5, dtype=torch.uint8)
        weight.write(buffer)
        found[weight.meta.name] = buffer.numpy().tobytes()
    return found


@given(st.data())
def test_parts_in_any_strides_are_the_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    whole = special(rows, columns)
    cut, split = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    held = []
    for top, bottom in ((0, cut), (cut, rows)):
        for left, right in ((0, split), (split, columns)):
            part = whole[top:bottom, left:right]
            view = part.t().contiguous().t() if data.draw(st.booleans()) else part.clone()
            held.append(Declared("w", (rows, columns), view, ((top, bottom), (left, right))))
    source = DeclaredSource(held)
    assert np.array_equal(found_in(source)["w"], bits(whole))
    assert read(source) == {"w": bits(whole).tobytes()}


def test_a_whole_view_needs_no_box_and_is_offered_as_it_lies() -> None:
    weight = special(300, 100)
    source = DeclaredSource([Declared("w", (300, 100), weight), Declared("s", (), torch.tensor(-0.0))])
    assert [str(row) for row in source.manifest().rows()] == ["w float32[300, 100]", "s float32[]"]
    assert next(iter(source.read())).tensor.data_ptr() == weight.data_ptr()
    assert np.array_equal(found_in(source)["w"], bits(weight))
    assert read(source)["s"] == b"\0\0\0\x80"


def test_a_rank_that_holds_a_part_hands_over_no_whole_tensor() -> None:
    source = DeclaredSource([Declared("w", (4, 2), torch.zeros(2, 2), ((2, 4), (0, 2)))])
    assert source.manifest().shapes == ((4, 2),)
    source.check_whole([])
    for ask in (lambda: source.check_whole(["w"]), lambda: read(source)):
        with pytest.raises(UnsupportedError) as caught:
            ask()
        assert caught.value.tensor == "w"
        assert all(part in str(caught.value) for part in ("w float32[4, 2]", "[0:2, 0:2]", "direct"))


def test_what_is_passed_over_may_be_there_in_part() -> None:
    whole = special(4, 2)
    source = DeclaredSource([Declared("w", (4, 2), Z(2, 2), ((2, 4), (0, 2))), Declared("v", (4, 2), whole)])
    source.check_whole(["v"])
    part, all_of_it = source.read()
    assert part.tensor is None
    buffer = torch.zeros(32, dtype=torch.uint8)
    all_of_it.write(buffer)
    assert buffer.numpy().tobytes() == bits(whole).tobytes()


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([Declared("w", (4, 4), Z(2, 4), ((0, 3), (0, 4)))], "[2, 4], not [3, 4]"),
        ([Declared("w", (4, 4), Z(2, 4), ((3, 5), (0, 4)))], "[3:5, 0:4]"),
        ([Declared("w", (4, 4), Z(4), ((0, 4),))], "not inside"),
        ([Declared("w", (4, 4), Z(2, 4), ((3, 1), (0, 4)))], "before its start"),
        ([Declared("w", (4, 4), Z(2, 4), ((-2, 0), (0, 4)))], "before its start"),
        (
            [Declared("w", (4, 4), Z(3, 4), ((0, 3), (0, 4))), Declared("w", (4, 4), Z(2, 4), ((2, 4), (0, 4)))],
            "[2:3, 0:4] is declared twice",
        ),
        (
            [Declared("w", (4, 4), Z(2, 4), ((0, 2), (0, 4))), Declared("w", (5, 4), Z(2, 4), ((2, 4), (0, 4)))],
            "w float32[5, 4]",
        ),
        (
            [
                Declared("w", (4, 4), Z(2, 4), ((0, 2), (0, 4))),
                Declared("w", (4, 4), Z(2, 4, dtype=torch.bfloat16), ((2, 4), (0, 4))),
            ],
            "bfloat16",
        ),
    ],
)
def test_a_declaration_that_cannot_hold_is_refused_by_name(held: list[Declared], said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        DeclaredSource(held).manifest()
    assert said in str(caught.value)
    assert caught.value.tensor == "w"


def test_a_view_without_values_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="meta"):
        DeclaredSource([Declared("w", (4,), torch.empty(4, device="meta"))]).manifest()


@pytest.mark.parametrize("placement", ["Shard(dim=0)", "Replicate()"])
def test_a_dtensor_is_refused_by_name_with_the_way_out(placement: str, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        placed = Replicate() if placement.startswith("R") else Shard(0)
        held = torch.nn.Parameter(distribute_tensor(Z(4, 2), init_device_mesh("cpu", (1,)), [placed]))
        with pytest.raises(UnsupportedError) as caught:
            DeclaredSource([Declared("w", (4, 2), held)]).manifest()
        assert caught.value.tensor == "w"
        assert "w is declared with a DTensor: declare its local tensor (to_local()) and the box" in str(caught.value)
        local = DeclaredSource([Declared("w", (4, 2), held.to_local())])
        assert local.manifest().shapes == ((4, 2),)
    finally:
        dist.destroy_process_group()


def test_each_value_of_the_versions_has_the_name_of_its_declaration() -> None:
    first, second = Z(2, 2), Z(2, 2)
    source = DeclaredSource(
        [
            Declared("w", (4, 2), first, ((0, 2), (0, 2))),
            Declared("w", (4, 2), second, ((2, 4), (0, 2))),
            Declared("v", (2, 2), Z(2, 2)),
        ]
    )
    assert source.version_names() == ("w", "w", "v")
    before = source.versions()
    second.add_(1)
    assert [a != b for a, b in zip(before, source.versions(), strict=True)] == [False, True, False]


def test_a_function_is_asked_again_when_memory_moved_and_must_declare_the_same() -> None:
    held = {"w": special(300, 100)}
    source = DeclaredSource(lambda: [Declared(name, tuple(t.shape), t) for name, t in held.items()])
    export = export_shards(source)
    assert not export.renew()
    held["w"] = special(300, 100)
    assert export.renew()
    assert np.array_equal(assembled([(source.manifest(), export.rows)])["w"], bits(held["w"]))
    before = source.versions()
    held["w"].add_(1)
    assert source.versions() != before
    held["v"] = torch.zeros(2)
    with pytest.raises(SourceError, match="v float32"):
        export.renew()


def test_the_megatron_example_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    program = ROOT / "examples" / "megatron_qkv.py"
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "element by element" in done.stdout


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {
        "a": special(300, 100),
        "b": special(7).to(torch.bfloat16),
        "c": torch.tensor(3),
        "d": torch.zeros(0, 4),
        "e": torch.rand(3, 5) > 0.5,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def test_a_checkpoint_is_exported_as_ranges_of_its_file(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = checkpoint
    before = len(os.listdir("/proc/self/fd"))
    with SafetensorsSource(folder) as source:
        export = export_shards(source)
        (handle,) = export.rows.handles
        assert isinstance(handle, FileHandle)
        assert handle.size == (folder / "model.safetensors").stat().st_size
        assert export.rows.packed == -1
        found = assembled([(source.manifest(), export.rows)])
        assert found.keys() == {"a", "b", "c", "e"}
        assert all(np.array_equal(found[name], bits(tensors[name])) for name in found)
        assert not export.renew()
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, 5000), "5000"),
        (lambda path: os.replace(path.with_name("copy"), path), "replaced"),
        (lambda path: os.utime(path, ns=(0, 1)), "rewritten"),
        (lambda path: path.unlink(), "cannot be opened"),
    ],
)
def test_a_checkpoint_that_changed_since_its_header_was_read_is_refused(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], change: Callable[[Path], None], said: str
) -> None:
    folder, _ = checkpoint
    path = folder / "model.safetensors"
    path.with_name("copy").write_bytes(path.read_bytes())
    source = SafetensorsSource(path)
    source.manifest()
    before = source.versions()
    change(path)
    after = source.versions()
    assert after != before
    names = source.version_names()
    assert {name for name, a, b in zip(names, before, after, strict=True) if a != b} == {str(path)}
    with pytest.raises(SourceError) as caught:
        source.shards()
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    source.close()
