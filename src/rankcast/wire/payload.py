"""The forms that ``update_weights`` takes, and which part of one is a given worker's.

This module knows dicts, lists and rankcast's own ``{"rankcast": 1, "entries": {...}}``, the seed's bare entries, and
how a worker picks its own by identity. It must not open entries (``codec``) or act on them. A bare list is indexed by
the worker's rank in its engine, over all data-parallel replicas, and must have exactly one entry for each worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from rankcast.errors import PayloadError, UnsupportedError
from rankcast.manifest import Manifest, TensorMeta, canonical_dtype
from rankcast.topology import Worker
from rankcast.wire.bodies import PROTOCOL, EntryBody
from rankcast.wire.handles import Handle

#: Data plane -> whether each worker can be given data of its own over it. A collective gives everyone the same.
ROUTES: dict[str, bool] = {
    "shm": True,
    "file": True,
    "cuda_ipc": True,
    "nixl": True,
    "vllm_ipc": True,
    "collective": False,
}

#: The key under which ``broadcast`` puts the one entry that is for every worker.
EVERYONE = "*"

Entry = dict[str, Any]


class BareEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry in the seed's form, for clients without a session of rankcast's: unsigned, and without a header.

    ``names``, ``dtype_names`` and ``shapes`` are columns as in vLLM's; ``segments`` are handles, and ``locations``
    gives for each tensor the index of its segment and its offset there in bytes. ``{"names": []}`` is an empty entry.
    ``transport`` names the data plane.
    """

    names: tuple[str, ...]
    dtype_names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    segments: tuple[Handle, ...] = ()
    locations: tuple[tuple[int, int], ...] = ()
    transport: str = "shm"

    def manifest(self) -> Manifest:
        """The entry's tensors; raises ``PayloadError`` on uneven columns, ``ManifestError`` on bad rows."""
        if not len(self.names) == len(self.dtype_names) == len(self.shapes) == len(self.locations):
            raise PayloadError(
                f"an entry has {len(self.names)} names, {len(self.dtype_names)} dtype_names, {len(self.shapes)} shapes "
                f"and {len(self.locations)} locations: one of each for every tensor"
            )
        dtypes = [canonical_dtype(name) for name in self.dtype_names]
        return Manifest.of(TensorMeta(n, d, s) for n, d, s in zip(self.names, dtypes, self.shapes, strict=True))


def is_routed(payload: object) -> bool:
    """Whether ``payload`` has entries of their own for different workers: a list, or rankcast's dict keyed by rank."""
    if is_own(payload) and isinstance(payload, Mapping):
        entries = payload.get("entries")
        return isinstance(entries, Mapping) and set(entries) != {EVERYONE}
    return isinstance(payload, Sequence) and not isinstance(payload, str | bytes)


def check_transport(transport: str, *, routed: bool, spoken: Collection[str] | None = None) -> None:
    """Raise ``UnsupportedError`` for an unknown data plane, and for entries of their own over one that cannot route.

    ``spoken`` are those that this side can take part in; any other is refused too (``None``: all of them).
    """
    if transport not in ROUTES:
        raise UnsupportedError(f"unknown transport {transport!r}: known are {', '.join(ROUTES)}")
    if routed and not ROUTES[transport]:
        raise UnsupportedError(
            f"a payload with an entry for each worker came for transport {transport!r}, which gives every worker the "
            "same: send one dict (mode='broadcast'), or take a transport that routes, such as 'shm'"
        )
    if spoken is not None and transport not in spoken:
        raise UnsupportedError(
            f"a payload came for transport {transport!r}, which this worker does not speak: send it over "
            f"{' or '.join(sorted(spoken))}"
        )


def own_payload(entries: Mapping[int | None, Entry]) -> dict[str, Any]:
    """All entries of one engine in one dict, keyed by worker rank; the rank ``None`` stands for every worker."""
    return {
        "rankcast": PROTOCOL,
        "entries": {EVERYONE if rank is None else str(rank): entry for rank, entry in entries.items()},
    }


