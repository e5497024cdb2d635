"""A module's tensors at every push, without a walk through the module when nothing in it was replaced.

This module knows what a walk depends on: which modules there are, and the names and objects that each of them holds. It
must not know what a name means, nor where a tensor lies. It keeps no tensor and no module from being freed, and no weak
reference to a tensor either: torch refuses to swap a tensor that has one, as ``module.to`` does with DTensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain, compress
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import nn

from rankcast.trainer.sources.names import checkpoint_tensors

#: All that a walk asks of a module, besides its class. The last is a set of names, the others are dicts.
_HOLD: Any = attrgetter("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_HELD = 4
_VALUES: Any = methodcaller("values")


class _Form(NamedTuple):
    """What a walk depends on, as it was; equal forms give equal walks.

    ``values`` are the ``id`` of all that the modules hold. An address may be given out again, but not a module's while
    that module is there, which a weak reference tells; and of tensors the walk asks only which are the same.
    """

    classes: list[type]
    lengths: list[int]
    names: list[str]
    values: list[int]


class _Owned(NamedTuple):
    """Which module holds a tensor, in its dict called ``kind``, as ``name``."""

    module: weakref.ref[nn.Module]
    kind: str
    name: str


class WalkedModule:
    """What ``checkpoint_tensors`` finds in ``module``; ``paths`` has the full path of each, of the last walk."""

    paths: tuple[str, ...]

    def __init__(self, module: nn.Module) -> None:
        self.paths = ()
        self._module = module
        self._modules: list[weakref.ref[nn.Module]] = []
        self._filled: list[bool] = []
        self._form: _Form | None = None
        self._places: list[int] = []
        self._owned: list[_Owned] = []

    def tensors(self) -> list[torch.Tensor]:
        """What a walk would find now, in its order; raises what ``checkpoint_tensors`` does."""
        modules = [reference() for reference in self._modules]
        if self._form is not None and None not in modules:
            form, values = self._look(modules)
            if form == self._form:
                return [values[place] for place in self._places]
        return self._walk()

    def same_tensors(self) -> list[torch.Tensor]:
        """What is now under the names that ``tensors`` found last, which is cheaper: nothing else is looked at.

        When one of them is gone, this walks again.
        """
        if self._form is not None:
            try:
                found = [getattr(module(), kind)[name] for module, kind, name in self._owned]
            except (AttributeError, KeyError):
                return self._walk()
            if type(None) not in set(map(type, found)):
                return found
        return self._walk()

    def _walk(self) -> list[torch.Tensor]:
        self._form = None
        found = list(checkpoint_tensors(self._module))
        self.paths = tuple(path for _, path, _ in found)
        modules = list(self._module.modules())
        held = list(chain.from_iterable(map(_HOLD, modules)))
        if all(isinstance(one, (dict, set)) for one in held):  # as they are, but for modules that are scripts
            self._modules = [weakref.ref(module) for module in modules]
            self._filled = [bool(one) and at % _HELD != _HELD - 1 for at, one in enumerate(held)]
            form, values = self._look(modules)
            place_of = {id(value): place for place, value in enumerate(values)}
            owned = _owned(modules)
            self._places = [place_of[id(tensor)] for _, _, tensor in found]
            self._owned = [owned[id(tensor)] for _, _, tensor in found]
            self._form = form
        return [tensor for _, _, tensor in found]

    def _look(self, modules: Iterable[Any]) -> tuple[_Form, list[Any]]:
        held = list(chain.from_iterable(map(_HOLD, modules)))
        lengths = list(map(len, held))
        names = list(chain.from_iterable(compress(held, lengths)))
        # Which of them are filled is remembered: with other lengths the values do not matter any more.
        dicts = compress(held, self._filled)
        values = list(chain.from_iterable(map(_VALUES, dicts)))
        return _Form(list(map(type, modules)), lengths, names, list(map(id, values))), values


def _owned(modules: Iterable[nn.Module]) -> dict[int, _Owned]:
    """The first place of each tensor, by its ``id``."""
    found: dict[int, _Owned] = {}
    for module in modules:
        reference = weakref.ref(module)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                found.setdefault(id(tensor), _Owned(reference, kind, name))
    return found
