"""All engines of one sync: asking each of them at once, and reading what every worker reported.

This module knows engines, the report channel and how to tell who did not answer. It must not know sessions, schedules
or what a push is for. Every wait is bounded by lack of progress and its error names who was waited for; it ends at once
when another trainer rank has failed.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rankcast.control.client import WeightSyncClient
from rankcast.control.report_channel import ReportChannel
from rankcast.errors import EngineError
from rankcast.topology import Worker, missing_ranks
from rankcast.trainer.callers import Callers
from rankcast.trainer.engine import Engine, Replies, WorkerFault
from rankcast.wire.reports import UNREPORTED, Fault, Report

#: How often a wait looks up, to tell the other trainer ranks that it is alive, and to hear of theirs. Seconds.
PULSE = 1.0
#: How long a call that ends a failed session waits for an engine that is still busy with another one. Seconds.
BUSY_SECONDS = 5.0
#: What all calls that end a failed session may take together while other trainer ranks wait to hear how it ended.
ENDING_SECONDS = 7.0
#: What each of these calls may take when that time is up.
_LEAST_SECONDS = 1.0


class Fleet:
    """The engines that one sync must leave at the same weight version.

    ``timeout`` is in seconds without progress. ``pulse`` says to the other trainer ranks that this one is alive, and
    ``check`` raises when one of them has failed. ``alone`` says that there are no others, who would wait for this one.
    """

    def __init__(
        self,
        clients: Iterable[tuple[str, WeightSyncClient]],
        channel: ReportChannel,
        *,
        timeout: float,
        pulse: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
        alone: bool = True,
    ) -> None:
        self.engines = [Engine(client, where) for where, client in clients]
        self.callers = Callers()
        self.worker_calls = 0
        self._channel = channel
        self._timeout = timeout
        self._pulse = pulse
        self._check = check
        self._alone = alone
        self._ending = False
        #: Counts sessions that were ended: a call from before, which was not sent yet, must not come after the end.
        self.ended = 0
        self._busy = timeout
        self._until: float | None = None

    def workers(self) -> list[tuple[Engine, Worker]]:
        """Every worker of every engine, by engine and rank."""
        return [(engine, engine.workers[rank]) for engine in self.engines for rank in sorted(engine.workers)]

    @property
    def meetings(self) -> tuple[int, ...]:
        """How often each engine was met: whoever made something of what workers said keeps this beside it."""
        return tuple(engine.meetings for engine in self.engines)

    @contextlib.contextmanager
    def ending(self, *, patient: bool = False) -> Iterator[None]:
        """Within it the calls are those that end a failed session: nobody's failure stops them, and they are short.

        They wait ``BUSY_SECONDS`` for an engine that is busy, and while other trainer ranks wait, all of them together
        take about ``ENDING_SECONDS``; not so when ``patient``.
        """
        self.ended += 1
        self._ending, self._busy = True, self._timeout if patient else BUSY_SECONDS
        self._until = None if self._alone or patient else time.monotonic() + ENDING_SECONDS
        try:
            yield
        finally:
            self._ending, self._busy, self._until = False, self._timeout, None

    def each(
        self,
        what: str,
        action: Callable[[Engine], Any],
        engines: Sequence[Engine] | None = None,
        *,
        checked: bool = True,
        since: int | None = None,
    ) -> list[tuple[Engine, BaseException]]:
        """Run ``action`` for all engines at once; returns those that failed, with their errors.

        An engine that has not answered ``timeout`` seconds after the last one that did is given up and named; its call
        goes on, and holds up the next one. ``since`` is what ``ended`` was when this call was decided on, if that was
        earlier: where a session was ended since, it is not sent. With ``checked`` raises ``TrainerError`` as soon as
        another trainer rank has failed, and waits for nobody then.
        """
        asked = list(self.engines if engines is None else engines)
        checked = checked and not self._ending
        patience, ends = self._bounds()
        # Less than the whole: the error of who waited for its turn says more than ours.
        busy = min(patience, self._busy) * 0.9
        ended = self.ended if since is None else since
        done: queue.SimpleQueue[tuple[Engine, BaseException | None]] = queue.SimpleQueue()

        def run(engine: Engine) -> tuple[Engine, BaseException | None]:
            try:
                with engine.turn(what, busy):
                    if ended != self.ended:
                        raise EngineError(f"{what} was not sent to {engine.where}: its session was ended before")
                    action(engine)
            except BaseException as error:
                return engine, error
            return engine, None

        for engine in asked:
            self.callers.start(f"rankcast {what} {engine.where}", functools.partial(run, engine), done.put)
        failed: list[tuple[Engine, BaseException]] = []
        waiting = list(asked)
        deadline = time.monotonic() + patience
        while waiting:
            try:
                engine, error = done.get(timeout=min(PULSE, max(deadline - time.monotonic(), 0.01)))
            except queue.Empty:
                self._pulse()
                if checked:
                    self._check()
                if time.monotonic() > deadline:
                    late = f"did not answer {what} within {patience:.3g} s"
                    failed += [(engine, EngineError(f"{engine.where} {late}")) for engine in waiting]
                    break
                continue
            if not ends:
                deadline = time.monotonic() + patience
            waiting.remove(engine)
            if error is not None:
                failed.append((engine, error))
        return failed

    def _bounds(self) -> tuple[float, bool]:
        """How many seconds a call may take, and whether that is for all engines together, whoever makes progress."""
        if self._until is None:
            return self._timeout, False
        left = self._until - time.monotonic()
        return min(self._timeout, BUSY_SECONDS, max(left, _LEAST_SECONDS)), True

    def ask(
        self,
        call: str,
        action: Callable[[Engine], Any],
        *,
        key: Callable[[Engine], str],
        sequence: int = -1,
        engines: Sequence[Engine] | None = None,
        checked: bool = True,
        since: int | None = None,
    ) -> Replies:
        """``each``, and then what the workers reported about ``call`` under ``key(engine)`` (a request or session).

        A worker that is known and did not report is a fault, but of a call of which only faults are reported: it
        answered in step but cannot reach the channel.
        """
        asked = list(self.engines if engines is None else engines)
        errors = dict(self.each(call, action, asked, checked=checked, since=since))
        reports: list[tuple[Engine, Report]] = []
        faults: list[WorkerFault] = []
        # Engines may share a key, that of their session: what is taken for one of them is gone for the others.
        taken = {name: self._channel.take(name, call, sequence) for name in dict.fromkeys(map(key, asked))}
        for engine in asked:
            came = [report for (owner, _), report in taken[key(engine)].items() if report.request or owner == engine.id]
            self.worker_calls += max(len(engine.workers), len(came))
            reports += [(engine, report) for report in came]
            own = [WorkerFault(engine.where, report.worker.label, f) for report in came for f in report.faults]
            error = errors.get(engine)
            if error is not None and not own:
                own.append(WorkerFault.of(engine, error))
            if error is None and call not in UNREPORTED:
                own += self._silent(engine, came, key(engine))
            faults += own
        return Replies(tuple(reports), tuple(faults))

    def close(self) -> None:
        """End the threads of calls; those of calls that were given up end with them."""
        self.callers.close()

    def forget(self, name: str) -> None:
        """Drop what workers reported about a session or request that is over."""
        self._channel.forget(name)

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
        listen, secret = "pass listen='ADDRESS' that they can connect to", "set the same RANKCAST_SECRET on both sides"
        cure = f"{secret}, or {listen}" if self._channel.refused else f"{listen}, or {secret}"
        fault = Fault("engine", f"{who} cannot reach {self._channel.url}: {cure}")
        return [*faults, WorkerFault(engine.where, "", fault)]
