"""A plan in words, for people.

This module knows a finished plan and how to say it. It must not change or decide anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankcast.errors import ManifestError
from rankcast.manifest import LISTED, size
from rankcast.plan.columns import DTYPE_NAMES, Ints

if TYPE_CHECKING:
    from rankcast.plan.routes import Plan


def summary(plan: Plan) -> str:
    """Counts and bytes of the whole plan, a line each."""
    sent, taken = plan.sender_bytes, plan.worker_bytes
    senders = sent[sent > 0]
    held = (
        f"{len(plan.manifest):,} tensors in {len(plan.pieces.tensor):,} pieces, held as {len(plan.pieces.shards):,} "
        f"shards by {len(np.unique(plan.pieces.shards.rank)):,} trainer ranks"
    )
    lines = [
        f"plan {plan.hash}: {plan.routes:,} routes, {size(int(taken.sum()))}",
        held,
        f"{len(plan.fleet):,} workers with {len(plan.fleet.traces):,} different traces",
        f"a worker reads {_spread(taken)}",
        f"a trainer rank sends {_spread(senders)}; {len(sent) - len(senders):,} ranks send nothing",
    ]
    return "\n".join(lines)


def tensor(plan: Plan, name: str) -> str:
    """Who holds the tensor ``name`` and who reads what of it from whom; long lists are cut and counted."""
    index = plan.manifest.index.get(name)
    if index is None:
        raise ManifestError(f"{name} is no tensor of this plan: it has {len(plan.manifest):,} others", tensor=name)
    meta = plan.manifest.row(index)
    dims = len(meta.shape)
    pieces = np.flatnonzero(plan.pieces.tensor == index)
    lines = [f"{meta}: held in {len(pieces):,} pieces"]
    for piece in pieces[:LISTED].tolist():
        first, count = int(plan.pieces.first[piece]), int(plan.pieces.count[piece])
        ranks = plan.pieces.shards.rank[first : first + count]
        dtype = DTYPE_NAMES[plan.pieces.shards.dtype[first]]
        box = _box(plan.pieces.starts[piece], plan.pieces.sizes[piece], dims)
        lines.append(f"  {box} {dtype} on trainer ranks {_some(ranks)}")
    if len(pieces) > LISTED:
        lines.append(f"  and {len(pieces) - LISTED:,} more pieces")
    rows = [line for worker in range(len(plan.fleet)) for line in _reads(plan, worker, index, dims)]
    if not rows:
        lines.append("no worker wants any of it" if len(pieces) else "no worker wants it and no trainer rank holds it")
    lines += rows[: 4 * LISTED]
    if len(rows) > 4 * LISTED:
        lines.append(f"  and {len(rows) - 4 * LISTED:,} more routes")
    return "\n".join(lines)


def _reads(plan: Plan, worker: int, index: int, dims: int) -> list[str]:
    trace = int(plan.fleet.trace_of_worker[worker])
    own, names = plan.crossings.of(trace), plan.fleet.parameters
    rows = np.flatnonzero(plan.crossings.destinations.tensor[plan.crossings.destination[own]] == index)
    lines = []
    for row in rows.tolist():
        crossing = own.start + row
        shard = int(plan.chosen[int(plan.bounds[worker]) + row])
        parameter = int(plan.crossings.destinations.parameter[plan.crossings.destination[crossing]])
        into = names[trace][parameter] if names else f"its parameter number {parameter}"
        box = _box(plan.crossings.starts[crossing], plan.crossings.sizes[crossing], dims)
        lines.append(
            f"  worker {worker} reads {box} from trainer rank {int(plan.pieces.shards.rank[shard])} into {into}"
        )
    return lines


def _box(starts: Ints, sizes: Ints, dims: int) -> str:
    pairs = list(zip(starts.tolist(), sizes.tolist(), strict=True))[:dims]
    return "[" + ", ".join(f"{start}:{start + count}" for start, count in pairs) + "]"


def _some(ranks: np.ndarray[tuple[int], np.dtype[np.int32]]) -> str:
    more = f" and {len(ranks) - LISTED:,} more" if len(ranks) > LISTED else ""
    return ", ".join(map(str, ranks[:LISTED].tolist())) + more


def _spread(values: Ints) -> str:
    if not len(values):
        return "nothing"
    return f"{size(int(values.min()))} to {size(int(values.max()))}, {size(float(values.mean()))} on average"
