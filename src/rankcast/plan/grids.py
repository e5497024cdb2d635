"""Grids of trainer ranks and of rollout workers: how many there are, and who stands where.

This module knows how Megatron, FSDP and vLLM count their ranks, and how layers, experts and dimensions are divided. It
must not know tensors, other than the names of settings in the words of an error. It is for planning without processes:
in a real sync every worker says itself who it is.
"""

from __future__ import annotations

import math
from typing import Self

import msgspec

from rankcast.errors import UnsupportedError
from rankcast.plan.families.kinds import Cut, Family, Kind

#: Rollout pads the vocabulary to a multiple of this before dividing it.
VOCABULARY_MULTIPLE = 64


def parse_grid(text: str, names: tuple[str, ...], what: str) -> dict[str, int]:
    """``tp=4,cp=2`` as a dict; raises ``UnsupportedError`` for another form, an unknown name, or a name given twice."""
    found: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in names or name in found or not (value.isascii() and value.isdigit()) or int(value) < 1:
            raise UnsupportedError(
                f"{what} {text!r}: {part!r} is none of {', '.join(f'{known}=N' for known in names)}, each at most once "
                "and at least 1"
            )
        found[name] = int(value)
    return found


class TrainerGrid(msgspec.Struct, frozen=True, kw_only=True):
    """How trainer ranks divide a model: Megatron's grid, or ``fsdp`` ranks in ``dp`` replicas.

    Ranks count tp fastest, then cp, dp and pp. Experts are spread over the same ranks of a pipeline stage, folded: etp
    fastest, then ep; what is left are replicas. ``fsdp`` cuts every tensor's first dimension as ``torch.chunk`` does,
    and stacks of experts by experts, as transformers keeps them.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    fsdp: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``tp=4,cp=2,ep=8``. Without ``dp`` there are as few replicas as ``ep`` and ``etp`` fit into."""
        found = parse_grid(text, ("tp", "cp", "pp", "ep", "etp", "dp", "fsdp"), "trainer grid")
        if "fsdp" in found and (odd := sorted(set(found) - {"fsdp", "dp"})):
            raise UnsupportedError(f"trainer grid {text!r}: fsdp goes with dp only, not with {', '.join(odd)}")
        if "dp" not in found and "fsdp" not in found:
            spread = found.get("ep", 1) * found.get("etp", 1)
            found["dp"] = spread // math.gcd(spread, found.get("tp", 1) * found.get("cp", 1))
        grid = cls(**found)
        if not grid.fsdp and grid.stage % (grid.ep * grid.etp):
            raise UnsupportedError(
                f"trainer grid {text!r}: ep x etp = {grid.ep * grid.etp} does not divide the tp x cp x dp = "
                f"{grid.stage} ranks of a pipeline stage: choose a dp with which it does"
            )
        return grid

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def ranks(self) -> int:
        return self.fsdp * self.dp if self.fsdp else self.stage * self.pp

    def check(self, family: Family) -> None:
        """Raise ``UnsupportedError`` unless this grid can divide ``family``; the message says by what."""
        if self.pp > family.layers:
            raise UnsupportedError(f"trainer pp={self.pp} exceeds num_hidden_layers = {family.layers}")
        if family.experts and family.experts % self.ep:
            raise UnsupportedError(f"trainer ep={self.ep} does not divide the {family.experts} experts")
        if not family.experts and self.ep > 1:
            raise UnsupportedError(f"trainer ep={self.ep}, but {family.model_type} of this config has no experts")
        for kind in family.kinds():
            check_cut(kind, self.etp if kind.expert else self.tp, "trainer etp" if kind.expert else "trainer tp")

    def stage_layers(self, layers: int) -> list[range]:
        """The layers of each stage: equal counts, and one more each for the first stages when they do not divide."""
        least, extra = divmod(layers, self.pp)
        return _ranges([least + (stage < extra) for stage in range(self.pp)])


