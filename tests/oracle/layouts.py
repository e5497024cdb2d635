"""Where a worker stands in its engine, and the arithmetic that every architecture shares.

It knows engine ranks, pipeline stages, expert groups and padded vocabularies as vLLM counts them; it knows nothing of
any architecture's tensors and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

VOCABULARY_MULTIPLE = 64


class LayoutLike(Protocol):
    """Anything with the four numbers; the library's own layout record serves as well as ``Layout``."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def expert_parallel(self) -> bool: ...


@dataclass(frozen=True)
class Layout:
    """An engine's grid: ``dp`` replicas of ``pp`` stages of ``tp`` workers."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False


@dataclass(frozen=True)
class Place:
    """One worker's coordinates. Without expert parallelism the expert group is the worker alone."""

    tp_index: int
    pp_index: int
    dp_index: int
    ep_rank: int
    ep_size: int
    first_stage: bool
    last_stage: bool


def workers(layout: LayoutLike) -> int:
    """How many workers the engine has over all its replicas."""
    return layout.tp * layout.pp * layout.dp


def place(layout: LayoutLike, rank: int) -> Place:
    """Coordinates of engine rank ``dp_index * (pp * tp) + pp_index * tp + tp_index``."""
    if not 0 <= rank < workers(layout):
        raise ValueError(f"rank {rank} is outside an engine of {workers(layout)} workers")
    dp_index, within_replica = divmod(rank, layout.pp * layout.tp)
    pp_index, tp_index = divmod(within_replica, layout.tp)
    return Place(
        tp_index=tp_index,
        pp_index=pp_index,
        dp_index=dp_index,
        # One expert group per stage, over all replicas of that stage.
        ep_rank=dp_index * layout.tp + tp_index if layout.expert_parallel else 0,
        ep_size=layout.dp * layout.tp if layout.expert_parallel else 1,
        first_stage=pp_index == 0,
        last_stage=pp_index == layout.pp - 1,
    )


def layer_range(layers: int, pp: int, pp_index: int) -> range:
    """The layers of one stage: an even share; the remainder goes one each to the last stage but one and backwards."""
    share, remainder = divmod(layers, pp)
    counts = [share + (1 if pp - 1 - remainder <= stage < pp - 1 else 0) for stage in range(pp)]
    start = sum(counts[:pp_index])
    return range(start, start + counts[pp_index])


def expert_range(experts: int, ep_size: int, ep_rank: int) -> range:
    """The experts of one worker: consecutive; the first ``experts % ep_size`` workers hold one more."""
    share, remainder = divmod(experts, ep_size)
    start = ep_rank * share + min(ep_rank, remainder)
    return range(start, start + share + (1 if ep_rank < remainder else 0))


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """Rows of the embedding over all tp workers: up to a multiple of 64, then up to a multiple of tp."""
    padded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return -(-padded // tp) * tp


def share(size: int, tp: int, what: str) -> int:
    """``size / tp``, refused when it is not whole."""
    if size % tp:
        raise ValueError(f"{what} = {size} cannot be cut over tp = {tp}")
    return size // tp
