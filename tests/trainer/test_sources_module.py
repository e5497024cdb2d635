"""A module as a source: which names it gives, and that logical values arrive bit for bit.

It knows modules and wrappers; it must not know pushes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rankcast.errors import ManifestError, SourceError, UnsupportedError
from rankcast.trainer.sources import ModuleSource, WeightSource
from rankcast.trainer.sources.dense import filler

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1 + 2**-12, 3.4e38, 1e-45, 65520.0, -1.0]


def written(source: WeightSource) -> dict[str, bytes]:
    found = {}
    for weight in source.read():
        buffer = torch.full((weight.meta.nbytes,), 0xA5, dtype=torch.uint8)
        weight.write(buffer)
        found[weight.meta.name] = buffer.numpy().tobytes()
    return found


def bits(tensor: torch.Tensor) -> bytes:
    """The logical values, dense and row-major, without torch's copying: element by element through indices."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    raw = tensor.detach().view(width) if tensor.dim() else tensor.detach().reshape(1).view(width)
    return b"".join(
        int(value).to_bytes(tensor.element_size(), "little", signed=width != torch.uint8)
        for value in raw.flatten().tolist()
    )


def holding(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


class Wrapper(nn.Module):
    """A wrapper as people write them: it holds one module, under a name of its choice."""

    def __init__(self, child: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(child, inner)


def names(module: nn.Module, **options: Callable[[str], str]) -> list[str]:
    return list(ModuleSource(module, **options).manifest().names)


def test_parameters_and_persistent_buffers_come_in_the_modules_order_and_checkpoint_names() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    assert names(module) == list(module.state_dict())
    assert {name: bits(tensor) for name, tensor in module.state_dict().items()} == written(ModuleSource(module))


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 2**31),
    st.sampled_from(["plain", "transposed", "sliced", "expanded", "offset"]),
)
def test_any_strides_arrive_as_logical_values(dtype: torch.dtype, shape: list[int], seed: int, kind: str) -> None:
    torch.manual_seed(seed)

    def random(*sizes: int) -> torch.Tensor:
        # Random bits: every kind of NaN is among them.
        return torch.randint(0, 256, (*sizes, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(sizes)

    match kind:
        case "transposed":
            tensor = random(*reversed(shape)).permute(tuple(reversed(range(len(shape)))))
        case "sliced":
            tensor = random(*(2 * size + 1 for size in shape))[tuple(slice(1, None, 2) for _ in shape)]
        case "expanded":
            tensor = random(*([1] * bool(shape)), *shape[1:]).expand(shape)
        case "offset":
            tensor = random(5, *shape)[3]
        case _:
            tensor = random(*shape)
    source = ModuleSource(holding(w=tensor))
    assert source.manifest().shapes == (tuple(shape),)
    assert written(source) == {"w": bits(tensor)}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ],
)
def test_rarer_dtypes_travel_unchanged(dtype: torch.dtype) -> None:
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(4, 6).t()
    source = ModuleSource(holding(w=tensor))
    assert source.manifest().dtypes == (str(dtype).removeprefix("torch."),)
    assert written(source) == {"w": bits(tensor)}


def test_a_conjugated_tensor_arrives_conjugated() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    (weight,) = ModuleSource(holding(w=tensor)).read()
    assert weight.tensor is None
    assert written(ModuleSource(holding(w=tensor)))["w"] == tensor.resolve_conj().numpy().tobytes()


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float64])
def test_a_declared_dtype_is_rounded_as_torch_rounds(wire: torch.dtype) -> None:
    tensor = torch.tensor(SPECIAL, dtype=torch.float32)
    source = ModuleSource(holding(w=tensor, n=torch.tensor([3])), dtype=wire)
    assert source.manifest().dtypes == (str(wire).removeprefix("torch."), "int64")
    found = written(source)
    assert found["w"] == bits(tensor.to(wire))
    assert found["n"] == bits(torch.tensor([3]))


def test_a_function_declares_dtypes_tensor_by_tensor_and_the_rest_is_exact() -> None:
    weights = torch.tensor(SPECIAL)
    source = ModuleSource(
        holding(gate=weights, up=weights.clone()), dtype=lambda name: torch.bfloat16 if name == "up" else None
    )
    assert source.manifest().dtypes == ("float32", "bfloat16")
    assert written(source) == {"gate": bits(weights), "up": bits(weights.to(torch.bfloat16))}


