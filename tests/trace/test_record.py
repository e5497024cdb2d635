"""What loaders do is recorded exactly, nothing is written, and what cannot be recorded is refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rankcast.errors import InstallError, ManifestError, UnsupportedError
from rankcast.manifest import Manifest, TensorMeta
from rankcast.trace.columns import Cast, Trace
from rankcast.trace.dtypes import torch_dtype
from rankcast.trace.record import trace_loader

Weights = Iterable[tuple[str, Tensor]]


def manifest(**tensors: tuple[int, ...]) -> Manifest:
    """float32 tensors by name and shape."""
    return Manifest.of(TensorMeta(name, "float32", shape) for name, shape in tensors.items())


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def odd(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter's memory with NaNs of several payloads, infinities and negative zeros in it."""
    words = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x7F800000, 1], dtype=torch.int64).to(torch.int32)
    raw = words.repeat(1 + torch.Size(shape).numel() // 5)[: torch.Size(shape).numel()]
    return raw.view(torch.float32).reshape(shape).clone().to(dtype)


def each(**actions: Callable[[Tensor], object]) -> Callable[[Weights], None]:
    """A loader that does one thing for each name."""

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            actions[name](tensor)

    return load


def replay(trace: Trace, given_: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the record says the parameters hold afterwards, from -1 everywhere; only for traces without computing."""
    results = {}
    for row, layout in zip(trace.destinations.rows(), trace.layouts, strict=True):
        storage = torch.full((max(1, torch.Size(row.shape).numel()),), -1, dtype=torch_dtype(row.dtype))
        results[row.name] = storage.as_strided(row.shape, layout)
    copies, fills = trace.copies, trace.fills
    steps: list[tuple[int, Callable[[], object]]] = []
    for i in range(len(copies)):
        assert copies.throughs[i] == ""
        source = given_[trace.manifest.names[copies.sources[i][0]]].contiguous()
        there = results[trace.destinations.names[copies.destinations[i]]]
        into = there.as_strided(copies.sizes[i], copies.strides[i], copies.offsets[i])
        out = source.as_strided(copies.sizes[i], copies.source_strides[i], copies.source_offsets[i])
        steps.append((copies.steps[i], lambda into=into, out=out: into.copy_(out)))
    for i in range(len(fills)):
        there = results[trace.destinations.names[fills.destinations[i]]]
        into = there.as_strided(fills.sizes[i], fills.strides[i], fills.offsets[i])
        steps.append((fills.steps[i], lambda into=into, value=fills.values[i]: into.fill_(float(value))))
    for _, act in sorted(steps, key=lambda step: step[0]):
        act()
    return results


def check_replay(
    build: Callable[[Mapping[str, Tensor]], Callable[[Weights], object]],
    shapes: Mapping[str, tuple[int, ...]],
    given_shapes: Mapping[str, tuple[int, ...]],
) -> Trace:
    """Trace a loader, prove that nothing was written, run it for real, and compare with the replayed record."""
    parameters = {name: nn.Parameter(odd(*shape), requires_grad=False) for name, shape in shapes.items()}
    before = {name: bits(tensor) for name, tensor in parameters.items()}
    trace = trace_loader(build(parameters), parameters, manifest(**given_shapes))
    assert {name: bits(tensor) for name, tensor in parameters.items()} == before
    again = msgspec.json.decode(msgspec.json.encode(trace), type=Trace)
    assert again == trace
    assert again.hash == trace.hash
    values, start = {}, 0.0
    for name, shape in given_shapes.items():
        count = torch.Size(shape).numel()
        values[name] = torch.arange(start, start + count).reshape(shape)
        start += count
    for tensor in parameters.values():
        tensor.fill_(-1)
    build(parameters)(iter(values.items()))
    for name, tensor in replay(trace, values).items():
        assert bits(tensor) == bits(parameters[name]), name
    return trace


def test_a_fused_sharded_loader_is_recorded_box_for_box() -> None:
    def build(p: Mapping[str, Tensor]) -> Callable[[Weights], object]:
        qkv, down = p["qkv"], p["down"]
        return each(
            q=lambda t: qkv.data.narrow(0, 0, 4).copy_(t.narrow(0, 4, 4)),
            k=lambda t: qkv.data[4:6].copy_(t.chunk(2)[1]),
            v=lambda t: qkv.data.split([4, 2, 2])[2].copy_(t.split(2)[1]),
            o=lambda t: down.data.copy_(t.select(0, 1).t()),
            unused=lambda t: t[:1],
        )

    given_ = {"q": (8, 6), "unused": (3,), "k": (4, 6), "v": (4, 6), "o": (2, 6, 8)}
    trace = check_replay(build, {"qkv": (8, 6), "down": (8, 6)}, given_)
    assert trace.touched() == (0, 2, 3, 4)
    assert trace.ignored() == (1,)
    assert trace.missing() == trace.overlaps() == trace.casts() == []


def test_stacks_of_experts_with_gate_and_up_halves_are_recorded() -> None:
    def build(p: Mapping[str, Tensor]) -> Callable[[Weights], None]:
        w13, w2 = p["w13"], p["w2"]

        def load(weights: Weights) -> None:
            for name, tensor in weights:
                _, expert, kind = name.split("_")
                local = int(expert) - 2
                if not 0 <= local < 3:
                    continue
                if kind == "down":
                    w2.data[local] = tensor[:, 4:8]
                else:
                    half = 0 if kind == "gate" else 4
                    shard = tensor.unflatten(0, (2, 4))[1]
                    w13.data[local].narrow(0, half, 4).copy_(shard)

        return load

    given_ = {}
    for expert in range(6):
        given_ |= {f"e_{expert}_gate": (8, 5), f"e_{expert}_up": (8, 5), f"e_{expert}_down": (5, 8)}
    trace = check_replay(build, {"w13": (3, 8, 5), "w2": (3, 5, 4)}, given_)
    assert trace.touched() == tuple(range(6, 15))
    assert trace.missing() == []
    assert trace.overlaps() == []
    assert len(trace.copies) == 9


def test_views_of_one_index_and_of_repeated_ones_are_recorded() -> None:
    def build(p: Mapping[str, Tensor]) -> Callable[[Weights], object]:
        return each(
            a=lambda t: p["a"].data.copy_(t.unsqueeze(0)),
            b=lambda t: p["b"].data.copy_(t.expand(3, 1, 4)),
            c=lambda t: p["c"].data.copy_(t),
            d=lambda t: p["d"].data.unsqueeze(0).copy_(t),
            e=lambda t: p["e"].data.view(2, 3).copy_(t.permute(1, 0)),
            f=lambda t: p["f"].data[1].copy_(t),
            g=lambda t: p["g"].data.copy_(t),
        )

    shapes = {"a": (1, 4), "b": (3, 1, 4), "c": (1, 1, 4), "d": (4,), "e": (6,), "f": (2,), "g": (0, 3)}
    given_ = {"a": (4,), "b": (1, 1, 4), "c": (4,), "d": (4,), "e": (3, 2), "f": (), "g": (0, 3)}
    trace = check_replay(build, shapes, given_)
    assert [line.split(" ")[0] for line in trace.missing()] == ["f"]


def test_a_parameter_whose_storage_is_transposed_is_recorded_and_covered_in_its_own_dimensions() -> None:
    weight = nn.Parameter(odd(6, 4).t(), requires_grad=False)
    assert not weight.is_contiguous()
    trace = trace_loader(each(w=lambda t: weight.data[:, :5].copy_(t)), {"weight": weight}, manifest(w=(4, 5)))
    (line,) = trace.missing()
    assert "weight float32[4, 6]: 4 of 24 elements" in line
    assert "[0:4, 5:6]" in line
    assert torch.equal(replay(trace, {"w": torch.ones(4, 5)})["weight"][:, :5], torch.ones(4, 5))


def test_a_missing_shard_names_the_parameter_and_the_rows() -> None:
    qkv = torch.zeros(12, 6)
    load = each(q=lambda t: qkv[:6].copy_(t), v=lambda t: qkv[9:].copy_(t))
    trace = trace_loader(load, {"layers.0.qkv_proj.weight": qkv}, manifest(q=(6, 6), v=(3, 6)))
    (line,) = trace.missing()
    assert line.startswith("layers.0.qkv_proj.weight float32[12, 6]: 18 of 72 elements")
    assert "[6:9, 0:6]" in line
    assert trace.missing(required=["other"]) == []
    assert trace.missing(required=["layers.0.qkv_proj.weight"]) == [line]


def test_an_interleaved_parameter_is_covered_by_its_even_and_odd_rows() -> None:
    weight = torch.zeros(8, 6)
    load = each(gate=lambda t: weight[::2].copy_(t), up=lambda t: weight[1::2].copy_(t))
    whole = trace_loader(load, {"w": weight}, manifest(gate=(4, 6), up=(4, 6)))
    assert whole.missing() == whole.overlaps() == []
    half = trace_loader(load, {"w": weight}, manifest(gate=(4, 6)))
    assert "24 of 48 elements" in half.missing()[0]
    assert "[1:2, 0:6]" in half.missing()[0]
    both = each(gate=lambda t: weight[::2].copy_(t), up=lambda t: weight[2:6].copy_(t))
    twice = trace_loader(both, {"w": weight}, manifest(gate=(4, 6), up=(4, 6)))
    assert "[2:3, 0:6] is copied to twice, from gate and from up" in twice.overlaps()[0]


def test_padding_rows_count_as_covered_with_their_value() -> None:
    def load(weights: Weights) -> None:
        for _, tensor in weights:
            table[:10].copy_(tensor)
            table[10:12].zero_()
            table[12:14].fill_(0.5)
            table[14:].data.copy_(torch.tensor(float("nan")))
            scale[:] = 2

    table, scale = odd(16, 3), odd(2)
    before = bits(table), bits(scale)
    trace = trace_loader(load, {"table": table, "scale": scale}, manifest(w=(10, 3)))
    assert (bits(table), bits(scale)) == before
    assert trace.missing() == trace.overlaps() == []
    assert [float(value) for value in trace.fills.values[:2]] == [0.0, 0.5]
    assert trace.fills.values[2] == "nan"
    assert float(trace.fills.values[3]) == 2.0
    assert msgspec.json.decode(msgspec.json.encode(trace), type=Trace) == trace


def test_clearing_a_parameter_before_parts_are_copied_does_not_hide_what_no_part_reached() -> None:
    def load(weights: Weights) -> None:
        weight.zero_()
        for name, tensor in weights:
            weight[{"q": slice(0, 4), "v": slice(6, 8)}[name]].copy_(tensor)

    weight = torch.ones(8, 2)
    trace = trace_loader(load, {"w": weight}, manifest(q=(4, 2), v=(2, 2)))
    assert "[4:6, 0:2]" in trace.missing()[0]
    assert trace.overlaps() == []


def test_a_tensor_copied_over_another_or_cleared_again_is_an_overlap_that_names_both() -> None:
    weight = torch.zeros(6, 2)

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            weight[: len(tensor)].copy_(tensor) if name == "a" else weight[3:].copy_(tensor)
        weight[5:].zero_()

    trace = trace_loader(load, {"w": weight}, manifest(a=(4, 2), b=(3, 2)))
    first, second = trace.overlaps()
    assert "[3:4, 0:2] is copied to twice, from a and from b" in first
    assert "[5:6, 0:2] is filled with 0 after b came there" in second


def test_tied_parameters_are_one_destination_under_the_first_name() -> None:
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    separate = nn.Parameter(embedding.weight.data)  # another object, the same storage
    destinations = {"embed": embedding.weight, "head": head.weight, "again": separate}
    trace = trace_loader(each(e=lambda t: separate.data.copy_(t)), destinations, manifest(e=(6, 4)))
    assert trace.destinations.names == ("embed",)
    assert trace.aliases == (("head", "embed"), ("again", "embed"))
    assert trace.missing() == trace.missing(["head"]) == []
    empty = trace_loader(each(), destinations, Manifest((), (), ()))
    assert len(empty.missing()) == len(empty.missing(["head"])) == 1


def test_parameters_that_are_parts_of_one_storage_are_told_apart() -> None:
    flat = odd(20)
    parts = {"a": flat[2:10].view(2, 4), "b": flat[10:16].view(3, 2)}
    load = each(x=lambda t: parts["a"].copy_(t), y=lambda t: flat[10:16].copy_(t))
    trace = trace_loader(load, parts, manifest(x=(2, 4), y=(6,)))
    assert trace.destinations.names == ("a", "b")
    assert trace.copies.offsets == (0, 0)
    assert trace.missing() == []
    beyond = each(x=lambda t: flat[:8].copy_(t), y=lambda t: None)
    with pytest.raises(UnsupportedError, match="beyond a"):
        trace_loader(beyond, parts, manifest(x=(8,), y=(6,)))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": slice(0, 6), "b": slice(4, 8)}, "a, which shares part of its storage with b"),
        ({"b": slice(4, 8), "c": slice(10, 11), "a": slice(0, 20)}, "a, which shares part of its storage with"),
        ({"b": slice(0, 20), "c": slice(1, 3), "a": slice(4, 6)}, "a, which shares part of its storage with b"),
        ({"a": slice(0, 20, 2)}, r"a, which has shape \[10\] but strides \[2\]"),
    ],
)
def test_a_write_to_a_parameter_that_shares_part_of_its_storage_or_has_holes_is_refused(
    places: dict[str, slice], message: str
) -> None:
    flat, free = torch.zeros(20), odd(3)
    destinations = {name: flat[place] for name, place in places.items()} | {"free": free}
    untouched = trace_loader(each(w=lambda t: free.copy_(t)), destinations, manifest(w=(3,)))
    assert untouched.missing(["free"]) == untouched.overlaps() == []
    shape = tuple(destinations["a"].shape)
    with pytest.raises(UnsupportedError, match=f"writes to {message}"):
        trace_loader(each(w=lambda t: destinations["a"].copy_(t)), destinations, manifest(w=shape))
    assert not flat.any()


@pytest.mark.parametrize(
    ("compute", "operator"),
    [
        (lambda a, b: a + b, "add"),
        (lambda a, b: torch.cat([a, b])[:4], "cat"),
        (lambda a, b: torch.stack([a, b]).sum(0), "stack"),
        (lambda a, b: b.half() * a.t().contiguous().t(), "_to_copy"),
        (lambda a, b: torch.where(a > 0, a, b), "gt"),
    ],
)
def test_a_copy_of_something_computed_is_put_down_to_all_its_ingredients(
    compute: Callable[[Tensor, Tensor], Tensor], operator: str
) -> None:
    weight, bias = odd(4, 4), odd(4)

    def load(weights: Weights) -> None:
        given_ = dict(weights)
        weight.copy_(compute(given_["a"], given_["b"]))
        bias.copy_(given_["c"])

    trace = trace_loader(load, {"weight": weight, "bias": bias}, manifest(x=(1,), b=(4, 4), a=(4, 4), c=(4,)))
    assert trace.copies.sources == ((1, 2), (3,))
    assert trace.copies.throughs[0] in (operator, "clone")
    assert trace.copies.throughs[1] == ""
    assert trace.touched() == (1, 2, 3)
    assert trace.ignored() == (0,)
    assert trace.missing() == []


def through(action: Callable[[Tensor, Tensor], object], source: str = "float32") -> tuple[str, tuple[int, ...]]:
    weight = odd(4, 6)
    before = bits(weight)
    given_ = Manifest.of([TensorMeta("w", source, (4, 6))])
    trace = trace_loader(each(w=lambda t: action(weight, t)), {"weight": weight}, given_)
    assert bits(weight) == before
    assert trace.missing() == []
    return trace.copies.throughs[0], trace.copies.sources[0]


def test_what_a_loader_assembles_in_memory_of_its_own_is_followed() -> None:
    def padded(weight: Tensor, given_: Tensor) -> None:
        own = torch.zeros(4, 6)
        own[:2].copy_(given_[:2])
        own[2:].copy_(given_[2:])
        weight.copy_(own)

    assert through(padded) == ("copy_", (0,))
    assert through(lambda w, t: w.copy_(t.new_zeros(4, 6).copy_(t))) == ("copy_", (0,))
    assert through(lambda w, t: w.copy_(torch.empty_like(w).copy_(t))) == ("copy_", (0,))
    assert through(lambda w, t: w.copy_(t.to("cpu", torch.float64))) == ("_to_copy", (0,))
    assert through(lambda w, t: w.copy_(t * torch.ones(4, 6))) == ("mul", (0,))
    assert through(lambda w, t: w.copy_(torch.nn.functional.pad(t[:, :5], (0, 1)))) == ("constant_pad_nd", (0,))
    assert through(lambda w, t: w.copy_(t.mul_(2))) == ("mul_", (0,))
    assert through(lambda w, t: w.copy_(t[:, torch.arange(6)])) == ("index", (0,))
    assert through(lambda w, t: w.copy_(torch.add(t, 1, out=torch.empty_like(t)))) == ("add", (0,))


def test_a_move_to_the_parameters_device_is_still_a_plain_copy() -> None:
    weight = odd(4, 6)
    load = each(w=lambda t: weight.copy_(t[2:].to(weight.device).t().cpu().t().to(weight)))
    trace = trace_loader(load, {"weight": weight}, manifest(w=(6, 6)))
    assert trace.copies.throughs == ("",)
    assert trace.copies.source_offsets == (12,)
    assert trace.copies.source_strides == ((6, 1),)
    # A move of part of the columns also makes them dense, which a loader may build on.
    assert through(lambda w, t: w.copy_(t.t()[:, :4].t()[:, :6].cpu())) == ("", (0,))
    load = each(w=lambda t: weight.copy_(t[:, :6].cpu().view(24).view(4, 6)))
    assert trace_loader(load, {"weight": weight}, manifest(w=(4, 7))).copies.throughs == ("_to_copy",)


def test_a_reinterpreted_tensor_is_no_plain_copy() -> None:
    assert through(lambda w, t: w.copy_(t.view(torch.float32)), "int32") == ("view", (0,))
    assert through(lambda w, t: w.view(torch.int32).copy_(t), "int32") == ("view", (0,))


def test_a_copy_whose_source_was_lost_is_put_down_to_the_tensor_given_last() -> None:
    weight = torch.zeros(3)
    load = each(a=lambda t: None, b=lambda t: weight.copy_(torch.tensor([1.0, 2.0, 3.0])))
    trace = trace_loader(load, {"w": weight}, manifest(a=(3,), b=(3,)))
    assert trace.copies.sources == ((1,),)
    assert trace.copies.throughs == ("untraced",)
    assert trace.ignored() == (0,)


def test_what_is_put_together_part_by_part_comes_from_all_of_its_parts() -> None:
    weight = torch.zeros(4, 6)
    whole = torch.empty(0)

    def first(tensor: Tensor) -> None:
        nonlocal whole
        whole = torch.empty(4, 6)
        whole[:2].copy_(tensor)

    def second(tensor: Tensor) -> None:
        whole[2:].copy_(tensor)
        weight.copy_(whole)

    trace = trace_loader(each(a=first, b=second), {"w": weight}, manifest(a=(2, 6), b=(2, 6)))
    assert trace.copies.sources == ((0, 1),)
    assert trace.copies.throughs == ("copy_",)


def test_memory_that_is_used_again_does_not_inherit_from_what_lay_there() -> None:
    weight = torch.zeros(4, 6)

    def assemble(tensor: Tensor) -> None:
        for _ in range(20):
            torch.zeros(4, 6).copy_(tensor)

    def constant(tensor: Tensor) -> None:
        for _ in range(20):
            weight.copy_(torch.rand(4, 6))

    trace = trace_loader(each(a=assemble, b=constant), {"w": weight}, manifest(a=(4, 6), b=(4, 6)))
    assert set(trace.copies.sources) == {(1,)}
    assert set(trace.copies.throughs) == {"untraced"}


def test_casts_are_listed_with_both_dtypes() -> None:
    weight, other = odd(2, dtype=torch.bfloat16), odd(2)
    rows = [TensorMeta("a", "float32", (2,)), TensorMeta("b", "float16", (2,)), TensorMeta("c", "float32", (2,))]
    load = each(a=lambda t: weight.copy_(t), b=lambda t: other.copy_(t.float()), c=lambda t: other.copy_(t))
    trace = trace_loader(load, {"weight": weight, "other": other}, Manifest.of(rows))
    assert trace.casts() == [Cast("a", "float32", "bfloat16", "weight"), Cast("b", "float16", "float32", "other")]
    assert trace.copies.source_dtypes == ("float32", "float32", "float32")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda w, t: w.add_(1), "weight with aten::add_"),
        (lambda w, t: w.mul_(t), "weight with aten::mul_"),
        (lambda w, t: w.index_copy_(0, torch.arange(4), t), "weight with aten::index_copy_"),
        (lambda w, t: w.__setitem__(torch.tensor([0]), t[:1]), "weight with aten::index_put_"),
        (lambda w, t: torch._foreach_copy_([w], [t]), "weight with aten::_foreach_copy_"),
        (lambda w, t: torch.add(t, 1, out=w), "weight with aten::add"),
        (lambda w, t: w.normal_(), "weight with aten::normal_"),
        (lambda w, t: w.resize_(2, 2), "weight with aten::resize_"),
        (lambda w, t: w.set_(torch.zeros(4, 6)), "weight with aten::set_"),
        (lambda w, t: w.copy_(t[:1]), r"copies w as \[1, 6\] over \[4, 6\] elements of weight: .* broadcasts"),
        (lambda w, t: w.fill_(t[0, 0]), "broadcasts"),
        (lambda w, t: w.copy_(w + 1), "writes weight with what it read from a parameter"),
        (lambda w, t: w.copy_(t * w), "writes weight with what it read from a parameter"),
        (lambda w, t: w.copy_(w.clone()), "read from a parameter"),
        (lambda w, t: w[0].expand(4, 6).copy_(t), "weight more than once"),
        (lambda w, t: w.as_strided((4, 6), (4, 1)).copy_(t), "weight more than once"),
        (lambda w, t: w.view(torch.uint8).copy_(t.view(torch.uint8)), "weight as uint8, but it is float32"),
        (lambda w, t: w.copy_(t) if t.sum() > 0 else None, "looks at the values of w"),
        (lambda w, t: w.copy_(t) if t[0, 0].item() else None, "looks at the values of w"),
        (lambda w, t: OUTSIDE.copy_(t), "neither its own nor a destination"),
        (lambda w, t: OUTSIDE.add_(1), "neither its own nor a destination"),
    ],
)
@pytest.mark.parametrize("caught", [False, True])
def test_what_cannot_be_recorded_is_refused_by_name_and_not_done(
    action: Callable[[Tensor, Tensor], object], message: str, caught: bool
) -> None:
    weight = odd(4, 6)
    before, outside = bits(weight), bits(OUTSIDE)

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            with contextlib.suppress(Exception) if caught else contextlib.nullcontext():
                action(weight, tensor)

    with pytest.raises(UnsupportedError, match=message) as refused:
        trace_loader(load, {"weight": weight}, manifest(w=(4, 6)))
    assert refused.value.tensor in ("weight", "w")
    assert (bits(weight), bits(OUTSIDE)) == (before, outside)
    assert weight.shape == (4, 6)


OUTSIDE = odd(4, 6)


def test_a_loader_that_exchanges_a_parameters_data_is_refused_and_the_parameter_put_back() -> None:
    weight = nn.Parameter(odd(4, 6))
    before, address = bits(weight), weight.data_ptr()
    with pytest.raises(UnsupportedError, match="gave weight another storage"):
        trace_loader(each(w=lambda t: setattr(weight, "data", torch.zeros(2))), {"weight": weight}, manifest(w=(4, 6)))
    assert (bits(weight), weight.data_ptr(), weight.shape) == (before, address, (4, 6))


def test_a_parameter_that_wants_gradients_is_traced_and_keeps_wanting_them() -> None:
    layer = nn.Linear(4, 3)
    load = each(weight=lambda t: layer.weight.copy_(t), bias=lambda t: layer.bias.data.copy_(t))
    trace = trace_loader(load, dict(layer.named_parameters()), manifest(weight=(3, 4), bias=(3,)))
    assert trace.missing() == []
    assert layer.weight.requires_grad
    assert layer.weight.grad_fn is None


def test_the_loaders_own_failure_names_the_tensor_it_was_given() -> None:
    weight = torch.zeros(2, 2)
    actions = {"a": lambda t: weight.copy_(t)}
    for given_, kind in (
        ({"a": (2, 2), "b": (1,)}, "KeyError"),
        ({"a": (2, 3)}, r"wrong shape: \[2, 3\]"),
        ({"a": (4, 1)}, r"\[2, 2\] elements of w"),
    ):
        with pytest.raises(ManifestError, match=kind) as failed:
            trace_loader(each(**actions), {"w": weight}, manifest(**given_))
        assert failed.value.tensor == list(given_)[-1]
        assert list(given_)[-1] in failed.value.message


def test_a_rankcast_error_of_the_loader_stays_what_it_is_and_is_given_the_tensors_name() -> None:
    def load(weights: Weights) -> None:
        for name, _ in weights:
            if name == "b":
                raise InstallError("no")

    with pytest.raises(InstallError) as failed:
        trace_loader(load, {}, manifest(a=(1,), b=(1,), c=(1,)))
    assert failed.value.tensor == "b"


@pytest.mark.parametrize("load", [lambda weights: None, lambda weights: next(iter(weights)), lambda weights: [1, 2, 3]])
def test_a_loader_that_does_not_take_every_tensor_is_an_error(load: Callable[[Weights], object]) -> None:
    with pytest.raises(ManifestError, match=r"took [01] of 2 tensors and never asked for [ab]"):
        trace_loader(load, {}, manifest(a=(1,), b=(1,)))


def test_a_tensor_that_torch_cannot_make_is_named() -> None:
    with pytest.raises(ManifestError, match=r"huge float32\[.* cannot be traced") as refused:
        trace_loader(each(), {}, manifest(huge=(2**40, 2**40)))
    assert refused.value.tensor == "huge"


def test_every_dtype_can_be_traced() -> None:
    from rankcast.trace.dtypes import TORCH_DTYPES

    parameters = {name: torch.zeros(2, 3, dtype=dtype) for name, dtype in TORCH_DTYPES.items()}
    load = each(**{name: (lambda t, p=p: p[:1].copy_(t[1:])) for name, p in parameters.items()})
    trace = trace_loader(load, parameters, Manifest.of(TensorMeta(name, name, (2, 3)) for name in parameters))
    assert trace.casts() == []
    assert set(trace.copies.throughs) == {""}
    assert len(trace.copies) == len(parameters)


def test_two_traces_of_one_loader_have_one_hash_and_of_another_loader_another() -> None:
    weight = torch.zeros(4, 4)
    one, two = (
        trace_loader(each(w=lambda t, a=a: weight.copy_(t.t() if a else t)), {"w": weight}, manifest(w=(4, 4)))
        for a in (False, True)
    )
    again = trace_loader(each(w=lambda t: weight.copy_(t)), {"w": weight}, manifest(w=(4, 4)))
    assert one.hash == again.hash != two.hash


@given(st.data())
def test_random_chains_of_views_replay_to_what_the_loader_really_does(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    chain: list[Callable[[Tensor], Tensor]] = []
    probe = torch.empty(shape)
    for _ in range(data.draw(st.integers(0, 5))):
        step = data.draw(views_of(probe))
        probe = step(probe)
        chain.append(step)
    room = tuple(size + data.draw(st.integers(0, 2)) for size in probe.shape)
    starts = [data.draw(st.integers(0, big - size)) for big, size in zip(room, probe.shape, strict=True)]
    place = tuple(slice(s, s + n) for s, n in zip(starts, probe.shape, strict=True))

    def build(p: Mapping[str, Tensor]) -> Callable[[Weights], object]:
        def load(weights: Weights) -> None:
            for _, tensor in weights:
                for step in chain:
                    tensor = step(tensor)
                p["w"].data[place].copy_(tensor)

        return load

    trace = check_replay(build, {"w": room}, {"t": shape})
    left = torch.Size(room).numel() - probe.numel()
    assert bool(trace.missing()) == (left > 0)
    if left:
        assert f"{left:,} of " in trace.missing()[0]


@st.composite
def views_of(draw: st.DrawFn, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else None
    kind = draw(st.sampled_from(["narrow", "select", "transpose", "unsqueeze", "chunk", "step", "flip back"]))
    if dim is None or kind == "unsqueeze":
        at = draw(st.integers(0, tensor.dim()))
        return lambda t: t.unsqueeze(at)
    size = tensor.shape[dim]
    if kind == "narrow" and size:
        start = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size - start))
        return lambda t: t.narrow(dim, start, length)
    if kind == "select" and size:
        index = draw(st.integers(0, size - 1))
        return lambda t: t.select(dim, index)
    if kind == "transpose":
        other = draw(st.integers(0, tensor.dim() - 1))
        return lambda t: t.transpose(dim, other)
    if kind == "chunk":
        return lambda t: t.chunk(2, dim)[-1]
    if kind == "step":
        return lambda t: t[(slice(None),) * dim + (slice(None, None, 2),)]
    return lambda t: t.view(t.shape).detach()
