"""The destinations that the workers of a rollout grid would have for a model, without any engine.

This module joins tensors and a rollout grid into traces, as vLLM fuses and shards: q, k and v in one parameter, gate
and up in one, experts in stacks, a padded vocabulary. It must not know trainers. In what vLLM and the embedded fleet
differ (who holds the final norm, how experts are cut without expert parallelism over replicas) it follows the latter.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rankcast.plan.columns import Destinations, Fleet, Ints, dtype_codes, solid
from rankcast.plan.families.kinds import Kind
from rankcast.plan.grids import VOCABULARY_MULTIPLE, RolloutGrid, share
from rankcast.plan.simulated_trainer import RANKS_PER_HOST, dense_strides
from rankcast.plan.tensors import Tensors


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutTrace:
    """One worker's destinations, and the names of the parameters that they count."""

    destinations: Destinations
    parameters: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Cuts:
    """How one tp rank's share of each kind lies in its parameter: columns over the kinds.

    ``starts``, ``sizes``, ``strides`` int64 [kinds, D]; ``offset`` int64 is where a kind begins in its parameter (in
    its expert's part of a stack), ``expert_elements`` what one expert takes of a stack; 0 for others.
    """

    starts: Ints
    sizes: Ints
    strides: Ints
    offset: Ints
    expert_elements: Ints