def test_only_a_tensor_whose_bytes_are_what_the_wire_needs_is_offered_as_it_lies() -> None:
    weight = nn.Parameter(torch.rand(4, 6))
    module = holding(turned=weight.detach().t(), part=weight.detach()[:, :3])
    module.register_parameter("weight", weight)
    offered = {w.meta.name: w.tensor for w in ModuleSource(module).read()}
    assert offered["turned"] is None
    assert offered["part"] is None
    assert offered["weight"] is not None
    assert offered["weight"].data_ptr() == weight.data_ptr()
    assert not offered["weight"].requires_grad
    assert all(w.tensor is None for w in ModuleSource(module, dtype=torch.bfloat16).read())
    assert ModuleSource.stable


def test_each_read_sees_the_values_and_the_storage_of_the_moment() -> None:
    module = nn.Linear(2, 2)
    source = ModuleSource(module)
    before = written(source)
    module.weight.data = torch.full((2, 2), 7.0)
    module.bias = nn.Parameter(torch.full((2,), -0.0))
    assert written(source) == {"weight": bits(torch.full((2, 2), 7.0)), "bias": bits(torch.full((2,), -0.0))}
    assert before != written(source)


def test_tied_parameters_come_once_under_their_first_name() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    assert names(module) == ["embed.weight"]


def test_a_module_used_twice_comes_once() -> None:
    inner = nn.Linear(2, 2)
    assert names(nn.ModuleDict({"a": inner, "b": inner})) == ["a.weight", "a.bias"]


def test_two_parameters_over_one_storage_are_both_sent() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    module["head"].weight = nn.Parameter(module["embed"].weight.data)
    found = written(ModuleSource(module))
    assert found["embed.weight"] == found["head.weight"]


LAYER = ["layers.0.weight", "layers.0.bias"]


def layer(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    module = nn.Module()
    module.layers = nn.ModuleList([wrap(nn.Linear(2, 2))])
    return module


@pytest.mark.parametrize("mark", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"])
def test_a_wrappers_segment_goes_at_the_start_in_the_middle_and_twice(mark: str) -> None:
    assert names(Wrapper(mark, layer(lambda inner: inner))) == LAYER
    assert names(layer(lambda inner: Wrapper(mark, inner))) == LAYER
    assert names(Wrapper(mark, Wrapper(mark, layer(lambda inner: Wrapper(mark, Wrapper(mark, inner)))))) == LAYER


def test_the_wrappers_of_torch_go_in_any_nesting(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.optim.swa_utils import AveragedModel

    assert names(layer(lambda inner: checkpoint_wrapper(torch.compile(inner)))) == LAYER
    assert names(AveragedModel(layer(torch.compile))) == LAYER
    assert names(nn.DataParallel(layer(nn.DataParallel))) == LAYER
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert names(nn.parallel.DistributedDataParallel(torch.compile(layer(lambda inner: inner)))) == LAYER
    finally:
        dist.destroy_process_group()


def test_names_that_only_contain_a_wrappers_word_stay() -> None:
    module = nn.Module()
    for child in ("module_list", "submodule", "lora_module", "base_model", "model_module", "orig_mod"):
        module.add_module(child, nn.ModuleList([nn.Linear(1, 1, bias=False)]))
    assert names(module) == [f"{child}.0.weight" for child, _ in module.named_children()]


def test_a_layer_called_module_beside_others_is_no_wrapper() -> None:
    module = nn.Module()
    module.module = nn.Linear(1, 1, bias=False)
    module.norm = nn.Linear(1, 1, bias=False)
    assert names(layer(lambda _: module)) == ["layers.0.module.weight", "layers.0.norm.weight"]
    assert names(nn.ModuleDict({"module": nn.Linear(1, 1, bias=False)})) == ["module.weight"]


def test_both_outer_steps_of_an_adapter_library_go_and_a_base_model_of_ones_own_stays() -> None:
    inner = nn.ModuleDict({"model": layer(lambda one: one), "head": nn.Linear(2, 2, bias=False)})
    stripped = ["model.layers.0.weight", "model.layers.0.bias", "head.weight"]
    assert names(Wrapper("base_model", Wrapper("model", inner))) == stripped
    assert names(Wrapper("base_model", inner)) == [f"base_model.{name}" for name in stripped]


def test_the_trained_copy_of_a_saved_module_counts_and_the_others_stay_out() -> None:
    module = nn.Module()
    module.lm_head = nn.Module()
    module.lm_head.original_module = nn.Linear(2, 2, bias=False)
    module.lm_head.modules_to_save = nn.ModuleDict(
        {"default": nn.Linear(2, 2, bias=False), "ref": nn.Linear(2, 2, bias=False)}
    )
    trained = module.lm_head.modules_to_save["default"].weight
    assert written(ModuleSource(module)) == {"lm_head.weight": bits(trained)}


def test_an_adapter_that_is_not_merged_is_refused() -> None:
    adapted = type("Linear", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})()
    adapted.base_layer = nn.Linear(2, 2)
    adapted.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1)})
    with pytest.raises(UnsupportedError) as caught:
        names(layer(lambda _: adapted))
    assert "layers.0" in str(caught.value)
    assert "merge" in str(caught.value)


