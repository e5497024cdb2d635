"""What a worker really holds, for tests: a worker extension of vLLM that reads every weight back, packed ones too.

It knows where vLLM's CPU backend keeps weights; it must not know rankcast's protocol. A linear layer's parameter is
empty on CPU and its data lives in a closure: an identity matrix through that closure gives the weight back exactly, but
for the sign of a zero. Experts are kept packed in their parameters, and packing the same weights gives the same bytes.
Tensors that a module derives after loading (latent attention) are plain attributes of it and are read as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_engine import generation_patches

if TYPE_CHECKING:
    from rankcast.engines.vllm.engine import RankcastEngine

# Every process that has this extension has the patches that the test asked for by environment, and no others.
generation_patches.apply()


class Readback:
    """Methods that vLLM adds to its worker, reached by ``collective_rpc``."""

    model_runner: Any
    weight_transfer_engine: RankcastEngine | None
    _weight_update_active: bool

    def read_digests(self) -> dict[str, str]:
        """A digest for every tensor of the model: parameters, buffers, derived and packed ones."""
        with torch.no_grad():
            return {name: _digest(tensor) for name, tensor in _tensors(self.model_runner.model)}

    def read_flags(self) -> dict[str, Any]:
        """The state that must be alike on all ranks behind one executor."""
        from vllm.model_executor.model_loader.reload import layerwise

        model = self.model_runner.model
        assert self.weight_transfer_engine is not None
        receiver = getattr(self.weight_transfer_engine, "receiver", None)
        infos = [layerwise.get_layerwise_info(layer) for layer in model.modules()]
        return {
            "active": self._weight_update_active,
            "state": getattr(receiver, "state", None),
            "servable": getattr(receiver, "servable", None),
            "version": getattr(receiver, "weight_version", None),
            "on_meta": sum(parameter.is_meta for parameter in model.parameters()),
            "half_loaded": sum(bool(info.loaded_weights) or info.can_load() for info in infos),
            "kernels_absent": sum(
                getattr(getattr(layer, "quant_method", None), "moe_kernel", self) is None for layer in model.modules()
            ),
        }


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and name != "kv_cache":
                yield f"{prefix}.{name} (derived)", value
    # By every name of a module, as its parameters: which layers are packed depends on the machine.
    for prefix, module in model.named_modules(remove_duplicate=False):
        if "cpu_linear" in vars(module):
            yield f"{prefix}.weight (packed)", _unpacked(module)


def _unpacked(module: Any) -> torch.Tensor:
    width = getattr(module, "input_size_per_partition", None) or getattr(module, "embedding_dim", None)
    if width is None:
        width = module.input_size
    identity = torch.eye(width, dtype=module.weight.dtype)
    read: torch.Tensor = module.cpu_linear(identity, module.weight, None)
    return read.t().contiguous()


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    hashed.update(memoryview(whole.numpy()))
    return hashed.hexdigest()[:32]
