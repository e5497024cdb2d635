"""Asking a fleet how it is: every worker's own account, every engine's, and what the two together mean.

This module knows how to ask (an ``identify`` that brings a report channel of its own) and when a fleet is whole. It
must not know sessions' rules or how an answer is shown. Asking changes nothing on an engine, needs no lease, and works
while somebody else's push is running there.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from rankcast.control.addresses import facing
from rankcast.control.client import WeightSyncClient, capability
from rankcast.control.exchange import NoAnswerError
from rankcast.control.http import HttpClient, NoRouteError
from rankcast.control.report_channel import ReportChannel
from rankcast.errors import EngineError, RankcastError
from rankcast.session import OPEN
from rankcast.topology import Worker, check_engine
from rankcast.wire.bodies import Identify
from rankcast.wire.codec import Codec
from rankcast.wire.reports import Fault, Report


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker is, as it says itself; the fields are those of ``Report``.

    ``attested_version`` is what its weights were installed as, ``weight_version`` the name that was published.
    """

    worker: Worker
    state: str
    servable: bool
    generation: int
    weight_version: str
    attested_version: str
    connection: str
    plan_hash: str
    unsent: int


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: whether it answered, what it calls its weights, and its workers by rank.

    ``weight_version`` and ``paused`` are ``None`` when the engine has no way to say. ``faults`` holds what kept the
    picture from being whole: no answer, a refusal, workers that did not report.
    """

    where: str
    reachable: bool
    weight_version: str | None
    paused: bool | None
    workers: tuple[WorkerStatus, ...]
    faults: tuple[Fault, ...]

    @property
    def worker_versions(self) -> dict[str, list[int]]:
        """The versions that workers hold, each with their ranks; empty for weights that were never pushed."""
        return self._by(lambda row: row.attested_version or row.weight_version)

    def _by(self, version: Callable[[WorkerStatus], str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for row in self.workers:
            found.setdefault(version(row), []).append(row.worker.rank)
        return found

    @property
    def served_version(self) -> str | None:
        """What this engine's answers are labelled with; without a name of its own, what its workers agree on."""
        if self.weight_version is not None or not self.reachable:
            return self.weight_version
        published = self._by(lambda row: row.weight_version)
        return next(iter(published)) if len(published) == 1 else None


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines' states mean together.

    ``weight_version`` is the one that all engines serve, or ``None``. ``mixed`` says that engines or workers were found
    at different versions. ``problems`` says in words everything that is wrong; with none, every worker is servable and
    the one version is published everywhere.
    """

    weight_version: str | None
    mixed: bool
    servable: bool
    reachable: bool
    problems: tuple[str, ...]
    engines: tuple[EngineStatus, ...]


#: How often an engine is asked while workers are silent. Asking changes nothing, and a worker of a busy machine may not
#: get its report through in the seconds that it has for it: that must not read as a broken fleet.
_TIMES = 2


def ask_status(
    clients: Iterable[tuple[str, WeightSyncClient]], codec: Codec, *, listen: str | None = None, timeout: float = 30.0
) -> list[EngineStatus]:
    """Ask every engine at once how it and its workers are; ``clients`` are pairs of a label and a client.

    ``listen`` is the address on which workers' answers are taken; by default loopback for engines on loopback, and for
    others the address that faces them. Takes at most ``timeout`` seconds in all. Never raises for what an engine does
    or cannot do: that is in the answer, which has one row for each engine, in order.
    """
    asked = list(clients)
    found: dict[int, EngineStatus] = {}
    done: queue.SimpleQueue[tuple[int, EngineStatus]] = queue.SimpleQueue()
    with ExitStack() as opened:
        channels: dict[str | None, ReportChannel | RankcastError] = {}
        for place, (where, client) in enumerate(asked):
            channel = _channel(client, codec, listen, channels, opened)
            threading.Thread(
                target=lambda *given: done.put((given[0], _ask(*given[1:]))),
                args=(place, where, client, channel, codec),
                name=f"rankcast status {where}",
                daemon=True,
            ).start()
        deadline = time.monotonic() + timeout
        while len(found) < len(asked):
            try:
                place, status = done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            found[place] = status
    return [found.get(place) or _silent(where, timeout) for place, (where, _) in enumerate(asked)]


def conclude(engines: Sequence[EngineStatus]) -> FleetStatus:
    """What ``engines``, which one push should leave at the same version, are as a fleet."""
    problems: list[str] = []
    for engine in engines:
        problems += [
            fault.message if engine.where in fault.message else f"{engine.where}: {fault.message}"
            for fault in engine.faults
        ]
        problems += [
            f"{row.worker.label} [{engine.where}] is not servable ({row.state}): {_way_out(row.state)}"
            for row in engine.workers
            if not row.servable
        ]
        problems += _disagreements(engine)
    served: dict[str, list[str]] = {}
    for engine in engines:
        if engine.served_version is not None:
            served.setdefault(engine.served_version, []).append(engine.where)
    if len(served) > 1:
        parts = "; ".join(f"{_named(version)} on {', '.join(places)}" for version, places in served.items())
        problems.append(f"the fleet is mixed: {parts}. Push to all of its engines together")
    known = all(engine.served_version is not None for engine in engines)
    return FleetStatus(
        weight_version=next(iter(served)) if known and len(served) == 1 else None,
        mixed=len(served) > 1 or any(len(engine.worker_versions) > 1 for engine in engines),
        servable=all(engine.workers and all(row.servable for row in engine.workers) for engine in engines),
        reachable=all(engine.reachable for engine in engines),
        problems=tuple(problems),
        engines=tuple(engines),
    )


def _disagreements(engine: EngineStatus) -> list[str]:
    versions = engine.worker_versions
    if len(versions) > 1:
        parts = "; ".join(f"{_named(version)} on workers {ranks}" for version, ranks in versions.items())
        return [f"the workers of {engine.where} hold different versions: {parts}. Push again"]
    installed = next(iter(versions), "")
    # A worker that never took part in a session of rankcast's has no version to compare the engine's with.
    if installed and engine.weight_version not in (None, installed):
        called = _named(str(engine.weight_version))
        return [f"{engine.where} has {_named(installed)} installed and calls it {called}: not published, push again"]
    return []


def _way_out(state: str) -> str:
    if state in OPEN:
        return "a push is under way, or its trainer died, and then the next push makes it whole"
    return "push again, which sends it everything"


def _named(version: str) -> str:
    return repr(version) if version else "weights without a version"


def _channel(
    client: WeightSyncClient,
    codec: Codec,
    listen: str | None,
    channels: dict[str | None, ReportChannel | RankcastError],
    opened: ExitStack,
) -> ReportChannel | RankcastError:
    """The started channel on which this engine's workers can answer, or why there is none."""
    try:
        address = facing([client.url]) if listen is None and isinstance(client, HttpClient) else listen
    except RankcastError as fault:
        return fault
    if address not in channels:
        try:
            channels[address] = opened.enter_context(ReportChannel(codec, listen=address))
        except RankcastError as fault:
            channels[address] = fault
    return channels[address]


