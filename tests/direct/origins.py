"""Trainers of every form that the direct mode takes, each over the same checkpoint, and able to take other weights.

It knows how memory can be laid out under checkpoint names. It must not know workers, nor what a push does with it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from checkpoints import write_checkpoint
from fleets_inprocess import Bits, Weights
from oracle import unique_weights
from rankcast import ModuleSource
from rankcast.trainer.sources import Declared, DeclaredSource

#: Storages below 64 KiB are packed and copied; these many elements more make sure that one is not.
PADDING = 2**16

MODULES = ("separate", "one storage", "shared", "transposed", "strided")
FILES = ("1 file", "2 files", "3 files")
KINDS = (*MODULES, *FILES, "declared", "packed experts")

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def laid_out(kind: str, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Empty tensors of ``shapes`` whose memory is of a ``kind`` of ``MODULES``."""
    if kind == "separate":
        return {name: torch.empty(tuple(shape), dtype=dtype) for name, shape in shapes.items()}
    step = 3 if kind == "strided" else 1
    counts = [step * int(np.prod(shape)) for shape in shapes.values()]
    arena = torch.empty(sum(counts) + PADDING, dtype=dtype)
    if kind == "shared":
        arena.share_memory_()
    made: dict[str, torch.Tensor] = {}
    for (name, shape), flat in zip(shapes.items(), arena.split([*counts, PADDING]), strict=False):
        if kind == "transposed":
            made[name] = flat.view(tuple(reversed(shape))).permute(*reversed(range(len(shape))))
        else:
            made[name] = flat[::step].view(tuple(shape)) if step == 1 else flat.view(*shape, step)[..., 1]
    return made


class Named(nn.Module):
    """A module with the given tensors as parameters under their dotted names, as they lie."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]  # type: ignore[assignment]  # never None: just made
            module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))


def put(tensor: torch.Tensor, bits: Bits) -> None:
    """Write ``bits`` into ``tensor`` in place, whatever its strides; counted as a write, as an optimizer's step is."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    values = torch.from_numpy(np.ascontiguousarray(bits)).view(signed)
    with torch.no_grad():
        tensor.detach().view(signed).copy_(values)


class Origin:
    """One trainer over a checkpoint of ``config``; ``source`` is what ``connect`` takes."""

    def __init__(self, kind: str, config: dict[str, Any], folder: Path, *, seed: int = 0) -> None:
        self.kind, self.config, self._folder = kind, config, folder
        self._weights = unique_weights(config, 0)
        self._dtype: torch.dtype = getattr(torch, config["dtype"])
        self._shapes = {name: bits.shape for name, bits in self._weights.items()}
        self.module: nn.Module | None = None
        self.source: Any = None
        self._tensors: dict[str, torch.Tensor] = {}
        if kind in MODULES:
            self._tensors = laid_out(kind, self._shapes, self._dtype)
            self.module = Named(self._tensors)
            self.source = ModuleSource(self.module)
        elif kind == "packed experts":
            self._pack()
        elif kind == "declared":
            self._tensors = laid_out("one storage", self._shapes, self._dtype)
            self.source = DeclaredSource(
                list(declared(self._tensors, cut_boxes(self._shapes, np.random.default_rng(seed))))
            )

    @property
    def lasting(self) -> bool:
        """Whether one source can take other weights: not so for files, of which a new checkpoint is a new one."""
        return self.kind not in FILES

    def become(self, weights: Weights, label: str) -> None:
        """Take other weights: in place, or as a new checkpoint named ``label``."""
        if self.kind in FILES:
            self.source = self._folder / label
            write_checkpoint(self.source, self.config, weights, shards=int(self.kind[0]))
            return
        for name, bits in weights.items():
            put(self._tensors[name], bits)

    def _pack(self) -> None:
        """Experts of a layer as transformers keeps them: gate above up in one 3-D tensor, down in another."""
        plain = {name: shape for name, shape in self._shapes.items() if not _EXPERT.fullmatch(name)}
        tensors = laid_out("one storage", plain, self._dtype)
        parameters = dict(tensors)
        for layer in dict.fromkeys(found[1] for name in self._shapes if (found := _EXPERT.fullmatch(name))):
            rows, columns = self._shapes[f"{layer}.0.gate_proj.weight"]
            experts = self.config["num_experts"]
            gate_up = torch.empty(experts, 2 * rows, columns, dtype=self._dtype)
            down = torch.empty(experts, columns, rows, dtype=self._dtype)
            parameters |= {f"{layer}.gate_up_proj": gate_up, f"{layer}.down_proj": down}
            for expert in range(experts):
                tensors[f"{layer}.{expert}.gate_proj.weight"] = gate_up[expert, :rows]
                tensors[f"{layer}.{expert}.up_proj.weight"] = gate_up[expert, rows:]
                tensors[f"{layer}.{expert}.down_proj.weight"] = down[expert]
        self._tensors = tensors
        self.module = Named(parameters)
        self.module.config = SimpleNamespace(model_type="qwen3_moe")  # type: ignore[assignment]
        self.source = ModuleSource(self.module)


Cut = tuple[tuple[int, int], ...]


def cut_boxes(shapes: Mapping[str, Sequence[int]], random: np.random.Generator) -> dict[str, list[Cut]]:
    """Every tensor cut into boxes by a grid at random: up to three parts of each dimension."""
    found = {}
    for name, shape in shapes.items():
        spans = []
        for size in shape:
            inner = random.integers(1, size, size=int(random.integers(0, 3))).tolist() if size > 1 else []
            edges = sorted({0, size, *inner})
            spans.append(list(itertools.pairwise(edges)))
        found[name] = list(itertools.product(*spans))
    return found


def declared(tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Sequence[Cut]]) -> Iterator[Declared]:
    """Each box as a view of the whole tensor."""
    for name, cuts in boxes.items():
        for cut in cuts:
            view = tensors[name][tuple(slice(start, stop) for start, stop in cut)]
            yield Declared(name, tuple(tensors[name].shape), view, cut)
