"""Exported shards: what a reader finds through the handles is bit for bit what the source holds, push after push.

It knows sources and columns in one process; it must not know meshes (`test_shards_dtensor`) or packings.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rankcast.errors import ManifestError, SourceError
from rankcast.geometry import Box, whole
from rankcast.manifest import Manifest, TensorMeta
from rankcast.trainer.sources import IterableSource, ModuleSource, RankShards, Shard, WeightSource, export_shards
from rankcast.trainer.sources.exported import ExportedShards
from trainer.shard_reading import assembled, bits, boxes


def exported(source: WeightSource) -> ExportedShards:
    found = export_shards(source)
    assert found is not None
    return found


def over_the_wire(rows: RankShards) -> RankShards:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(rows), type=RankShards)


def holding(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def check(source: WeightSource, export: ExportedShards, expected: dict[str, torch.Tensor]) -> None:
    found = assembled([(source.manifest(), over_the_wire(export.rows))])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(found[name], bits(tensor)), name


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape).clone()


def test_a_module_is_exported_where_it_lies_and_small_storages_are_packed() -> None:
    module = nn.Sequential(nn.Linear(300, 100), nn.LayerNorm(100), nn.BatchNorm1d(100))
    source = ModuleSource(module)
    export = exported(source)
    check(source, export, module.state_dict())
    assert export.sharing.moved == 1
    assert export.rows.staged == {}
    assert export.rows.packed_bytes == sum(t.nbytes for t in module.state_dict().values()) - module[0].weight.nbytes
    by_segment = dict(zip(export.rows.tensors, export.rows.segments, strict=True))
    packed = {source.manifest().names[i] for i, segment in by_segment.items() if segment == export.rows.packed}
    assert packed == set(module.state_dict()) - {"0.weight"}
    assert len(export.rows.handles) == 2


def test_a_training_step_shows_at_once_and_what_is_packed_after_refresh() -> None:
    module = nn.Linear(300, 100)
    source = ModuleSource(module)
    export = exported(source)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(3):
        module(torch.rand(4, 300)).square().mean().backward()
        optimizer.step()
        assert not export.renew()
        assert export.refresh() == module.bias.nbytes
        check(source, export, module.state_dict())


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e5m2]),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 2**31),
    st.sampled_from(["plain", "transposed", "sliced", "expanded", "offset"]),
    st.sampled_from([0, 300_000]),
)
def test_any_strides_arrive_as_logical_values(
    dtype: torch.dtype, shape: list[int], seed: int, kind: str, padding: int
) -> None:
    torch.manual_seed(seed)
    # A large storage goes as it lies, a small one is packed.
    base = random_bits(dtype, 2000 + padding)
    sizes = [2 * size + 1 for size in shape] if kind == "sliced" else list(shape)
    count = int(np.prod(sizes))
    start = seed % 700
    dense = base[start : start + count].view(sizes) if count <= 1000 else random_bits(dtype, *sizes)
    match kind:
        case "transposed":
            tensor = dense.permute(tuple(reversed(range(len(shape)))))
        case "sliced":
            tensor = dense[tuple(slice(1, None, 2) for _ in shape)]
        case "expanded":
            tensor = dense[:1].expand(shape) if shape and shape[0] else dense
        case _:
            tensor = dense
    source = ModuleSource(holding(w=tensor))
    export = exported(source)
    try:
        if tensor.numel():
            check(source, export, {"w": tensor})
        else:
            assert len(export.rows) == 0
    finally:
        export.close()


def test_a_scalar_is_one_shard_and_an_empty_tensor_none() -> None:
    source = ModuleSource(holding(scale=torch.tensor(-0.0), empty=torch.empty(0, 7)))
    export = exported(source)
    assert [(index, where, view.item()) for index, where, view in boxes(export.rows)] == [(0, (), 0x80000000)]


def test_tied_weights_and_views_of_one_buffer_share_a_segment() -> None:
    flat = torch.rand(60_000)
    module = holding(a=flat[:30_000].view(300, 100), b=flat[30_000:].view(100, 300).t())
    source = ModuleSource(module)
    export = exported(source)
    check(source, export, module.state_dict())
    assert len(export.rows.handles) == 1
    assert sorted(export.rows.offsets) == [0, 120_000]
    assert export.sharing.moved == 1


def test_a_source_without_stable_shards_has_none() -> None:
    assert export_shards(IterableSource(lambda: iter([("a", torch.zeros(2))]))) is None


def test_a_storage_that_moved_is_exported_anew_and_the_others_keep_their_handles() -> None:
    module = nn.ModuleList([nn.Linear(300, 100) for _ in range(3)])
    source = ModuleSource(module)
    export = exported(source)
    before = export.rows
    module[1].weight.data = random_bits(torch.float32, 100, 300)
    assert export.renew()
    assert export.sharing.moved == 1
    assert export.sharing.already == 2
    changed = [old != new for old, new in zip(before.handles, export.rows.handles, strict=True)]
    assert changed.count(True) == 1
    for column in ("tensors", "starts", "sizes", "segments", "offsets", "strides", "dtypes"):
        assert getattr(before, column) == getattr(export.rows, column)
    check(source, export, module.state_dict())
    assert not export.renew()


def test_a_storage_at_a_remembered_address_is_still_seen_as_another() -> None:
    # The kernel maps the next shared memory where the last was, which has just been given back.
    module = holding(w=torch.zeros(90_000))
    source = ModuleSource(module)
    export = exported(source)
    where = module.w.data_ptr()
    again = 0
    for turn in range(1, 6):
        module.w = None
        module.w = torch.full((90_000,), float(turn)).share_memory_()
        again += module.w.data_ptr() == where
        assert export.renew()
        ((_, _, view),) = boxes(export.rows)
        assert np.array_equal(view, bits(module.w))
        where = module.w.data_ptr()
    assert again, "the kernel gave no address out again: the test has shown nothing"


def test_an_offload_and_a_return_are_noticed() -> None:
    module = nn.Linear(300, 100)
    source = ModuleSource(module)
    export = exported(source)
    kept = module.weight.detach().clone()
    module.weight.data = torch.empty(0)
    with pytest.raises(SourceError, match="weight"):
        export.renew()
    module.weight.data = kept
    assert export.renew()
    check(source, export, module.state_dict())


def test_a_layout_that_changed_over_the_same_bytes_is_noticed() -> None:
    module = holding(w=torch.rand(200, 200))
    source = ModuleSource(module)
    export = exported(source)
    module.w.data = module.w.data.t()
    assert export.renew()
    check(source, export, module.state_dict())


def test_a_replaced_small_tensor_is_packed_anew() -> None:
    module = nn.LayerNorm(100)
    source = ModuleSource(module)
    export = exported(source)
    handle = export.rows.handles
    for _ in range(5):
        module.weight.data = random_bits(torch.float32, 100)
        export.renew()
        export.refresh()
        check(source, export, module.state_dict())
    assert export.rows.handles == handle


def test_what_cannot_be_read_where_it_lies_is_left_to_the_loader_with_a_reason() -> None:
    module = holding(
        numpy=torch.from_numpy(np.zeros(50_000, dtype=np.float32)), fine=torch.rand(50_000), tiny=torch.rand(3)
    )
    module.register_buffer("conjugate", torch.rand(50_000, dtype=torch.complex64).conj())
    source = ModuleSource(module)
    export = exported(source)
    assert export.rows.staged.keys() == {"numpy", "conjugate"}
    assert "clone" in export.rows.staged["numpy"]
    assert "resolve_conj" in export.rows.staged["conjugate"]
    check(source, export, {"fine": module.fine, "tiny": module.tiny})


def test_a_small_conjugated_tensor_is_packed_as_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    source = ModuleSource(holding(w=tensor))
    check(source, exported(source), {"w": tensor.resolve_conj()})


def test_a_master_copy_keeps_its_own_dtype_and_states_the_wires() -> None:
    source = ModuleSource(nn.Linear(300, 100), dtype=torch.bfloat16)
    export = exported(source)
    assert set(source.manifest().dtypes) == {"bfloat16"}
    assert set(export.rows.dtypes) == {"float32"}


def test_a_write_between_shows_in_the_versions() -> None:
    module = nn.Linear(30, 10)
    source = ModuleSource(module)
    source.manifest()
    before = source.versions()
    assert before == source.versions()
    with torch.no_grad():
        module.bias[0] = 1.0
    assert source.versions() != before
    for how in ({}, {"foreach": True}):
        before = source.versions()
        optimizer = torch.optim.AdamW(module.parameters(), **how)
        module(torch.rand(2, 30)).sum().backward()
        optimizer.step()
        assert all(a != b for a, b in zip(before, source.versions(), strict=True))


class _Given(WeightSource):
    def __init__(self, metas: list[TensorMeta], held: list[Shard]) -> None:
        self._metas, self._held = metas, held

    def manifest(self) -> Manifest:
        return Manifest.of(self._metas)

    def read(self):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def shards(self) -> list[Shard]:
        return self._held


def test_overlapping_boxes_of_one_rank_are_refused_by_name() -> None:
    meta = TensorMeta("w", "float32", (4, 4))
    held = [Shard(meta, Box((0, 0), (3, 4)), torch.zeros(3, 4)), Shard(meta, Box((2, 0), (2, 4)), torch.zeros(2, 4))]
    with pytest.raises(ManifestError) as caught:
        export_shards(_Given([meta], held))
    assert all(part in str(caught.value) for part in ("w float32[4, 4]", "[2:3, 0:4]"))


def test_a_shard_that_the_manifest_does_not_know_is_refused() -> None:
    meta = TensorMeta("w", "float32", (4,))
    other = TensorMeta("w", "float32", (8,))
    with pytest.raises(SourceError, match="w float32"):
        export_shards(_Given([other], [Shard(meta, whole((4,)), torch.zeros(4))]))


def test_a_shard_whose_memory_is_not_its_box_cannot_be_made() -> None:
    meta = TensorMeta("w", "float32", (4,))
    with pytest.raises(ValueError):
        Shard(meta, whole((4,)), torch.zeros(3))
    with pytest.raises(ValueError):
        Shard(meta, Box((2,), (3,)), torch.zeros(3))
