"""How new weights get into a model: the contract an engine fills in, and the plain way through a loader.

This module knows a model's parameters and its ``load_weights``. It must not know sessions, entries or segments: it is
handed tensors and trusts that they were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from rankcast.errors import ManifestError
from rankcast.manifest import Manifest, listed
from rankcast.rollout.program import CopyProgram
from rankcast.rollout.promised import Promised
from rankcast.rollout.traced_targets import TracedTargets
from rankcast.trace.fingerprint import Fingerprint, class_name
from rankcast.trace.keeping import Keeping
from rankcast.trace.record import Trace, trace_loader

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


class Installer(Protocol):
    """What a receiver needs of an engine.

    ``whole_modules`` says that all tensors of a module must come the same way, by program or through the loader.
    ``trace`` writes nothing and may be called at any time. ``begin`` comes once before the first ``install`` of a
    session, then ``install`` for each batch, then ``finish``; ``abandon`` ends a session that will not finish, and must
    leave the model in a state in which a later ``begin`` starts from scratch.
    """

    whole_modules: bool

    def trace(self, manifest: Manifest) -> Trace:
        """What the engine's loader does with ``manifest``'s tensors.

        Raises ``ManifestError`` where it refuses one, ``UnsupportedError`` for what cannot be recorded.
        """

    def fingerprint(self) -> Fingerprint:
        """What decides where the loader puts things, as it is now; ``trace`` puts it into what it returns.

        Asked at every session: when it is another than in the trace, the trace is taken again. So it must be cheap, and
        say the same for as long as the loader does.
        """

    def required(self) -> frozenset[str]:
        """The destinations that a complete update fills."""

    def persistent_buffers(self) -> frozenset[str]:
        """The destinations that a checkpoint may fill and need not; those it does not are reported."""

    def may_ignore(self, name: str) -> bool:
        """Whether the engine passes over checkpoint tensor ``name`` on purpose (a tied head, for one)."""

    def by_loader(self) -> Mapping[str, str]:
        """Destinations that only the loader can fill, with the reason; they are never in a copy program."""

    def objects(self) -> int:
        """A number that changes when a parameter is replaced by another object, which a loader might not notice.

        0 for engines whose loaders look parameters up anew.
        """

    def check(self, targets: TracedTargets) -> None:
        """Hand ``targets`` the parameters and buffers as ``trace`` would see them now, and the required names.

        Raises ``ManifestError`` as it does; comes before ``begin``, in every session, and writes nothing.
        """

    def begin(self) -> None: ...

    def install(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def copy(self, program: CopyProgram) -> None:
        """Run a copy program: what it writes was proved to be what the loader would have written."""

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


def persistent_buffers(model: torch.nn.Module) -> frozenset[str]:
    """The names of the buffers that belong to ``model``'s state, and so to a checkpoint of it."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )


class _Live:
    """The parameters and buffers of a model as they are now, as torch lists them: one that has several names, by the
    first. torch's own walk takes longer than some pushes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self._seen: set[int] = set()
        self._collect(model, "")

    def _collect(self, module: torch.nn.Module, prefix: str) -> None:
        seen = self._seen
        seen.add(id(module))
        for held, found in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[prefix + name] = tensor
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                self._collect(child, f"{prefix}{name}.")

    @property
    def all(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}


_Held = list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]]


def _put_back(held: _Held) -> None:
    """Undo what a loader that assigns instead of copying did to modules while it was traced.

    Raises ``ManifestError`` naming the first such parameter: what such a loader would fill cannot be proved.
    """
    replaced = ""
    for module, parameters, buffers in held:
        for now, before in ((module._parameters, parameters), (module._buffers, buffers)):
            for name in [name for name in {**before, **now} if now.get(name) is not before.get(name)]:
                replaced = replaced or f"{name} of a {type(module).__name__}"
                now.clear()
                now.update(before)
    if replaced:
        raise ManifestError(
            f"the loader replaces {replaced} instead of copying into it: copy into the parameter that is there "
            "(parameter.data.copy_(tensor), load_state_dict without assign=True)"
        )


class LoaderInstaller:
    """Installs in place through ``load_weights(iterator of (name, tensor))``, for models that keep what they load.

    ``may_ignore`` says which checkpoint names the loader may pass over; by default none. A model whose loader may put
    tensors elsewhere later, at equal shapes (experts that move), says so by a method ``trace_fingerprint()``, which
    returns a ``Fingerprint``.
    """

    whole_modules = False

    def __init__(
        self,
        model: torch.nn.Module,
        load_weights: LoadWeights | None = None,
        may_ignore: Callable[[str], bool] | None = None,
    ) -> None:
        self._model = model
        self._load_weights = load_weights or getattr(model, "load_weights", None) or self._load_by_name
        self._may_ignore = may_ignore
        self._promised = Promised()

    def trace(self, manifest: Manifest) -> Trace:
        held = [(m, dict(m._parameters), dict(m._buffers)) for m in self._model.modules()]
        try:
            keeping = Keeping(self._model, self.may_ignore)
            taken = trace_loader(self._load_weights, self._destinations(), manifest, self.fingerprint(), keeping)
        finally:
            _put_back(held)
        self._promised.take(taken)
        return taken

    def fingerprint(self) -> Fingerprint:
        own = getattr(self._model, "trace_fingerprint", None)
        if own is None:
            return Fingerprint(model=class_name(self._model), engine=f"torch {torch.__version__}")
        said: Fingerprint = own()
        return said

    def required(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._model.named_parameters())

    def persistent_buffers(self) -> frozenset[str]:
        return persistent_buffers(self._model)

    def may_ignore(self, name: str) -> bool:
        return self._may_ignore is not None and self._may_ignore(name)

    def by_loader(self) -> Mapping[str, str]:
        return {}

    def objects(self) -> int:
        return hash(tuple(map(id, _Live(self._model).all.values())))

    def check(self, targets: TracedTargets) -> None:
        live = _Live(self._model)
        targets.check(live.all, live.parameters.keys())

    def begin(self) -> None:
        """Nothing to set up: the loader writes into the parameters as they are."""

    def install(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            self._promised.run(self._load_weights, weights, _Live(self._model).all)

    def copy(self, program: CopyProgram) -> None:
        live = _Live(self._model).all
        program.run({name: tensor for name, tensor in live.items() if program.writes(name) or program.fills(name)})

    def finish(self) -> None:
        """Nothing to post-process."""

    def abandon(self) -> None:
        """Nothing is held."""

    def _destinations(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def _load_by_name(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The loader of a model that has none: parameters and buffers by their own names, whole."""
        targets = self._destinations()
        unknown = []
        for name, tensor in weights:
            target = targets.get(name)
            if target is None:
                unknown.append(name)
                continue
            if target.shape != tensor.shape:
                raise ManifestError(
                    f"{name} comes with shape {list(tensor.shape)}, the model has {list(target.shape)}", tensor=name
                )
            target.data.copy_(tensor)
        if unknown:
            raise ManifestError(
                f"unknown tensors: {listed(unknown)}: the model has no parameters of these names", tensor=unknown[0]
            )