def is_own(payload: object) -> bool:
    """Whether ``payload`` is in rankcast's own form."""
    return isinstance(payload, Mapping) and "rankcast" in payload


def narrow(payload: object, worker_rank: int) -> object:
    """``payload`` with only the part that the worker of ``worker_rank`` may need, for an engine that routes itself.

    Only rankcast's own dict can be narrowed; lists and bare dicts pass whole, since a list's length means something.
    """
    if not (isinstance(payload, Mapping) and is_own(payload) and isinstance(payload.get("entries"), Mapping)):
        return payload
    keep = {str(worker_rank), EVERYONE}
    return {**payload, "entries": {key: entry for key, entry in payload["entries"].items() if key in keep}}


def pick(payload: object, worker: Worker) -> Entry:
    """The entry of ``payload`` that is ``worker``'s: not yet opened, and not yet proved to be for it.

    A dict without rankcast's mark is the same entry for every worker. Raises ``PayloadError`` for a list whose length
    is not the engine's number of workers, for a payload without an entry for this worker, and for any other form.
    """
    if isinstance(payload, Mapping):
        return dict(payload) if not is_own(payload) else _pick_own(payload, worker)
    if isinstance(payload, Sequence) and not isinstance(payload, str | bytes):
        if len(payload) != worker.workers:
            raise PayloadError(
                f"a list payload has {len(payload)} entries but this engine has {worker.workers} workers over all its "
                "data-parallel replicas: send one entry for each, empty ones included",
                worker=worker.label,
            )
        return _entry(payload[worker.rank], worker)
    raise PayloadError(f"a payload is a dict or a list of dicts, got {type(payload).__name__}", worker=worker.label)


def _pick_own(payload: Mapping[str, Any], worker: Worker) -> Entry:
    if payload["rankcast"] != PROTOCOL:
        raise PayloadError(
            f"the payload speaks protocol {payload['rankcast']!r}, {worker.label} speaks {PROTOCOL}: use the same "
            "rankcast version on both sides",
            worker=worker.label,
        )
    entries = payload.get("entries")
    if set(payload) != {"rankcast", "entries"} or not isinstance(entries, Mapping):
        raise PayloadError(
            f'a rankcast payload has "rankcast" and "entries", this one has {sorted(map(str, payload))}',
            worker=worker.label,
        )
    for key in (str(worker.rank), EVERYONE):
        if key in entries:
            return _entry(entries[key], worker)
    has = ", ".join(sorted(map(str, entries))[:10])
    raise PayloadError(f"the payload has no entry for {worker.label}; it has ranks {has}", worker=worker.label)


def _entry(value: object, worker: Worker) -> Entry:
    if not isinstance(value, Mapping):
        raise PayloadError(f"the entry of {worker.label} is a {type(value).__name__}, not a dict", worker=worker.label)
    return dict(value)


def is_bare(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is in the seed's form, without header and MAC."""
    return "body" not in entry


def bare_entry(entry: Mapping[str, Any]) -> BareEntry:
    """Strictly read a bare entry; raises ``PayloadError``."""
    try:
        return msgspec.convert(entry, BareEntry)
    except (msgspec.ValidationError, ValueError) as fault:
        raise PayloadError(f"a bare entry is malformed: {fault}") from None


def check_addressee(body: EntryBody, worker: Worker) -> None:
    """Raise ``PayloadError`` unless ``body`` is for ``worker``, whatever position it came in."""
    if body.engine != worker.engine or body.workers != worker.workers or body.rank not in (None, worker.rank):
        whom = "every worker" if body.rank is None else f"worker {body.rank}"
        raise PayloadError(
            f"an entry for {whom} of {body.workers} of engine {body.engine[:8]} reached {worker.label}: "
            "it was put under the wrong rank, or the engine was restarted (the next push asks anew)",
            worker=worker.label,
        )
