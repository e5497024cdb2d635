"""All engines of one sync: asking each of them at once, and reading what every worker reported.

This module knows engines' clients, the report channel and how to tell who did not answer. It must not know sessions,
schedules or what a push is for. Every wait is bounded by lack of progress and its error names who was waited for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankcast.control.client import WeightSyncClient
from rankcast.control.report_channel import ReportChannel
from rankcast.errors import EngineError, PushError, RankcastError
from rankcast.topology import Worker, check_engine, missing_ranks
from rankcast.wire.reports import Fault, Report, Touched, Wanted

#: How often a wait looks up, to tell the other trainer ranks that it is alive. Seconds.
PULSE = 1.0


@dataclass
class Engine:
    """One control-plane endpoint and the workers behind it, as they said themselves."""

    client: WeightSyncClient
    where: str
    workers: dict[int, Worker] = field(default_factory=dict)
    touched: dict[int, Touched] = field(default_factory=dict)
    wanted: dict[int, Wanted] = field(default_factory=dict)
    plan_hashes: dict[int, str] = field(default_factory=dict)
    paused_by_us: bool = False

    @property
    def id(self) -> str:
        """The engine id its workers gave."""
        return next(iter(self.workers.values())).engine if self.workers else ""

    def meet(self, reports: Sequence[Report]) -> None:
        """Take the workers' identities from ``reports``; raises ``EngineError`` unless they are one whole engine."""
        check_engine([report.worker for report in reports], where=self.where)
        self.workers = {report.worker.rank: report.worker for report in reports}

    def take_over(self, reports: Iterable[Report]) -> None:
        """A dead trainer's session, or a failed push, left this engine paused: resuming it is now up to us."""
        if any(report.ended or not report.servable for report in reports):
            self.paused_by_us = True


@dataclass(frozen=True)
class WorkerFault:
    """One fault of one worker, or of an engine as a whole when ``worker`` is empty."""

    where: str
    worker: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.worker or self.where}: {self.fault.message}" + (f" [{self.where}]" if self.worker else "")


@dataclass(frozen=True)
class Answer:
    """What came back from asking the whole fleet one thing."""

    reports: tuple[tuple[Engine, Report], ...]
    faults: tuple[WorkerFault, ...]

    def of(self, engine: Engine) -> list[Report]:
        return [report for asked, report in self.reports if asked is engine]


