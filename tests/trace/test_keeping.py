"""What a loader keeps instead of copying it is refused by name, and the model is as it was before the trace."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankcast
from rankcast import ManifestError, PushError, Receiver
from rankcast.manifest import Manifest, TensorMeta
from rankcast.rollout.installer import LoaderInstaller

Weights = Iterable[tuple[str, Tensor]]
MANIFEST = Manifest.of((TensorMeta("weight", "float32", (2, 3)), TensorMeta("scale", "float32", (2,))))
ELSEWHERE: list[Any] = []


class Scaled(nn.Module):
    """A weight, and a scale that is no parameter; ``take`` does something with the tensor for it."""

    def __init__(self, take: Callable[[Scaled, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.inner = nn.Identity()
        self.scale: Any = torch.full((2,), 7.0)
        self.by_name: dict[str, Any] = {"old": self.scale}
        self.in_order: list[Any] = [self.scale]
        self.nested: dict[str, Any] = {"list": [self.scale], "counted": OrderedDict(old=1)}
        self.take = take

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "weight":
                self.weight.data.copy_(tensor)
            else:
                self.take(self, tensor)


def attributes(model: Scaled) -> list[Any]:
    own = {key: value for module in model.modules() for key, value in vars(module).items() if key[0] != "_"}
    return [{**own, "by_name": dict(model.by_name), "in_order": list(model.in_order)}]


KEPT: dict[str, tuple[str, Callable[[Scaled, Tensor], object]]] = {
    "a tensor": ("scale", lambda model, tensor: setattr(model, "scale", tensor)),
    "a new attribute": ("fresh", lambda model, tensor: setattr(model, "fresh", tensor)),
    "a view in another module": ("inner.scale", lambda model, tensor: setattr(model.inner, "scale", tensor[:1])),
    "what was computed of it": ("scale", lambda model, tensor: setattr(model, "scale", tensor.abs().max())),
    "memory of its own": ("scale", lambda model, tensor: setattr(model, "scale", torch.empty(2).copy_(tensor))),
    "in a dict": ("by_name", lambda model, tensor: model.by_name.update(new=tensor)),
    "in a list": ("in_order", lambda model, tensor: model.in_order.append(tensor)),
    "in a list in a dict": ("nested", lambda model, tensor: model.nested["list"].append(tensor)),
    "in a subclass of dict": ("nested", lambda model, tensor: model.nested["counted"].update(new=tensor)),
    "in a list in a tuple": ("scale", lambda model, tensor: setattr(model, "scale", (1, [tensor]))),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_tensor_that_a_loader_keeps_in_a_module_is_refused_with_the_attributes_name_and_put_back(kind: str) -> None:
    attribute, take = KEPT[kind]
    model = Scaled(take)
    before = attributes(model)
    with pytest.raises(ManifestError, match=rf"keeps scale, .* as {attribute}, .*: register a buffer") as refusal:
        LoaderInstaller(model).trace(MANIFEST)
    assert refusal.value.tensor == "scale"
    for was, now in zip(before, attributes(model), strict=True):
        assert now == was
    assert (model.by_name, model.in_order) == ({"old": model.scale}, [model.scale])
    assert model.nested == {"list": [model.scale], "counted": OrderedDict(old=1)}


def test_a_tensor_that_is_copied_and_kept_as_well_is_refused() -> None:
    def load(weights: Weights) -> None:
        for name, tensor in weights:
            target = model.weight if name == "weight" else model.get_buffer("buffered")
            target.data.copy_(tensor)
            model.by_name[name] = tensor

    model = Scaled(lambda *_: None)
    model.register_buffer("buffered", torch.zeros(2))
    with pytest.raises(ManifestError, match=r"keeps weight, .* as by_name"):
        LoaderInstaller(model, load).trace(MANIFEST)
    assert list(model.by_name) == ["old"]


@pytest.mark.parametrize("computed", [False, True])
def test_a_tensor_that_is_kept_outside_of_the_model_and_copied_nowhere_is_refused(computed: bool) -> None:
    model = Scaled(lambda _, tensor: ELSEWHERE.append(tensor * 2 if computed else tensor))
    with pytest.raises(ManifestError, match=r"copies nothing of scale and keeps it .*may_ignore"):
        LoaderInstaller(model).trace(MANIFEST)
    ELSEWHERE.clear()
    assert LoaderInstaller(model, may_ignore=lambda name: name == "scale").trace(MANIFEST).ignored() == (1,)
    ELSEWHERE.clear()


def test_a_tensor_that_only_a_cycle_of_the_loaders_own_holds_is_not_kept() -> None:
    def forget(_: Scaled, tensor: Tensor) -> None:
        cycle: list[Any] = [tensor]
        cycle.append(cycle)

    gc.disable()
    try:
        trace = LoaderInstaller(Scaled(forget)).trace(MANIFEST)
    finally:
        gc.enable()
    assert trace.ignored() == (1,)


def test_what_a_loader_notes_of_a_tensor_other_than_its_elements_stays_where_it_is() -> None:
    def note(model: Scaled, tensor: Tensor) -> None:
        model.by_name["shape"] = tuple(tensor.shape)
        model.scale = torch.zeros_like(tensor, device="cpu")

    model = Scaled(note)
    assert LoaderInstaller(model).trace(MANIFEST).ignored() == (1,)
    assert model.by_name["shape"] == (2,)
    assert model.scale.tolist() == [0.0, 0.0]


def test_a_loader_that_fails_leaves_no_tensor_of_the_trace_in_a_module() -> None:
    def fail(model: Scaled, tensor: Tensor) -> None:
        model.scale = tensor
        raise KeyError("something else")

    model = Scaled(fail)
    with pytest.raises(ManifestError, match="something else"):
        LoaderInstaller(model).trace(MANIFEST)
    assert model.scale.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("mode", ["ranklocal", "direct", "auto"])
def test_connect_refuses_a_loader_that_sets_a_plain_attribute_and_the_engine_serves_on(mode: str) -> None:
    policy = nn.Module()
    policy.weight, policy.scale = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))
    model = Scaled(lambda model, tensor: setattr(model, "scale", tensor))
    receiver = Receiver(model)
    with pytest.raises(PushError, match=r"worker 0 .* keeps scale, .* as scale, .*register a buffer"):
        rankcast.connect(receiver, policy, mode=mode, timeout=20)
    assert receiver.servable
    assert model.scale.tolist() == [7.0, 7.0]
    assert model.weight.unique().tolist() == [0.0]
