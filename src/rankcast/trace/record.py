"""Running an engine's own ``load_weights`` on tensors without storage, and recording what it would have written.

This module knows torch's operators: which of them write, which of them pass a tensor's elements on. It must not know
any engine's parameters or names. Nothing that would write to a destination is executed, so an engine can be traced
while it serves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankcast.errors import ManifestError, RankcastError, UnsupportedError
from rankcast.manifest import Manifest
from rankcast.trace.columns import Cast, Copies, Fills, Trace
from rankcast.trace.dtypes import dtype_name
from rankcast.trace.fingerprint import NOTHING_SAID, Fingerprint
from rankcast.trace.keeping import Keeping
from rankcast.trace.operands import is_constant, only_moves, tensors_in, without_storage
from rankcast.trace.targets import Targets, Watch, meta_tensors, storage_key

__all__ = ["Cast", "Trace", "trace_loader"]

#: ``Copies.throughs`` of a copy whose source could not be followed; it is put down to the tensor given last.
UNTRACED = "untraced"

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# They make a tensor in the form of another one and take none of its values.
_FORM_ONLY = frozenset(
    f"aten::{name}"
    for form in ("empty", "zeros", "ones", "full", "rand", "randn")
    for name in (f"{form}_like", f"new_{form}", f"new_{form}_strided")
)
# What they answer depends on values that a tensor without storage does not have.
_DECIDING = frozenset(f"aten::{name}" for name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero"))


class _Lineage(NamedTuple):
    """Where a tensor's elements come from: sources, the first operator that computed, whether a parameter went in."""

    sources: tuple[int, ...]
    through: str
    parameter: bool


_NOTHING = _Lineage((), "", False)
_PARAMETER = _Lineage((), "", True)


def trace_loader(
    load_weights: LoadWeights,
    destinations: Mapping[str, torch.Tensor],
    manifest: Manifest,
    fingerprint: Fingerprint = NOTHING_SAID,
    keeping: Keeping | None = None,
) -> Trace:
    """Record where ``load_weights`` puts the tensors of ``manifest`` in ``destinations``, without writing there.

    ``load_weights`` is called once, under ``torch.no_grad``, with an iterator of all (name, tensor) in the manifest's
    order; the tensors have full shapes and the manifest's dtypes and lie on the meta device. ``destinations`` are the
    engine's real parameters and buffers by name; not one byte of them changes. ``fingerprint`` goes into the trace, and
    ``keeping`` knows the modules in which the loader may have kept a tensor instead of copying it.

    Raises ``UnsupportedError`` naming operator and parameter when the loader writes in a way that cannot be recorded
    (anything but a copy of equal shape or a constant fill; a value computed from a parameter; a tensor that is no
    destination) or looks at values; ``ManifestError`` naming the tensor being loaded when the loader itself fails or
    stops early, and a tensor that it keeps elsewhere.
    """
    targets, keeping = Targets(destinations), keeping or Keeping()
    recorder = _Recorder(manifest, targets, meta_tensors(manifest))
    feed = recorder.feed()
    try:
        with torch.no_grad(), recorder:
            load_weights(feed)
    except Exception as fault:
        raise recorder.explain(fault) from fault
    finally:
        feed.close()
        recorder.let_go()
        exchanged = targets.restore()
        held = keeping.put_back(recorder.alive())
    if recorder.refusal is not None:  # the loader caught it
        raise recorder.refusal
    if exchanged is not None:
        raise UnsupportedError(
            f"the loader gave {exchanged} another storage instead of writing to it", tensor=exchanged
        )
    recorder.check_exhausted()
    trace = recorder.trace(fingerprint)
    keeping.check(trace, held, recorder.alive)
    return trace