class Fleet:
    """The engines that one sync must leave at the same weight version."""

    def __init__(
        self,
        clients: Iterable[tuple[str, WeightSyncClient]],
        channel: ReportChannel,
        *,
        timeout: float,
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self.engines = [Engine(client, where) for where, client in clients]
        self.worker_calls = 0
        self._channel = channel
        self._timeout = timeout
        self._pulse = pulse

    def workers(self) -> list[tuple[Engine, Worker]]:
        """Every worker of every engine, by engine and rank."""
        return [(engine, engine.workers[rank]) for engine in self.engines for rank in sorted(engine.workers)]

    def each(
        self, what: str, action: Callable[[Engine], Any], engines: Sequence[Engine] | None = None
    ) -> list[tuple[Engine, BaseException]]:
        """Run ``action`` for all engines at once; returns those that failed, with their errors.

        An engine that has not answered ``timeout`` seconds after the last one that did is given up and named.
        """
        asked = list(self.engines if engines is None else engines)
        done: queue.SimpleQueue[tuple[Engine, BaseException | None]] = queue.SimpleQueue()

        def run(engine: Engine) -> None:
            try:
                action(engine)
            except BaseException as error:
                done.put((engine, error))
            else:
                done.put((engine, None))

        for engine in asked:
            threading.Thread(target=run, args=(engine,), name=f"rankcast {what} {engine.where}", daemon=True).start()
        failed: list[tuple[Engine, BaseException]] = []
        waiting = list(asked)
        deadline = time.monotonic() + self._timeout
        while waiting:
            try:
                engine, error = done.get(timeout=PULSE)
            except queue.Empty:
                self._pulse()
                if time.monotonic() > deadline:
                    late = f"did not answer {what} within {self._timeout:g} s"
                    failed += [(engine, EngineError(f"{engine.where} {late}")) for engine in waiting]
                    break
                continue
            deadline = time.monotonic() + self._timeout
            waiting.remove(engine)
            if error is not None:
                failed.append((engine, error))
        return failed

    def ask(
        self,
        call: str,
        action: Callable[[Engine], Any],
        *,
        key: Callable[[Engine], str],
        sequence: int = -1,
        engines: Sequence[Engine] | None = None,
    ) -> Answer:
        """``each``, and then what the workers reported about ``call`` under ``key(engine)`` (a request or session).

        A worker that is known and did not report is a fault: it answered in step but cannot reach the channel.
        """
        asked = list(self.engines if engines is None else engines)
        errors = {id(engine): error for engine, error in self.each(call, action, asked)}
        reports: list[tuple[Engine, Report]] = []
        faults: list[WorkerFault] = []
        # Engines may share a key, that of their session: what is taken for one of them is gone for the others.
        taken = {name: self._channel.take(name, call, sequence) for name in dict.fromkeys(map(key, asked))}
        for engine in asked:
            came = [report for (owner, _), report in taken[key(engine)].items() if report.request or owner == engine.id]
            self.worker_calls += max(len(engine.workers), len(came))
            reports += [(engine, report) for report in came]
            own = [WorkerFault(engine.where, report.worker.label, f) for report in came for f in report.faults]
            error = errors.get(id(engine))
            if error is not None and not own:
                own.append(WorkerFault(engine.where, "", fault_of(error)))
            if error is None:
                own += self._silent(engine, came, key(engine))
            faults += own
        return Answer(tuple(reports), tuple(faults))

    def forget(self, session: str) -> None:
        """Drop what workers reported about ``session`` too late to be read."""
        self._channel.forget(session)

    def _silent(self, engine: Engine, came: Sequence[Report], name: str) -> list[WorkerFault]:
        """A fault for each worker that said nothing of this call: what it said instead, or that it cannot reach us."""
        ranks = [report.worker.rank for report in came]
        expected = came[0].worker.workers if came else max(len(engine.workers), 1)
        faults: list[WorkerFault] = []
        silent = []
        for rank in missing_ranks(ranks, expected):
            # A worker that could not read its entry does not know which call it was, but says why.
            last = self._channel.latest(engine.id, rank)
            if last is not None and last.session == name and last.faults:
                faults += [WorkerFault(engine.where, last.worker.label, fault) for fault in last.faults]
            else:
                silent.append(rank)
        if not silent:
            return faults
        who = f"worker{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))} of {engine.where}"
        cure = "pass listen='ADDRESS' that they can connect to, or set the same RANKCAST_SECRET on both sides"
        fault = Fault("engine", f"{who} cannot reach {self._channel.url}: {cure}")
        return [*faults, WorkerFault(engine.where, "", fault)]


def fault_of(error: BaseException) -> Fault:
    """A fault from an error that an engine's client raised; a foreign client's errors count as the engine's."""
    return Fault.of(error) if isinstance(error, RankcastError) else Fault("engine", f"{type(error).__name__}: {error}")


def refuse(faults: Sequence[WorkerFault], headline: str) -> None:
    """Raise ``PushError`` with every fault, or nothing when there is none."""
    if not faults:
        return
    lines = tuple(dict.fromkeys(str(fault) for fault in faults))
    tensor = next((fault.fault.tensor for fault in faults if fault.fault.tensor), None)
    codes = tuple(sorted({fault.fault.code for fault in faults}))
    raise PushError(f"{headline}: {'; '.join(lines)}", faults=lines, codes=codes, tensor=tensor)
