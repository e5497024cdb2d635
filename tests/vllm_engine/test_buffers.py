"""Buffers under vLLM's own reload: what no tensor fills keeps its value, and what cannot keep it is refused by name.

Toy modules, large enough that memory used before is used again: with the few numbers of a real model's buffers (the
family "buffered" of ``test_in_process``) chance can hide what happens here for certain.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace as Given
from typing import Any

import pytest
import torch

import rankcast
from rankcast.engines.vllm.installer import LayerwiseInstaller
from rankcast.trace.fingerprint import Fingerprint

pytestmark = pytest.mark.vllm

WIDTH = 300_000


class Alone(LayerwiseInstaller):
    """The installer without vLLM's groups of workers, of which there are none here: only a fingerprint asks them."""

    def fingerprint(self) -> Fingerprint:
        return Fingerprint("Model")


class Activation(torch.nn.Module):
    """A parameter that is pushed, and a buffer of its state that is not, with another that is not part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.register_buffer("beta", torch.full((WIDTH,), 0.5))
        self.register_buffer("gamma", torch.full((WIDTH,), 0.25), persistent=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = Activation()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        targets = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in weights:
            getattr(targets[name], "weight_loader", default_weight_loader)(targets[name], tensor)


class Method:
    """Post-processing that derives something from both buffers, as it finds them."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.derived = (layer.alpha + layer.beta + layer.gamma).detach().clone()


def loaded(model: Model) -> rankcast.Receiver:
    """A receiver that installs into ``model`` by vLLM's reload."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import layerwise

    made: Any = type("Made", (Method, QuantizeMethodBase), {"create_weights": None, "apply": None})
    model.act.quant_method = made()
    layerwise.record_metadata_for_reloading(model)
    model.act.quant_method.process_weights_after_loading(model.act)
    parallel = Given(enable_eplb=False, distributed_executor_backend=None, data_parallel_size=1)
    kind = Given(quantization=None, dtype=torch.float32, hf_config=Given())
    config: Any = Given(parallel_config=parallel, lora_config=None, speculative_config=None, model_config=kind)
    return rankcast.Receiver(model, installer=Alone(model, config))


def source(value: float) -> torch.nn.Module:
    policy = torch.nn.Module()
    policy.act = torch.nn.Module()
    policy.act.alpha = torch.nn.Parameter(torch.full((WIDTH,), value))
    return policy


@pytest.mark.parametrize("mode", ["direct", "ranklocal"])
def test_a_buffer_that_no_tensor_fills_keeps_its_value(mode: str) -> None:
    model = Model()
    receiver = loaded(model)
    for value in (3.0, 4.0):
        used = [torch.full((WIDTH,), 777.0) for _ in range(8)]
        del used
        with rankcast.connect(receiver, source(value), mode=mode) as sync:
            sync.push(weight_version=str(value))
        assert model.act.alpha.unique().tolist() == [value]
        assert model.act.beta.unique().tolist() == [0.5]
        assert model.act.gamma.unique().tolist() == [0.25]
        assert model.act.derived.unique().tolist() == [value + 0.75]
    assert "gamma" not in model.state_dict()


def test_a_buffer_that_vllm_has_changed_and_no_tensor_fills_is_refused_by_name() -> None:
    model = Model()
    receiver = loaded(model)
    model.act.beta = model.act.beta[:7].clone()
    with pytest.raises(rankcast.RankcastError, match=r"act\.beta"):
        rankcast.connect(receiver, source(3.0), mode="ranklocal")
    assert model.act.alpha.unique().tolist() == [0.0]
    assert receiver.servable