def _ask(where: str, client: WeightSyncClient, channel: ReportChannel | RankcastError, codec: Codec) -> EngineStatus:
    reports: list[Report] = []
    version: str | None = None
    paused: bool | None = None
    faults: list[Fault] = []
    reachable = known = True
    try:
        if isinstance(channel, ReportChannel):
            reports = _identify(client, channel, codec)
            _check_whole(where, reports, channel.url)
        else:
            faults.append(Fault.of(channel))
    except Exception as error:
        faults.append(Fault.of(error, other="engine"))
        reachable = not _is_silence(error)
        known = not isinstance(error.__cause__, NoRouteError)
    try:
        # One that did not answer need not be waited for three times, nor one without the routes say so three times.
        if reachable and known:
            version = _version(_optional(client, "weight_info"))
            paused = _optional(client, "is_paused")
    except Exception as error:
        faults.append(Fault.of(error, other="engine"))
        reachable = not _is_silence(error)
    return EngineStatus(
        where=where,
        reachable=reachable,
        weight_version=version,
        paused=paused,
        workers=tuple(_row(report) for report in sorted(reports, key=lambda report: report.worker.rank)),
        faults=(*faults, *(fault for report in reports for fault in report.faults)),
    )


def _identify(client: WeightSyncClient, channel: ReportChannel, codec: Codec) -> list[Report]:
    found: dict[tuple[str, int], Report] = {}
    for _ in range(_TIMES):
        request = secrets.token_hex(8)
        try:
            client.init_weight_transfer_engine(codec.seal(Identify(request=request, report=channel.url)))
        except Exception:
            if found:
                break  # what the first asking brought says more than that the second one failed
            raise
        # A worker reports before its call returns: all that will come has come.
        found.update(channel.take(request, "identify"))
        if channel.refused or (found and len(found) >= next(iter(found.values())).worker.workers):
            break
    return list(found.values())


def _check_whole(where: str, reports: Sequence[Report], url: str) -> None:
    try:
        check_engine([report.worker for report in reports], where=where)
    except EngineError as fault:
        raise EngineError(
            f"{fault.message}; they were told {url}: listen on an address that they can connect to, and give both "
            "sides the same RANKCAST_SECRET or none"
        ) from None


def _optional(client: WeightSyncClient, name: str) -> Any:
    call = capability(client, name)
    return None if call is None else call()


def _version(info: Any) -> str | None:
    version = info.get("weight_version") if isinstance(info, dict) else None
    return None if version is None else str(version)


def _row(report: Report) -> WorkerStatus:
    return WorkerStatus(**{name: getattr(report, name) for name in WorkerStatus.__struct_fields__})


def _is_silence(error: Exception) -> bool:
    """Whether nobody answered, as against somebody who refused."""
    return isinstance(error, OSError) or isinstance(error.__cause__, NoAnswerError)


def _silent(where: str, timeout: float) -> EngineStatus:
    fault = Fault("engine", f"{where} did not answer within {timeout:g} s")
    return EngineStatus(where=where, reachable=False, weight_version=None, paused=None, workers=(), faults=(fault,))
