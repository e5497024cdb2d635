"""Tensors that a loader keeps instead of copying them: plain attributes of modules, for one.

This module knows modules and what they hold besides parameters and buffers. It must not know what a trace records. What
a loader keeps is neither filled by a copy program nor proved to be whole, and what it was given is memory of the
trainer's: so it is refused by name, and put back as it was, because the engine serves while its loader is traced.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rankcast.errors import ManifestError
from rankcast.trace.columns import Trace
from rankcast.trace.targets import storage_key

#: What torch itself has on every module: hooks, and what a trace sees anyhow.
_OF_TORCH = frozenset(vars(torch.nn.Module()))
#: How many containers, one in the other, are looked into.
_DEPTH = 3

#: Storage -> the tensors of the manifest, by index, of which it has something.
Alive = Mapping[int, tuple[int, ...]]
#: A dict or a list, and a copy of what it had.
_Content = tuple[Any, Any]


class Keeping:
    """What the modules of ``model`` keep, as it is before a trace.

    It finds what lies in attributes of modules, and in dicts, lists and tuples there. What a loader keeps elsewhere is
    noticed only where it copies nothing of it, and ``may_ignore`` does not say that it passes over it.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, may_ignore: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._model = model
        self._may_ignore = may_ignore
        self._before = [] if model is None else [(m, dict(vars(m)), _contents(m)) for m in model.modules()]

    def put_back(self, alive: Alive) -> dict[int, str]:
        """Undo what left one of the storages in ``alive`` in a module; which tensors were there, and in what."""
        held: dict[int, str] = {}
        for module, before, contents in self._before if alive else ():
            now = vars(module)
            for name in [name for name in now if name not in _OF_TORCH]:
                found = {index for key in _storages(now[name], _DEPTH) for index in alive.get(key, ())}
                if not found:
                    continue
                held |= dict.fromkeys(found - held.keys(), f"{self._prefix(module)}{name}")
                del now[name]
                if name in before:
                    now[name] = before[name]
                    for container, had in contents.get(name, ()):
                        container.clear()
                        (container.update if isinstance(container, dict) else container.extend)(had)
        return held

    def check(self, trace: Trace, held: Mapping[int, str], alive: Callable[[], Alive]) -> None:
        """Raise ``ManifestError`` naming a tensor that the loader keeps: ``held`` in a module, or ``alive``."""
        names = trace.manifest.names
        if held:
            index = min(held)
            raise ManifestError(
                f"the loader keeps {names[index]}, or what it computes of it, as {held[index]}, which is neither a "
                "parameter nor a buffer: register a buffer there, and copy into it",
                tensor=names[index],
            )
        lost = {i for i in trace.ignored() if not self._may_ignore(names[i])}
        if lost.isdisjoint(_tensors_of(alive())):
            return
        gc.collect()  # what only a cycle of the loader's own holds is not kept
        if kept := lost & _tensors_of(alive()):
            name = names[min(kept)]
            raise ManifestError(
                f"the loader copies nothing of {name} and keeps it outside of what an update fills: register a buffer "
                "for it, and copy into that; or let LoaderInstaller(may_ignore=...) say that it is passed over",
                tensor=name,
            )

    def _prefix(self, module: torch.nn.Module) -> str:
        assert self._model is not None, "there are modules"
        name = next((name for name, known in self._model.named_modules() if known is module), "")
        return f"{name}." if name else ""


def _tensors_of(alive: Alive) -> set[int]:
    return {index for sources in alive.values() for index in sources}


def _contents(module: torch.nn.Module) -> dict[str, list[_Content]]:
    """The dicts and lists in a module's attributes, by the attribute's name, and a copy of what each has."""
    found = {name: list(_copied(value, _DEPTH)) for name, value in vars(module).items() if name not in _OF_TORCH}
    return {name: copies for name, copies in found.items() if copies}


def _copied(value: object, depth: int) -> Iterator[_Content]:
    if not isinstance(value, (dict, list, tuple)) or not depth:
        return
    if isinstance(value, dict):
        yield value, dict(value)
    elif isinstance(value, list):
        yield value, list(value)
    for one in value.values() if isinstance(value, dict) else value:
        yield from _copied(one, depth - 1)


def _storages(value: object, depth: int) -> Iterator[int]:
    """The storages of the tensors in ``value``."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield storage_key(value)
    elif isinstance(value, (dict, list, tuple)) and depth:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _storages(one, depth - 1)
