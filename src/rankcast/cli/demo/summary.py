"""What a demo came to, as one record, and the numbers that are kept of each mode.

This module knows which numbers are kept and how they are drawn from the reports of several pushes. It must not know how
they were measured or are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from rankcast.cli.demo.verify import Finding
from rankcast.engines.reference.layout import Layout
from rankcast.telemetry.report import PushReport, WorkerRow


class TrainerFacts(msgspec.Struct, frozen=True):
    """The trainer's side: how many ranks, and what they hold together."""

    ranks: int
    experts_per_rank: int
    tensors: int
    nbytes: int


class FleetFacts(msgspec.Struct, frozen=True):
    """The rollout side."""

    engines: int
    workers: int
    layout: Layout


class ModeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One mode's numbers, each for **one push**.

    Counters and ``workers`` are of the last push: they are the same for every push but the first, which also carries
    what is said only once (``first_push_request_bytes``). ``seconds`` and ``stage_seconds`` are medians over the pushes
    behind the first, or of the first where there is only one. ``worker_calls`` are update calls that carry data and
    ``control_calls`` all others, summed over workers; ``payload_bytes`` is what workers say they were handed,
    ``staged_bytes`` what the trainer ranks copied for that.
    """

    pushes: int
    worker_calls: int
    control_calls: int
    requests: int
    request_bytes: int
    payload_bytes: int
    staged_bytes: int
    rounds: int
    seconds: float
    first_push_seconds: float
    first_push_request_bytes: int
    stage_seconds: dict[str, float]
    log_prob_gap: float | None
    workers: tuple[WorkerRow, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A whole demo. ``losses`` are the training losses before each step, over all modes in order.

    ``verified`` says that after every push every parameter of every worker was what the oracle says, and the fleet
    served it; ``differences`` says what was not. ``compared_parameters`` and ``compared_bytes`` are of one push, over
    all workers.
    """

    verified: bool
    differences: tuple[str, ...]
    compared_parameters: int
    compared_bytes: int
    fleet: FleetFacts
    trainer: TrainerFacts
    steps: int
    losses: tuple[float, ...]
    seconds: float
    modes: dict[str, ModeSummary]


def mode_summary(reports: Sequence[PushReport], findings: Sequence[Finding]) -> ModeSummary:
    """The numbers of one mode, from its pushes in order (at least one)."""
    first, last = reports[0], reports[-1]
    steady = reports[1:] or reports
    gap = max(finding.log_prob_gap for finding in findings)
    return ModeSummary(
        pushes=len(reports),
        worker_calls=last.worker_calls,
        control_calls=last.control_calls,
        requests=last.requests,
        request_bytes=last.request_bytes,
        payload_bytes=last.nbytes,
        staged_bytes=last.staged_bytes,
        rounds=last.rounds,
        seconds=statistics.median(report.seconds for report in steady),
        first_push_seconds=first.seconds,
        first_push_request_bytes=first.request_bytes,
        stage_seconds={
            stage: statistics.median(report.stage_seconds[stage] for report in steady) for stage in last.stage_seconds
        },
        log_prob_gap=gap,
        workers=last.workers,
    )
