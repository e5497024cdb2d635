"""How a demo looks: lines and a live bar on standard error, and a table at the end.

This module knows words and widths. It must not know how anything was measured. Standard output is for the result alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from rankcast.cli.demo.messages import Moving
from rankcast.cli.demo.summary import Outcome
from rankcast.cli.demo.verify import TOLD, Finding
from rankcast.manifest import size
from rankcast.telemetry.report import PushReport


class SpeedColumn(ProgressColumn):
    """Bytes a second, in the same units as everything else; rich's own column has powers of 1000."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{size(speed)}/s", style="progress.data.speed")


class Display:
    """Tells people what goes on, on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars: Progress | None = None
        self._bar: TaskID | None = None

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, a terminal has a live bar under the lines; nothing else has."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            SpeedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as self._bars:
            self._bar = self._bars.add_task("starting", total=None)
            try:
                yield
            finally:
                self._bars = None

    def doing(self, what: str) -> None:
        """What the bar stands for from now on, as long as nobody knows how long it takes."""
        if self._bars is not None and self._bar is not None:
            # A task's total cannot be made unknown again.
            self._bars.remove_task(self._bar)
            self._bar = self._bars.add_task(what, total=None)

    def moving(self, event: Moving) -> None:
        """How far a push is."""
        if self._bars is not None and self._bar is not None:
            turn = min(event.round + 1, event.rounds)
            description = f"push {event.weight_version}: {event.stage}, round {turn} of {event.rounds}"
            self._bars.update(self._bar, description=description, completed=event.done, total=event.total)

    def pushed(self, loss: float, report: PushReport, finding: Finding) -> None:
        """One push and what was found after it."""
        found = "verified" if not finding.differences else f"{len(finding.differences)} differences"
        self.say(
            f"{report.weight_version:<14} loss {loss:6.3f}   {report.worker_calls:>4} calls   "
            f"{size(report.nbytes):>10}   {report.seconds:6.3f} s   {found}"
        )


def print_outcome(outcome: Outcome) -> None:
    """The table and the verdict, on standard output."""
    console = Console(highlight=False)
    layout, trainer = outcome.fleet.layout, outcome.trainer
    console.print(
        f"One push of {trainer.tensors} tensors, {size(trainer.nbytes)}, from {trainer.ranks} trainer ranks to "
        f"{outcome.fleet.workers} workers (DP{layout.dp} x TP{layout.tp}"
        f"{', expert parallel' if layout.expert_parallel else ''}):",
        soft_wrap=True,
    )
    console.print(_table(outcome))
    if outcome.verified:
        pushes = sum(mode.pushes for mode in outcome.modes.values())
        console.print(
            f"[bold]verified[/bold]: after each of {pushes} pushes, {outcome.compared_parameters} parameters "
            f"({size(outcome.compared_bytes)}) on {outcome.fleet.workers} workers, bit for bit",
            soft_wrap=True,
        )
        return
    console.print("[bold]not verified[/bold]:")
    for line in told(outcome.differences):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _table(outcome: Outcome) -> Table:
    # Narrow enough for eighty columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mode")
    for title in ("calls", "control\ncalls", "requests", "request\nKiB", "payload\nMiB", "MiB per\nworker", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, mode in outcome.modes.items():
        table.add_row(
            name,
            f"{mode.worker_calls}",
            f"{mode.control_calls}",
            f"{mode.requests}",
            f"{mode.request_bytes / 2**10:.1f}",
            f"{mode.payload_bytes / 2**20:.1f}",
            f"{max(row.nbytes for row in mode.workers) / 2**20:.1f}",
            f"{mode.seconds:.3f}",
        )
    return table


def told(differences: Sequence[str]) -> list[str]:
    """The first differences, and how many more there are."""
    more = len(differences) - TOLD
    return [*differences[:TOLD], *([f"and {more} more"] if more > 0 else [])]