def rollout_fleet(tensors: Tensors, grid: RolloutGrid, *, first_host: int = 0) -> Fleet:
    """All workers of all engines, on hosts of their own from ``first_host`` on.

    Workers with equal destinations share a trace. Raises ``UnsupportedError`` when the grid does not divide the model.
    """
    traces: list[Destinations] = []
    parameters: list[tuple[str, ...]] = []
    known: dict[tuple[int, int, int], int] = {}
    trace_of_worker = []
    made = _Maker(tensors, grid)
    for worker in range(grid.workers):
        dp, pp, tp = grid.place(worker)
        key = (dp if grid.spread else 0, pp, tp)
        if key not in known:
            known[key] = len(traces)
            traces.append(made.destinations(*key))
            parameters.append(made.parameters(pp))
        trace_of_worker.append(known[key])
    workers = np.arange(grid.workers * grid.engines)
    return Fleet(
        tuple(traces),
        np.tile(np.array(trace_of_worker, dtype=np.int32), grid.engines),
        (first_host + workers // RANKS_PER_HOST).astype(np.int32),
        tuple(parameters),
    )


def rollout_trace(tensors: Tensors, grid: RolloutGrid, worker: int) -> RolloutTrace:
    """What worker ``worker`` of any engine has; raises ``UnsupportedError`` as ``rollout_fleet`` does."""
    made = _Maker(tensors, grid)
    dp, pp, tp = grid.place(worker)
    return RolloutTrace(made.destinations(dp, pp, tp), made.parameters(pp))


class _Maker:
    """Makes the destinations of workers; what several of them share is made once."""

    def __init__(self, tensors: Tensors, grid: RolloutGrid) -> None:
        grid.check(tensors.family)
        self._tensors = tensors
        self._grid = grid
        self._dtypes = dtype_codes(kind.dtype for kind in tensors.kinds)
        self._ordinals, self._lists = _parameter_lists(tensors)
        self._stages = [self._stage(pp) for pp in range(grid.pp)]
        self._bases = [self._base(pp) for pp in range(grid.pp)]
        self._cuts: dict[int, _Cuts] = {}
        self._plain: dict[tuple[int, int], Destinations] = {}

    def destinations(self, dp: int, pp: int, tp: int) -> Destinations:
        """The destinations of the worker there."""
        if (pp, tp) not in self._plain:
            rows = self._stages[pp]
            self._plain[pp, tp] = self._rows(rows[self._tensors.expert[rows] < 0], pp, tp, 0)
        plain = self._plain[pp, tp]
        own = self._grid.experts(self._tensors.family.experts, dp, tp)
        rows = self._stages[pp]
        expert = self._tensors.expert[rows]
        mine = rows[(expert >= own.start) & (expert < own.stop)]
        return Destinations.joined([plain, self._rows(mine, pp, tp, own.start)]) if len(mine) else plain

    def parameters(self, pp: int) -> tuple[str, ...]:
        """The names of the parameters of a worker of stage ``pp``."""
        names: list[str] = []
        for layer in self._layers(pp):
            prefix = f"model.layers.{layer}." if 0 <= layer < self._tensors.family.layers else ""
            names += [prefix + name for name in self._lists[self._list_of(layer)]]
        return tuple(names)

    def _rows(self, rows: Ints, pp: int, tp: int, first_expert: int) -> Destinations:
        tensors = self._tensors
        cuts = self._cuts.get(tp)
        if cuts is None:
            cuts = self._cuts[tp] = _cuts(tensors, self._grid, tp)
        kind = tensors.kind[rows]
        within = np.maximum(tensors.expert[rows] - first_expert, 0) * cuts.expert_elements[kind]
        made = Destinations(
            rows.astype(np.int32),
            (self._bases[pp][tensors.layer[rows] + 1] + self._ordinals[kind]).astype(np.int32),
            cuts.starts[kind],
            cuts.sizes[kind],
            cuts.offset[kind] + within,
            cuts.strides[kind],
            self._dtypes[kind],
        )
        # A tp rank may have no row of the vocabulary but padding.
        some = solid(made.sizes)
        return made if bool(some.all()) else made.take(some)

    def _layers(self, pp: int) -> list[int]:
        """The layers of a stage, with -1 for what is before them and their number for what is after."""
        family, last = self._tensors.family, self._grid.pp - 1
        before = [-1] if pp == 0 or (family.tied and pp == last) else []
        own = self._grid.stage_layers(family.layers)[pp]
        return [*before, *own, *([family.layers] if pp == last else [])]

    def _stage(self, pp: int) -> Ints:
        return np.flatnonzero(np.isin(self._tensors.layer, self._layers(pp)))

    def _list_of(self, layer: int) -> int:
        family = self._tensors.family
        if layer < 0:
            return 0
        return 1 + family.type_of_layer[layer] if layer < family.layers else len(self._lists) - 1

    def _base(self, pp: int) -> Ints:
        """The number of parameters of a worker of stage ``pp`` before each layer of it, int64 [layers + 2]."""
        base = np.zeros(self._tensors.family.layers + 2, dtype=np.int64)
        count = 0
        for layer in self._layers(pp):
            base[layer + 1] = count
            count += len(self._lists[self._list_of(layer)])
        return base


def _parameter_lists(tensors: Tensors) -> tuple[Ints, list[list[str]]]:
    """For each kind the place of its parameter in its list, and the lists: before, one a layer type, after."""
    family = tensors.family
    lists: list[list[str]] = []
    ordinals = []
    for kinds in (family.before, *family.layer_types, family.after):
        names = list(dict.fromkeys(kind.parameter for kind in kinds))
        ordinals += [names.index(kind.parameter) for kind in kinds]
        lists.append(names)
    return np.array(ordinals, dtype=np.int64), lists


def _cuts(tensors: Tensors, grid: RolloutGrid, tp: int) -> _Cuts:
    family, count = tensors.family, len(tensors.kinds)
    starts, sizes = np.zeros_like(tensors.shapes), tensors.shapes.copy()
    offset, expert_elements = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    number = 0
    for kinds in (family.before, *family.layer_types, family.after):
        filled: dict[str, int] = {}
        for each, kind in enumerate(kinds, number):
            own = _own(kind, grid, tp)
            starts[each, kind.dimension], sizes[each, kind.dimension] = own.start, len(own)
            offset[each] = filled.get(kind.parameter, 0)
            filled[kind.parameter] = int(offset[each] + sizes[each].prod())
        for each, kind in enumerate(kinds, number):
            expert_elements[each] = filled[kind.parameter] if kind.expert else 0
        number += len(kinds)
    return _Cuts(starts, sizes, dense_strides(sizes), offset, expert_elements)


def _own(kind: Kind, grid: RolloutGrid, tp: int) -> range:
    if kind.expert and grid.spread:
        return range(kind.shape[kind.dimension])
    return share(kind, grid.tp, tp, multiple=VOCABULARY_MULTIPLE)