class RolloutGrid(msgspec.Struct, frozen=True, kw_only=True):
    """How the workers of each of ``engines`` equal engines divide a model, as vLLM does.

    Workers count tp fastest, then pp and dp. With ``ep`` whole experts are spread over the dp x tp workers of a
    pipeline stage; with ``ep=1`` each of them holds a slice of every expert, cut as tp cuts a dense MLP. Attention and
    dense layers are cut by tp and repeated over dp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    engines: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``tp=8,ep=8,engines=1``. Without ``dp`` there are as many replicas as ``ep`` asks for."""
        found = parse_grid(text, ("tp", "pp", "dp", "ep", "engines"), "rollout grid")
        tp, ep = found.get("tp", 1), found.get("ep", 1)
        if "dp" not in found and ep > tp and ep % tp == 0:
            found["dp"] = ep // tp
        grid = cls(**found)
        if grid.ep not in (1, grid.tp * grid.dp):
            raise UnsupportedError(
                f"rollout grid {text!r}: ep={grid.ep}, but experts are spread over all tp x dp = "
                f"{grid.tp * grid.dp} workers of a pipeline stage, or over none (ep=1)"
            )
        return grid

    @property
    def spread(self) -> bool:
        """Whether whole experts are spread over workers."""
        return self.ep > 1

    @property
    def workers(self) -> int:
        """Workers of one engine."""
        return self.tp * self.pp * self.dp

    def place(self, worker: int) -> tuple[int, int, int]:
        """(dp, pp, tp) of a worker of an engine."""
        replica, within = divmod(worker, self.pp * self.tp)
        return replica, within // self.tp, within % self.tp

    def check(self, family: Family) -> None:
        """Raise ``UnsupportedError`` unless this grid can divide ``family``; the message says by what."""
        if self.pp > family.layers:
            raise UnsupportedError(f"rollout pp={self.pp} exceeds num_hidden_layers = {family.layers}")
        if self.spread and not family.experts:
            raise UnsupportedError(f"rollout ep={self.ep}, but {family.model_type} of this config has no experts")
        for kind in family.kinds():
            check_cut(kind, 1 if kind.expert and self.spread else self.tp, "rollout tp")

    def stage_layers(self, layers: int) -> list[range]:
        """The layers of each stage; a remainder goes to the stages before the last, backwards from the last but one."""
        least, extra = divmod(layers, self.pp)
        return _ranges([least + (self.pp - 1 - extra <= stage < self.pp - 1) for stage in range(self.pp)])

    def experts(self, count: int, dp: int, tp: int) -> range:
        """The experts of a worker: its own, the first workers one more when they do not divide, or all."""
        if not self.spread:
            return range(count)
        mine = dp * self.tp + tp
        least, extra = divmod(count, self.ep)
        start = mine * least + min(mine, extra)
        return range(start, start + least + (mine < extra))


def check_cut(kind: Kind, ways: int, what: str) -> None:
    """Raise ``UnsupportedError`` unless ``kind`` can be cut ``ways`` ways; ``what`` names who wants it."""
    if kind.cut in (Cut.WHOLE, Cut.VOCABULARY) or kind.units % ways == 0:
        return
    if kind.cut is Cut.KEY_VALUE_HEADS:
        if ways % kind.units == 0:
            return
        raise UnsupportedError(
            f"{what}={ways} neither divides nor is a multiple of {kind.what} = {kind.units}: key and value heads would "
            f"be cut apart ({kind.name})",
            tensor=kind.name,
        )
    raise UnsupportedError(
        f"{what}={ways} does not divide {kind.what} = {kind.units} ({kind.name}): choose one that does",
        tensor=kind.name,
    )


def share(kind: Kind, ways: int, index: int, *, multiple: int = 1) -> range:
    """The indices of ``kind``'s cut dimension that part ``index`` of ``ways`` holds, all of them where it is not cut.

    A vocabulary is padded to ``multiple`` and then to ``ways`` before it is divided, so the last parts may be short or
    empty; padding is not among the indices.
    """
    full = kind.shape[kind.dimension]
    if kind.cut is Cut.WHOLE:
        return range(full)
    if kind.cut is Cut.VOCABULARY:
        padded = -(-full // multiple) * multiple
        part = -(-padded // ways)
        return range(min(index * part, full), min((index + 1) * part, full))
    each = full // kind.units
    if kind.cut is Cut.KEY_VALUE_HEADS and ways > kind.units:
        head = index * kind.units // ways
        return range(head * each, (head + 1) * each)
    count = kind.units // ways
    return range(index * count * each, (index + 1) * count * each)


def _ranges(counts: list[int]) -> list[range]:
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