class _Operator(NamedTuple):
    """What an operator's schema says: its name, and where the arguments are that it writes to.

    ``views`` says that it only makes views of its arguments, ``in_place`` that it writes to its first one and no other.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    views: bool
    in_place: bool


@functools.cache
def _describe(func: Any) -> _Operator:
    written = tuple(
        (-1 if argument.kwarg_only else place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name, returned = func._schema.name, func._schema.returns
    # ``lift_fresh`` passes on a tensor that the loader has just made, which has to be known as its own.
    views = not written and bool(returned) and all(one.alias_info is not None for one in returned)
    return _Operator(name, written, views and name != "aten::lift_fresh", written == ((0, "self"),))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Sees every operator that the loader runs; lets it run, or takes it down and lets it not."""

    def __init__(self, manifest: Manifest, targets: Targets, given: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._manifest = manifest
        self._targets = targets
        self._given = given
        self._lineage = {storage_key(t): _Lineage((i,), "", False) for i, t in enumerate(given)}
        # Also so that no later storage can take the address of one that is known.
        self._watched = {storage_key(t): Watch(t) for t in given}
        self._made: set[int] = set()
        self._current: int | None = None
        self._fed = 0
        self._steps = 0
        self._copies: list[tuple[Any, ...]] = []
        self._fills: list[tuple[Any, ...]] = []
        self.refusal: UnsupportedError | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, torch's default, imports its compiler at the first operator: seconds and a lot of memory in each worker,
        # to protect from a compilation that nobody asks for here. A torch that does not know the flag ignores it.
        return False

    def feed(self) -> Generator[tuple[str, torch.Tensor]]:
        """The manifest's tensors one by one; remembers which one the loader has."""
        for i, (name, tensor) in enumerate(zip(self._manifest.names, self._given, strict=True)):
            self._current, self._fed = i, i + 1
            yield name, tensor

    def let_go(self) -> None:
        """Hold no tensor any more: what is alive from now on is held by somebody else."""
        self._given = []

    def alive(self) -> dict[int, tuple[int, ...]]:
        """The storages that are still there and have something of the given tensors, with which these are."""
        known = ((key, self._lineage_of(key).sources) for key, watch in self._watched.items() if not watch.gone)
        return {key: sources for key, sources in known if sources}

    def check_exhausted(self) -> None:
        """Raise ``ManifestError`` unless the loader took every tensor that there was."""
        if self._fed < len(self._manifest):
            name = self._manifest.names[self._fed]
            raise ManifestError(
                f"load_weights took {self._fed} of {len(self._manifest)} tensors and never asked for {name}: it must "
                "run through the iterator that it is given",
                tensor=name,
            )

    def explain(self, fault: Exception) -> RankcastError:
        """The loader's failure as an error that names the tensor it had at that moment."""
        if self.refusal is not None:
            return self.refusal
        name = None if self._current is None else self._manifest.names[self._current]
        if isinstance(fault, RankcastError):
            fault.tensor = fault.tensor if fault.tensor is not None else name
            return fault
        what = "its first tensor" if self._current is None else str(self._manifest.row(self._current))
        return ManifestError(f"load_weights failed on {what}: {type(fault).__name__}: {fault}", tensor=name)

    def trace(self, fingerprint: Fingerprint) -> Trace:
        return Trace(
            manifest=self._manifest,
            destinations=self._targets.manifest,
            layouts=self._targets.layouts,
            aliases=tuple(self._targets.aliases),
            copies=Copies(*zip(*self._copies, strict=True)),
            fills=Fills(*zip(*self._fills, strict=True)),
            fingerprint=fingerprint,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = _describe(func)
        if operator.views:
            # Most of what loaders do. A view's elements are found by its storage, which is known or not as before.
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        try:
            if operator.written:
                return self._write(func, operator, args, kwargs)
            return self._compute(func, operator, args, kwargs)
        except UnsupportedError as fault:
            self.refusal = self.refusal or fault
            raise

    def _compute(self, func: Any, operator: _Operator, args: Any, kwargs: Any) -> Any:
        """Run an operator that writes nothing, and note whence what it returns comes."""
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        keys = {storage_key(tensor) for tensor in inputs}
        lineage = _NOTHING if operator.name in _FORM_ONLY else self._merge(keys, operator.name)
        if lineage.sources:
            if operator.name in _DECIDING:
                names = ", ".join(self._manifest.names[i] for i in lineage.sources)
                raise UnsupportedError(
                    f"the loader looks at the values of {names} ({operator.name}), which a trace does not have",
                    tensor=self._manifest.names[lineage.sources[0]],
                )
            if operator.name == "aten::_to_copy" and only_moves(args[0], kwargs):
                return args[0].detach()
            args, kwargs = without_storage(args, kwargs)
        result = func(*args, **kwargs)
        for tensor in tensors_in((result,)):
            key = storage_key(tensor)
            if key not in keys:
                self._made.add(key)
                self._set(tensor, key, lineage)
            elif operator.name == "aten::lift_fresh":
                self._made.add(key)
        return result

    def _write(self, func: Any, operator: _Operator, args: Any, kwargs: Any) -> Any:
        """Take down a write to a destination, or let a write to the loader's own tensors happen."""
        if operator.in_place and isinstance(args[0], torch.Tensor) and self._targets.holds(storage_key(args[0])):
            self._record(operator, args[0], args)
            return args[0]
        written = [
            kwargs.get(name) if place < 0 or place >= len(args) else args[place] for place, name in operator.written
        ]
        into = list(tensors_in(written))
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        target = next((tensor for tensor in into if self._targets.holds(storage_key(tensor))), None)
        if target is not None:
            self._record(operator, target, args)
            return args[0]
        lineage = self._merge({storage_key(tensor) for tensor in inputs}, operator.name)
        for tensor in into:
            key = storage_key(tensor)
            if key not in self._made and key not in self._lineage:
                raise UnsupportedError(
                    f"the loader writes ({operator.name}) to a tensor of shape {list(tensor.shape)} that is neither "
                    "its own nor a destination: a trace would change the engine, or miss what goes there",
                    tensor=None if self._current is None else self._manifest.names[self._current],
                )
            if lineage.sources or lineage.parameter:
                self._set(tensor, key, lineage)
        if lineage.sources:
            # The values do not exist, so the write cannot happen; what it would have left behind is noted above.
            return args[0] if operator.written[0][0] == 0 else written[0]
        return func(*args, **kwargs)

    def _record(self, operator: _Operator, target: torch.Tensor, args: Any) -> None:
        if operator.in_place and operator.name == "aten::zero_":
            self._fill(operator, target, 0)
        elif operator.in_place and operator.name in ("aten::fill_", "aten::copy_"):
            value = args[1]
            if not isinstance(value, torch.Tensor):
                self._fill(operator, target, value)
                return
            lineage = self._lineage_of(storage_key(value))
            if lineage is _NOTHING and is_constant(value):
                self._fill(operator, target, value.as_strided((), (), value.storage_offset()).item())
            else:
                self._copy(operator, target, value, lineage)
        else:
            name = self._targets.name_at(target)
            raise UnsupportedError(
                f"the loader writes {name} with {operator.name}: only copies and constant fills can be traced",
                tensor=name,
            )

    def _fill(self, operator: _Operator, target: torch.Tensor, value: float) -> None:
        index, offset = self._targets.locate(target, operator.name)
        self._fills.append((self._steps, tuple(target.shape), index, offset, tuple(target.stride()), repr(value)))
        self._steps += 1

    def _copy(self, operator: _Operator, target: torch.Tensor, source: torch.Tensor, lineage: _Lineage) -> None:
        if lineage.parameter:
            name = self._targets.name_at(target)
            raise UnsupportedError(
                f"the loader writes {name} with what it read from a parameter: that value depends on the weights which "
                "are there at the time",
                tensor=name,
            )
        if lineage is _NOTHING:
            if self._current is None:
                name = self._targets.name_at(target)
                raise UnsupportedError(f"the loader writes {name} before it has any tensor", tensor=name)
            lineage = _Lineage((self._current,), UNTRACED, False)
        sizes = tuple(target.shape)
        strides = source.stride() if source.shape == sizes else self._spread(target, source, lineage)
        through = lineage.through
        dtype = dtype_name(source.dtype)
        if not through and dtype != self._manifest.dtypes[lineage.sources[0]]:
            through = "view"
        if not through and (source.is_conj() or source.is_neg()):
            through = "conj"
        index, offset = self._targets.locate(target, operator.name)
        if not through and target.dtype != self._targets.dtype(index):
            through = "view"
        self._copies.append(
            (
                self._steps,
                lineage.sources,
                dtype,
                0 if through else source.storage_offset(),
                strides,
                sizes,
                index,
                offset,
                target.stride(),
                through,
            )
        )
        self._steps += 1

    def _spread(self, target: torch.Tensor, source: torch.Tensor, lineage: _Lineage) -> tuple[int, ...]:
        """The strides of ``source`` with dimensions of one index put in front, as many as ``target`` has."""
        first = self._manifest.names[lineage.sources[0]]
        try:
            spread = source.expand(target.shape)
        except RuntimeError:
            raise ManifestError(
                f"{first} has a wrong shape: {list(source.shape)} of it would go into {list(target.shape)} elements of "
                f"{self._targets.name_at(target)}",
                tensor=first,
            ) from None
        if source.numel() != target.numel():
            name = self._targets.name_at(target)
            raise UnsupportedError(
                f"the loader copies {first} as {list(source.shape)} over {list(target.shape)} elements of {name}: a "
                "copy that broadcasts cannot be traced",
                tensor=name,
            )
        return tuple(spread.stride())

    def _lineage_of(self, key: int) -> _Lineage:
        """The lineage of the storage with ``key``; ``_NOTHING`` itself when none is known."""
        return _PARAMETER if self._targets.holds(key) else self._lineage.get(key, _NOTHING)

    def _merge(self, keys: Iterable[int], operator: str) -> _Lineage:
        """The lineage of what an operator makes of the storages with ``keys``."""
        sources: dict[int, None] = {}
        through, parameter = "", False
        for key in keys:
            known = self._lineage_of(key)
            if known is not _NOTHING:
                sources.update(dict.fromkeys(known.sources))
                through = through or known.through
                parameter = parameter or known.parameter
        if not sources and not parameter:
            return _NOTHING
        return _Lineage(tuple(sorted(sources)), through or operator.removeprefix("aten::"), parameter)

    def _set(self, tensor: torch.Tensor, key: int, lineage: _Lineage) -> None:
        if lineage == _NOTHING:
            # The address may have been that of a tensor which is gone.
            self._lineage.pop(key, None)
            return
        self._lineage[key] = lineage
        if key not in self._watched:
            self._watched[key] = Watch(tensor)