def test_rename_is_applied_once_to_the_stripped_name() -> None:
    module = Wrapper("module", layer(lambda inner: inner))
    assert names(module, rename=lambda name: f"model.{name}") == [f"model.{name}" for name in LAYER]


def test_two_tensors_for_one_name_are_refused_naming_both() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with pytest.raises(ManifestError) as caught:
        names(module, rename=lambda name: name.removeprefix("a.").removeprefix("b."))
    assert all(part in str(caught.value) for part in ("a.weight", "b.weight", "rename"))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_tensors_without_plain_values_are_refused_by_name(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ModuleSource(holding(odd=tensor)).manifest()
    assert "odd" in str(caught.value)
    assert said in str(caught.value)


def test_a_lazy_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        ModuleSource(nn.LazyLinear(3)).manifest()
    assert caught.value.tensor == "weight"


def test_a_replicated_and_a_sharded_dtensor_are_sent_whole_and_a_partial_sum_is_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        full = torch.rand(4, 3)
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(full, mesh, [Replicate()]))
        assert written(ModuleSource(module)) == {"weight": bits(full)}
        module.weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
        assert written(ModuleSource(module)) == {"weight": bits(full)}
        # Whoever keeps a weight and asks later would wait for ranks that are past it.
        (kept,) = ModuleSource(module).read()
        with pytest.raises(SourceError, match="after the source had moved on"):
            kept.gather()
        module.weight = nn.Parameter(DTensor.from_local(full, mesh, [Partial()]))
        with pytest.raises(UnsupportedError) as caught:
            ModuleSource(module).manifest()
        assert "weight" in str(caught.value)
        assert "Partial" in str(caught.value)
    finally:
        dist.destroy_process_group()
        del os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m, "bias", nn.Parameter(torch.zeros(3))), ["bias", "float32[2]", "float32[3]"]),
        (lambda m: m.to(torch.bfloat16), ["weight", "float32[2, 2]", "bfloat16[2, 2]"]),
        (lambda m: delattr(m, "bias"), ["lost", "bias"]),
        (lambda m: m.register_buffer("late", torch.zeros(1)), ["new", "late"]),
    ],
)
def test_a_module_that_changed_since_connect_is_refused_before_anything_is_sent(
    change: Callable[[nn.Module], None], said: list[str]
) -> None:
    module = nn.Linear(2, 2)
    source = ModuleSource(module)
    source.manifest()
    change(module)
    with pytest.raises(SourceError) as caught:
        next(source.read())
    assert all(part in str(caught.value) for part in said)


@pytest.mark.parametrize(
    "buffer",
    [torch.empty(15, dtype=torch.uint8), torch.empty(4, dtype=torch.float32), torch.empty(32, dtype=torch.uint8)[::2]],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: torch.Tensor) -> None:
    (weight,) = ModuleSource(holding(w=torch.zeros(4))).read()
    with pytest.raises(ValueError) as caught:
        weight.write(buffer)
    assert "16 bytes" in str(caught.value)


def test_writing_changes_nothing_outside_the_buffer() -> None:
    around = torch.full((64,), 0xA5, dtype=torch.uint8)
    filler(torch.zeros(4), "float32")(around[16:32])
    assert around.tolist() == [0xA5] * 16 + [0] * 16 + [0xA5] * 32
