"""Installing into a vLLM model: through its own loaders, by its layerwise reload.

This module fits vLLM to the installer's contract. It must not know entries, sessions or vLLM's insides (``adapter``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rankcast.engines.vllm.adapter import identity, reload
from rankcast.manifest import Manifest
from rankcast.rollout.installer import persistent_buffers
from rankcast.rollout.program import CopyProgram
from rankcast.rollout.traced_targets import TracedTargets
from rankcast.trace.fingerprint import Fingerprint
from rankcast.trace.keeping import Keeping
from rankcast.trace.record import Trace, trace_loader

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LayerwiseInstaller:
    """One vLLM worker's model. Calls come with vLLM's current configuration set."""

    #: vLLM post-processes a module when all of it is there.
    whole_modules = True

    def __init__(self, model: Any, config: VllmConfig) -> None:
        self._model = model
        self._config = config
        self._experts = identity.ExpertMaps(model)
        self._kernels: reload.MoeKernels = []

    def trace(self, manifest: Manifest) -> Trace:
        identity.check_supported(self._config)
        tied, fingerprint = self._tied, self.fingerprint()
        with reload.on_meta(self._model):
            keeping = Keeping(self._model, self.may_ignore)
            return trace_loader(self._model.load_weights, self._destinations(tied), manifest, fingerprint, keeping)

    def fingerprint(self) -> Fingerprint:
        return identity.fingerprint(self._model, self._config, self._experts)

    def required(self) -> frozenset[str]:
        # A buffer that vLLM has changed since cannot be kept, so an update that does not bring it is not complete.
        changed = reload.changed_buffers(self._model)
        with reload.on_meta(self._model):
            return (frozenset(name for name, _ in self._model.named_parameters()) | changed) - self._tied

    def persistent_buffers(self) -> frozenset[str]:
        with reload.on_meta(self._model):
            return persistent_buffers(self._model)

    def may_ignore(self, name: str) -> bool:
        return identity.may_ignore(self._config, name)

    def by_loader(self) -> Mapping[str, str]:
        return reload.by_loader(self._model)

    def objects(self) -> int:
        return 0  # reloading replaces parameters by design, and vLLM's loaders look them up

    def check(self, targets: TracedTargets) -> None:
        tied = self._tied
        with reload.on_meta(self._model):
            required = {name for name, _ in self._model.named_parameters()} - tied
            targets.check(self._destinations(tied), required)

    def begin(self) -> None:
        self._kernels = reload.begin_reload(self._model, self._config)

    def install(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        reload.load(self._model, weights)

    def copy(self, program: CopyProgram) -> None:
        reload.copy_by_module(self._model, program)

    def finish(self) -> None:
        reload.finish_reload(self._model, self._config, self._kernels)
        self._kernels = []  # kept until then: if that fails, abandon has to put them back

    def abandon(self) -> None:
        kernels, self._kernels = self._kernels, []
        reload.abandon_reload(self._model, self._config, kernels)

    def _destinations(self, tied: frozenset[str]) -> dict[str, torch.Tensor]:
        """Parameters and buffers as they are at load time, those that are tied once; call it within ``on_meta``."""
        both = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor for name, tensor in both if name not in tied}

    @functools.cached_property
    def _tied(self) -> frozenset[str]:
        """Names under which a parameter appears again: its loader fills the first one only."""
        first: dict[int, str] = {}
        again = set()
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                again.add(name)
        return frozenset(again)
