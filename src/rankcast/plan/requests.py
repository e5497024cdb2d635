"""How many bytes the messages of one sync are, measured on the messages themselves.

This module builds the wire's own records for a simulated sync and encodes them. It must not guess sizes, and sends
nothing. Counted are the bodies of all ``update_weights`` requests of one sync in its steady state, to all engines: when
workers already hold their schedule or their routes, from an earlier sync or from connect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rankcast.plan.cost import Simulation
from rankcast.process import ProcessIdentity
from rankcast.wire.bodies import Install, Prepare
from rankcast.wire.codec import Codec
from rankcast.wire.handles import FORMAT, ShmHandle
from rankcast.wire.payload import BareEntry, own_payload

# Values as long as real ones: ids are 32 hex digits, hosts boot ids, memory is counted in gigabytes.
_ID = "f" * 32
_OWNER = ProcessIdentity("ffffffff-ffff-ffff-ffff-ffffffffffff", "pid:[4026531836]", 1234567, 123456789)
_HANDLE = ShmHandle(FORMAT, _OWNER, 42, 2**29, 1, 1234567890)
_VERSION = "step-1000"

_codec = Codec()


def request_bytes(simulation: Simulation) -> dict[str, int]:
    """Bytes of all data-carrying requests of one sync, to all engines, by mode."""
    engines = simulation.rollout.engines
    dense = sum(_request(_bare(simulation, rows)) for rows in simulation.flushes.dense)
    groups = sum(_request(_bare(simulation, rows)) for layer in simulation.flushes.layers for rows in layer)
    lists = sum(_list_request(simulation, layer) for layer in simulation.flushes.layers)
    return {
        "broadcast": engines * (dense + groups),
        "per_layer": engines * (dense + lists),
        "ranklocal": engines * _own_requests(simulation, "ranklocal"),
        "direct": engines * _own_requests(simulation, "direct"),
    }


def _bare(simulation: Simulation, rows: Sequence[int]) -> BareEntry:
    """An entry in the seed's form that names ``rows`` in one segment."""
    own = simulation.tensors.manifest.take(rows)
    ends = np.cumsum([0, *own.sizes]).tolist()
    return BareEntry(own.names, own.dtypes, own.shapes, (_HANDLE,), tuple((0, at) for at in ends[:-1]))


def _request(payload: object) -> int:
    return len(msgspec.json.encode({"update_info": payload}))


def _list_request(simulation: Simulation, layer: Sequence[Sequence[int]]) -> int:
    """One layer's experts, as a list with an entry for each worker of an engine."""
    rows = np.array([row for group in layer for row in group], dtype=np.int64)
    sizes: dict[int, int] = {}
    total = _request([]) + simulation.rollout.workers - 1  # the commas
    for trace in simulation.plan.fleet.trace_of_worker[: simulation.rollout.workers].tolist():
        if trace not in sizes:
            own = rows[np.isin(rows, simulation.touched[trace])]
            entry: object = _bare(simulation, own.tolist()) if len(own) else {"names": []}
            sizes[trace] = len(msgspec.json.encode(entry))
        total += sizes[trace]
    return total


def _own_requests(simulation: Simulation, mode: str) -> int:
    """A prepare, and every install, to one engine."""
    traces = simulation.plan.fleet.trace_of_worker[: simulation.rollout.workers].tolist()
    installs = simulation.rounds.count if mode == "ranklocal" else 1
    handles = {trace: _segments(simulation, trace) if mode == "ranklocal" else 0 for trace in set(traces)}
    made = {trace: _prepare(simulation, mode, installs, count) for trace, count in handles.items()}
    total = _payload({rank: made[trace] for rank, trace in enumerate(traces)})
    for turn in range(installs):
        entry = _codec.seal(Install(**_addressed(simulation, turn + 1), round=turn))
        total += _payload(dict.fromkeys(range(len(traces)), entry))
    return total


def _payload(entries: Mapping[int, dict[str, str]]) -> int:
    whole: dict[int | None, dict[str, Any]] = {rank: dict(entry) for rank, entry in entries.items()}
    return _request(own_payload(whole))


def _prepare(simulation: Simulation, mode: str, installs: int, handles: int) -> dict[str, str]:
    body = Prepare(
        **_addressed(simulation, 0),
        connection=_ID,
        mode=mode,
        transport="shm",
        installs=installs,
        plan_hash=_ID,
        schedule=None,
        handles=(_HANDLE,) * handles,
    )
    return _codec.seal(body)


def _addressed(simulation: Simulation, sequence: int) -> dict[str, Any]:
    last = simulation.rollout.workers - 1
    return {
        "session": _ID,
        "engine": _ID,
        "rank": last,
        "workers": last + 1,
        "sequence": sequence,
        "weight_version": _VERSION,
    }


def _segments(simulation: Simulation, trace: int) -> int:
    """How many of the trainer ranks' buffers, two each, the worker reads from."""
    own = simulation.touched[trace]
    turns = np.array(simulation.rounds.rounds, dtype=np.int64)[own]
    return len(np.unique(simulation.owners[own] * 2 + turns % 2))
