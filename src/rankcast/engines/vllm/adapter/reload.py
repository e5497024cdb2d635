"""vLLM's layerwise reload, and how it is put right.

This module knows what vLLM does to weights when it loads them again, and the cures for what it gets wrong. It must not
know rankcast's protocol.

Cures (each was silent garbage with stock vLLM 0.32 on CPU):

* MoE experts are packed for the CPU kernel on first load only; a reload copies unpacked weights over packed storage.
  With ``moe_kernel`` unset the first-load path is taken again.
* A tied ``lm_head`` keeps a packed copy of its own that a reload does not renew: it is packed again at the end.
* Counters and buffered loads of a session that failed are left behind: they are dropped at every begin and abandon.
* Buffered loads keep references into memory that the trainer reuses: what a batch leaves incomplete is copied.
* A buffer that no tensor fills is given memory like everything else in its module, and whatever was in that memory
  replaced the live value: it starts with the live value now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rankcast.errors import InstallError
from rankcast.rollout.program import CopyProgram

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Module types of these releases that keep their parameters as they were loaded and derive nothing from them.
IN_PLACE = frozenset({"RMSNorm"})

MoeKernels = list[tuple[Any, Any]]


@contextlib.contextmanager
def on_meta(model: torch.nn.Module) -> Iterator[None]:
    """The model with its parameters as they are at load time, without storage; what was there is put back after.

    That may be live tensors or, in the middle of a reload, those that the reload waits for: its state is not touched.
    """
    from vllm.model_executor.model_loader.reload import layerwise, types

    shadows = []
    loaders: list[tuple[Any, Any]] = []
    try:
        for layer in list(model.modules()):
            info = layerwise.get_layerwise_info(layer)
            shadow = types.LayerReloadingInfo(info.restore_metadata, info.restore_device)
            shadow.kernel_tensors = layerwise.get_layer_params_buffers(layer)
            shadow.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            shadows.append((layer, shadow))
            layerwise.restore_layer_on_meta(layer, shadow)
            for tensor in layerwise.get_layer_tensors(layer).values():
                # A reload, under way or over, leaves its wrapper on the loader: outside of it that does nothing, and
                # within it that would count what is traced as loaded.
                if hasattr(tensor, "weight_loader"):
                    loaders.append((tensor, tensor.weight_loader))
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
        yield
    finally:
        for tensor, loader in loaders:
            tensor.weight_loader = loader
        for layer, shadow in shadows:
            layerwise._place_kernel_tensors(layer, shadow)


def begin_reload(model: torch.nn.Module, config: VllmConfig) -> MoeKernels:
    """Put the model in the state in which its loaders may run; returns what ``finish_reload`` needs."""
    from vllm.model_executor.model_loader.reload import layerwise

    if any(layerwise.get_layerwise_info(layer).can_load() for layer in model.modules()):
        # Somebody else's session was left half-way; its counters must not be added to ours.
        abandon_reload(model, config, [])
    kernels = _unset_moe_kernels(model)
    layerwise.initialize_layerwise_reload(model)
    return kernels


def load(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Run the model's loader over ``weights``; afterwards nothing refers to their memory any more."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import layerwise

    batch = list(weights)
    with torch.no_grad(), disable_mtp_completeness_check(), _keeping_buffers():
        model.load_weights(iter(batch))
    borrowed = {tensor.untyped_storage().data_ptr() for _, tensor in batch if tensor.numel()}
    for layer in model.modules():
        for _, bound in layerwise.get_layerwise_info(layer).loaded_weights:
            for name, value in bound.arguments.items():
                if (
                    isinstance(value, torch.Tensor)
                    and not value.is_meta
                    and value.untyped_storage().data_ptr() in borrowed
                ):
                    bound.arguments[name] = value.clone()


def by_loader(model: torch.nn.Module) -> dict[str, str]:
    """Destinations that only vLLM's loaders can fill, with the reason."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    found: dict[str, str] = {}
    for prefix, layer in model.named_modules():
        if is_deferred_attention_layer(layer):
            own = [name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
            found |= {_joined(prefix, name): "vLLM loads what attention keeps at the end, by itself" for name in own}
        for name in layer._non_persistent_buffers_set:
            found[_joined(prefix, name)] = "vLLM keeps a buffer that is not persistent unless its loader filled it"
    return found


def copy_by_module(model: torch.nn.Module, program: CopyProgram) -> None:
    """Run a copy program into a model whose reload has begun, one module at a time.

    Modules of the types in ``IN_PLACE`` are written where they live; every other one is given memory as at load time,
    filled, post-processed by vLLM and copied into its live storage, and its extra memory is freed before the next.
    Raises ``InstallError`` when the reload does not wait for a module that the program writes.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    with torch.no_grad(), _keeping_buffers():
        for prefix, layer in model.named_modules():
            info = layerwise.get_layerwise_info(layer)
            own = {name: _joined(prefix, name) for name in layerwise.get_layer_tensors(layer)}
            if not any(map(program.writes, own.values())):
                continue
            if not info.can_load():
                raise InstallError(f"vLLM's reload does not wait for {prefix}, which the copy program writes")
            in_place = type(layer).__name__ in IN_PLACE and getattr(layer, "quant_method", None) is None
            if in_place:
                layerwise._place_kernel_tensors(layer, info)
                program.run({full: getattr(layer, name) for name, full in own.items()})
                info.reset()
            else:
                # Views of this memory cannot be kept: vLLM's kernels may go on holding some of it, so that it must not
                # be the next module's as well, and to keep it for each would be a second copy of the model.
                layerwise.materialize_layer(layer, info)
                program.bind({full: getattr(layer, name) for name, full in own.items()}).run()
                info.loaded_weights.clear()
                layerwise._layerwise_process(layer, info)


def changed_buffers(model: torch.nn.Module) -> frozenset[str]:
    """Buffers that vLLM's post-processing gave another form, so that their live values are not what it begins with."""
    from vllm.model_executor.model_loader.reload import layerwise

    found = set()
    for prefix, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        live = layer._buffers if info.kernel_tensors is None else info.kernel_tensors[1]
        for name, loaded in info.restore_metadata[1].items():
            if not _same_form(loaded, live.get(name)):
                found.add(_joined(prefix, name))
    return frozenset(found)


@contextlib.contextmanager
def _keeping_buffers() -> Iterator[None]:
    """Within, a buffer to which vLLM gives memory starts with its live value, before anything is loaded into it."""
    from vllm.model_executor.model_loader.reload import layerwise

    original = layerwise.materialize_layer

    def materialize(layer: torch.nn.Module, info: Any) -> None:
        waiting = [name for name, buffer in layer._buffers.items() if buffer is not None and buffer.is_meta]
        original(layer, info)
        live = info.kernel_tensors[1] if info.kernel_tensors is not None else {}
        for name in waiting:
            if _same_form(layer._buffers[name], live.get(name)):
                layer._buffers[name].copy_(live[name])  # type: ignore[union-attr]  # it was not None above

    layerwise.materialize_layer = materialize
    try:
        yield
    finally:
        layerwise.materialize_layer = original


def _same_form(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and one.dtype == other.dtype


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def finish_reload(model: torch.nn.Module, config: VllmConfig, kernels: MoeKernels) -> None:
    """Post-process what is complete and put the live tensors back, with the new values."""
    from vllm.model_executor.model_loader.reload import layerwise

    with torch.no_grad(), _keeping_buffers():
        layerwise.finalize_layerwise_reload(model, config.model_config)
        _put_back_moe_kernels(kernels)
        _repack_heads(model)


def abandon_reload(model: torch.nn.Module, config: VllmConfig, kernels: MoeKernels) -> None:
    """End a reload that will not be finished: buffered loads and counters go, live tensors come back."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    with torch.no_grad():
        layerwise.finalize_layerwise_reload(model, config.model_config)
        _put_back_moe_kernels(kernels)
        _repack_heads(model)


def _unset_moe_kernels(model: torch.nn.Module) -> MoeKernels:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernels: MoeKernels = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if method is not None and isinstance(getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
            kernels.append((method, kernel))
            method.moe_kernel = None
    return kernels


def _put_back_moe_kernels(kernels: MoeKernels) -> None:
    for method, kernel in kernels:
        # A layer that was reloaded has made a kernel of its own.
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def _repack_heads(model: Any) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for layer in model.modules():
        if not isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
            continue
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
