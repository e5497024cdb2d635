"""One engine as trainer rank 0 sees it, and the records of what its workers answered.

This module knows an engine's client, its workers as they said themselves, and whether somebody has to resume it. It
must not know sessions, the report channel or other engines. An engine is asked one thing at a time: whoever gives up on
a call leaves it running, and the next call waits for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankcast.control.client import WeightSyncClient, capability
from rankcast.errors import EngineError, LeaseError, PushError
from rankcast.topology import Worker, check_engine
from rankcast.wire.reports import Fault, Report, Touched, Wanted


@dataclass(eq=False)
class Engine:
    """One control-plane endpoint and the workers behind it.

    ``nonces`` are what its workers' claims must carry, by rank as text. ``meetings`` counts how often they said what
    they take, so that whatever was made of an earlier answer is known to be old. ``paused_by_us`` says that resuming it
    is up to this trainer, ``paused_by_user`` that it was found paused by somebody else. ``calls`` counts optional
    calls.
    """

    client: WeightSyncClient
    where: str
    workers: dict[int, Worker] = field(default_factory=dict)
    touched: dict[int, Touched] = field(default_factory=dict)
    wanted: dict[int, Wanted] = field(default_factory=dict)
    nonces: dict[str, str] = field(default_factory=dict)
    plan_hashes: dict[int, str] = field(default_factory=dict)
    meetings: int = 0
    paused_by_us: bool = False
    paused_by_user: bool = False
    calls: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _doing: str = ""

    @property
    def id(self) -> str:
        """The engine id its workers gave."""
        return next(iter(self.workers.values())).engine if self.workers else ""

    @property
    def busy(self) -> bool:
        """Whether a call is running, also one that was given up."""
        return self._turn.locked()

    @contextlib.contextmanager
    def turn(self, call: str, patience: float) -> Iterator[None]:
        """Hold the engine for one call; raises ``EngineError`` when the last one does not end in ``patience`` s."""
        if not self._turn.acquire(timeout=patience):
            raise EngineError(f"{self.where} has still not answered {self._doing}, so that {call} could not be sent")
        try:
            self._doing = call
            yield
        finally:
            self._turn.release()

    def optional(self, name: str) -> Callable[..., Any] | None:
        """The optional call ``name`` of the client, counted in ``calls``; ``None`` when it has none."""
        found = capability(self.client, name)
        if found is None:
            return None
        call = found

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            return call(*arguments)

        return counted

    def meet(self, reports: Sequence[Report]) -> None:
        """Take the workers' identities from ``reports``; raises ``EngineError`` unless they are one whole engine."""
        check_engine([report.worker for report in reports], where=self.where)
        self.workers = {report.worker.rank: report.worker for report in reports}

    def take_over(self, reports: Iterable[Report]) -> None:
        """A trainer that died, or whose push failed, left this engine paused: resuming it is now up to us.

        Not while another trainer holds it, and not when the user had paused it before our own push failed. That weights
        are incomplete says nothing of whose the pause is: an engine may have lost them in its sleep.
        """
        ours = (report for report in reports if all(fault.code != LeaseError.code for fault in report.faults))
        if not self.paused_by_user and any(r.orphaned or r.ended for r in ours):
            self.paused_by_us = True


@dataclass(frozen=True)
class WorkerFault:
    """One fault of one worker, or of an engine as a whole when ``worker`` is empty."""

    where: str
    worker: str
    fault: Fault

    @classmethod
    def of(cls, engine: Engine, error: BaseException) -> WorkerFault:
        """An error that an engine's client raised; a foreign client's errors count as the engine's."""
        return cls(engine.where, "", Fault.of(error, other=EngineError.code))

    def __str__(self) -> str:
        return f"{self.worker or self.where}: {self.fault.message}" + (f" [{self.where}]" if self.worker else "")


@dataclass(frozen=True)
class Replies:
    """What came back from asking the whole fleet one thing."""

    reports: tuple[tuple[Engine, Report], ...]
    faults: tuple[WorkerFault, ...]

    def of(self, engine: Engine) -> list[Report]:
        return [report for asked, report in self.reports if asked is engine]


def refuse(faults: Sequence[WorkerFault], headline: str) -> None:
    """Raise ``PushError`` with every fault, or nothing when there is none."""
    if not faults:
        return
    lines = tuple(dict.fromkeys(str(fault) for fault in faults))
    tensor = next((fault.fault.tensor for fault in faults if fault.fault.tensor), None)
    codes = tuple(sorted({fault.fault.code for fault in faults}))
    raise PushError(f"{headline}: {'; '.join(lines)}", faults=lines, codes=codes, tensor=tensor)
