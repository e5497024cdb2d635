"""Under which checkpoint name each parameter and buffer of a module goes.

This module knows wrappers that put segments of their own into names, and ties. It must not know dtypes, values or what
is done with a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rankcast.errors import UnsupportedError

#: Segments that only their wrapper makes: nobody calls a layer of a model so.
_MARKS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: Wrappers whose child is called ``module`` and whose own buffers are bookkeeping.
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "AveragedModel"})
#: Classes in which a child's name is data, chosen by whoever filled them.
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
_UNMERGED = ("base_layer", "lora_A", "lora_embedding_A")

Named = tuple[str, str, torch.Tensor]


def checkpoint_tensors(module: nn.Module) -> Iterator[Named]:
    """(checkpoint name, full path, tensor) of parameters and persistent buffers, in the module's own order.

    A tensor that is reached twice comes once, under its first name. Raises ``UnsupportedError`` for adapters that are
    not merged and for flattened parameters.
    """
    found: list[Named] = []
    _walk(module, "", "", set(), set(), found)
    return iter(found)


def _walk(module: nn.Module, name: str, path: str, modules: set[int], tensors: set[int], found: list[Named]) -> None:
    # Walked at every push, over thousands of modules: so a list, and modules' own dicts instead of their iterators.
    if id(module) in modules:
        return
    modules.add(id(module))
    _refuse(module, path)
    for own, tensor in _own_tensors(module):
        if id(tensor) not in tensors:
            tensors.add(id(tensor))
            found.append((_joined(name, own), _joined(path, own), tensor))
    if _replaces_itself(module):
        trained = module.get_submodule("modules_to_save.default")
        _walk(trained, name, _joined(path, "modules_to_save.default"), modules, tensors, found)
        return
    for own, child in module._modules.items():
        if child is None:
            continue
        steps = own
        if own == "base_model" and _holds_only(module, "base_model") and _holds_only(child, "model"):
            steps, child = "base_model.model", child.get_submodule("model")
        below = name if steps != own or _is_wrapper(module, own) else _joined(name, own)
        _walk(child, below, _joined(path, steps), modules, tensors, found)


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
    if module._buffers and not _known_wrapper(module):
        passing = module._non_persistent_buffers_set
        return own + [(name, b) for name, b in module._buffers.items() if b is not None and name not in passing]
    return own  # type: ignore[return-value]  # parameters are tensors


def _is_wrapper(parent: nn.Module, child: str) -> bool:
    """Whether ``parent`` only wraps its child, so that the child's segment is no part of checkpoint names.

    ``module`` is also what models call layers of their own: it is a wrapper's segment when the parent's class is a
    known wrapper's, or when the parent holds nothing but that child. (The same goes for both steps of
    ``base_model.model``.)
    """
    return child in _MARKS or (child == "module" and (_known_wrapper(parent) or _holds_only(parent, "module")))


def _known_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ in _WRAPPERS and "module" in module._modules


def _holds_only(module: nn.Module, child: str) -> bool:
    return (
        not isinstance(module, _CONTAINERS)
        and [own for own, _ in module.named_children()] == [child]
        and next(module.named_parameters(recurse=False), None) is None
        and next(module.named_buffers(recurse=False), None) is None
    )


def _replaces_itself(module: nn.Module) -> bool:
    """A module of which an adapter library trains a copy: the copy counts, the original is stale."""
    copies = module._modules.get("modules_to_save")
    return "original_module" in module._modules and copies is not None and "default" in copies._modules


def _refuse(module: nn.Module, path: str) -> None:
    where = path or type(module).__name__
    adapter = next((own for own in _UNMERGED if own in module._modules), None) if module._modules else None
    if adapter is not None and type(module).__module__.split(".")[0] == "peft":
        raise UnsupportedError(
            f"{where} has an adapter ({adapter}) beside its weight, and pushing the weight alone would leave the "
            "training out: push a merged copy (merge_and_unload()), or yield merged tensors from a function"
        )
    if "_flat_param" in module._parameters:
        raise UnsupportedError(
            f"{where} has its parameters flattened by FSDP: construct it with use_orig_params=True and push inside "
            "summon_full_params, or use fully_shard and gather"
        )


def _joined(prefix: str, own: str) -> str:
    return f"{prefix}.{own}" if prefix else own
