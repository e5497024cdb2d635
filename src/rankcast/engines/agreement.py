"""What an engine concludes from the reports of all its workers, each of which knows of itself only.

This module knows reports. It must not know engines, or how a call reached the workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankcast.wire.reports import Report


def partly_written(finished: Sequence[Report]) -> str | None:
    """Why the session that all workers have finished left them with different weights, or ``None``.

    ``finished`` are the reports of a finish without faults. Nothing for any worker is fine, and so is nothing for a
    worker that keeps no parameters.
    """
    without = [report.worker.rank for report in finished if not report.wrote]
    if not 0 < len(without) < len(finished):
        return None
    given = [report.worker.rank for report in finished if report.wrote]
    return (
        f"finish, but this session brought weights for workers {given} and nothing for workers {without}, so they hold "
        "different weights now: push all weights again, to every worker"
    )
