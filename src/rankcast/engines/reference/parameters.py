"""One worker's fused, sharded parameters and the loader that fills them.

This module knows how to make parameters from a list of names and shapes and how to copy boxes of full checkpoint
tensors into them. It must not know the decoder's mathematics, nor where the tensors it is given come from.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rankcast.engines.reference.config import DecoderConfig
from rankcast.engines.reference.layout import WorkerPlace
from rankcast.engines.reference.parts import Part, worker_parts
from rankcast.errors import ManifestError
from rankcast.geometry import Box
from rankcast.trace.fingerprint import Fingerprint, class_name, digest


class ShardedParameters(nn.Module):
    """The parameters of the worker at ``place``, named, fused and sharded as vLLM does it.

    Shapes are those of ``parts.worker_parts``; ``dtype`` (default: the config's) and ``device`` hold for all of them.
    They start as zeros, and mean nothing until ``load_weights`` has had a whole checkpoint; the padding rows of the
    vocabulary stay zero. Raises ``UnsupportedError`` when the layout cannot
    divide the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        place: WorkerPlace,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.place = place
        self.dtype = dtype if dtype is not None else torch_dtype(config.dtype)
        held = worker_parts(config, place)
        for name, shape in held.parameters.items():
            zeros = torch.zeros(shape, dtype=self.dtype, device=device)
            _register(self, name, nn.Parameter(zeros, requires_grad=False))
        self._parts = held.parts
        self._shapes = held.shapes
        self._elsewhere = held.elsewhere

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy this worker's boxes of full checkpoint tensors into its parameters.

        ``weights``: Hugging Face names with tensors of full shape, on any device and in any dtype that ``copy_``
        converts; any subset, in any order. Tensors that this worker holds nothing of are passed over untouched. Only
        views are made and only ``copy_`` and ``zero_`` write, so the same call on storage-less tensors can be traced.
        Returns the names of the parameters written. Raises ``ManifestError`` on a name that the architecture does not
        have and on a wrong shape; what was copied before stays copied.
        """
        written: set[str] = set()
        for name, tensor in weights:
            part = self._parts.get(name)
            if part is None:
                self._refuse_unknown(name)
                continue
            if tuple(tensor.shape) != self._shapes[name]:
                raise ManifestError(
                    f"{name} has shape {list(tensor.shape)}, but {self.place.label} expects the full shape "
                    f"{list(self._shapes[name])}: send whole checkpoint tensors of the model that this engine serves",
                    tensor=name,
                    worker=self.place.label,
                )
            if part.source.volume:
                self._target(part).copy_(narrowed(tensor, part.source))
                written.add(part.parameter)
            if part.padding is not None:
                # Written each time, so that a trace sees which rows are padding and that they are zero by intent.
                narrowed(self.get_parameter(part.parameter), part.padding).zero_()
        return written

    def trace_fingerprint(self) -> Fingerprint:
        """What decides where ``load_weights`` puts things: the layout and, by its parts, which expert lies where."""
        return Fingerprint(
            model=class_name(self),
            engine=f"the embedded fleet, torch {torch.__version__}",
            layout=self.place.label,
            experts=digest([(name, part.parameter, part.target) for name, part in self._parts.items()]),
        )

    def _target(self, part: Part) -> torch.Tensor:
        # Looked up at each use: a parameter that something replaced must not live on here.
        view = narrowed(self.get_parameter(part.parameter), part.target)
        return view.select(0, 0) if len(part.target.sizes) > len(part.source.sizes) else view

    def _refuse_unknown(self, name: str) -> None:
        if name not in self._elsewhere:
            raise ManifestError(
                f"{name} is no tensor of the model that {self.place.label} serves: names must be those of its Hugging "
                "Face checkpoint (one tensor per expert, no wrapper's prefix)",
                tensor=name,
                worker=self.place.label,
            )


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype with this canonical name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``tensor`` that is ``box``; no dimension is dropped."""
    view = tensor
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, offset, size)
    return view


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Hang ``parameter`` below ``root`` at its dotted name, making the modules in between."""
    *path, last = name.split(".")
    module = root
    for step in path:
        if step not in module._modules:
            module.add_module(step, nn.Module())
        child = module._modules[step]
        assert child is not None
        module = child
    module.register_parameter(last, parameter)
