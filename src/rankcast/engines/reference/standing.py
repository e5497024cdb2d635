"""How each worker of the fleet stands, and what that allows the engine to do.

This module knows the workers' last reports and the engine's weight version. It must not know processes, requests or
payloads. A worker's state changes only by a call, so what its last report says is how it stands now.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rankcast.errors import NotServableError, StateError
from rankcast.session import OPEN, State
from rankcast.wire.reports import Report


class WorkerStanding(msgspec.Struct, frozen=True):
    """One worker's state (a ``session.State``), whether it may serve, and how many sessions it has completed."""

    rank: int
    state: str = State.IDLE
    servable: bool = True
    generation: int = 0


class Standing:
    """All workers of one engine.

    ``uneven`` says what some workers did in this session and others did not: such a session can only be aborted.
    ``mixed`` says that some workers finished a session and others did not: the engine serves nothing until a session
    has brought weights to all of them and is finished on all. ``weight_version`` is empty between a session that wrote
    and its publication: the old name would be wrong for what is served then, and the new one is not given yet.
    """

    def __init__(self, workers: int, weight_version: str = "default") -> None:
        self.workers = tuple(WorkerStanding(rank) for rank in range(workers))
        self.weight_version = weight_version
        self.uneven: str | None = None
        self.mixed: str | None = None
        self._wrote = False

    @property
    def session_open(self) -> bool:
        """Whether an update session is open on any worker."""
        return any(worker.state in OPEN for worker in self.workers)

    def note(self, call: str, reports: Sequence[Report]) -> None:
        """Take the reports of one call, one of each worker in order of rank."""
        self.workers = tuple(
            WorkerStanding(rank, report.state, report.servable, report.generation)
            for rank, report in enumerate(reports)
        )
        failed = [report.worker.rank for report in reports if report.faults]
        partly = f"{call} failed on workers {failed} and not on the others" if 0 < len(failed) < len(reports) else None
        if not self.session_open:
            self.uneven = None
        if call in ("start", "update") and self.session_open:
            self.uneven = self.uneven or partly
        if call == "finish" and not failed:
            # Only weights for every worker make them alike again: a session may have brought nothing.
            self.mixed = None if all(report.wrote for report in reports) else self.mixed
        elif call == "finish" and partly is not None:
            self.mixed = partly
        self._wrote = self._wrote or not all(worker.servable for worker in self.workers)
        if call == "finish" and not failed and self._wrote:
            self.weight_version, self._wrote = "", False

    def check_call(self, call: str) -> None:
        """Raise ``StateError`` for a finish of a session in which workers went different ways."""
        if call == "finish" and self.uneven is not None:
            raise StateError(
                f"finish, but {self.uneven}: abort the session (POST /abort_weight_update) and send all again"
            )

    def check_servable(self) -> None:
        """Raise ``NotServableError`` unless every worker's weights are complete and of one session."""
        unfit = [f"worker {worker.rank} ({worker.state})" for worker in self.workers if not worker.servable]
        if unfit:
            raise NotServableError(
                f"the weights of {', '.join(unfit)} of {len(self.workers)} are incomplete: finish the update, or push "
                "all weights again"
            )
        if self.mixed is not None:
            raise NotServableError(f"the workers hold different weights ({self.mixed}): push all weights again")

    def check_resumable(self) -> None:
        """Raise ``StateError`` while an update session is open."""
        if self.session_open:
            where = [worker.rank for worker in self.workers if worker.state in OPEN]
            raise StateError(f"an update session is open on workers {where}: finish or abort it before resuming")

    def check_publishable(self) -> None:
        """Raise unless the weights are whole and settled, so that they may be given a version."""
        if self.session_open:
            raise StateError("the weight version cannot be set while an update session is open: finish or abort it")
        self.check_servable()
