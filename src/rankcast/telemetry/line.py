"""One live line on a terminal that says how far a push is.

This module knows how a ``Progress`` reads to a person. It must not know who pushes. There is no thread and nothing to
stop: whatever becomes of the push, the terminal is left as it was. Where stderr is no terminal nothing is written.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from rankcast.manifest import size
from rankcast.telemetry.progress import Progress

_BAR = 20


class LiveLine:
    """Takes ``Progress`` records and shows the last one: round, bytes, and their rate since the push's first record.

    The line of a published push stays; ``clear`` takes away one of a push that ended otherwise. ``console`` is where
    it is shown (default: stderr).
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._version: str | None = None
        self._began = 0.0
        self._first = 0
        self._shown = False

    def __call__(self, progress: Progress) -> None:
        if not self._console.is_terminal:
            return
        now = time.monotonic()
        if progress.weight_version != self._version:
            self._version, self._began, self._first = progress.weight_version, now, progress.done
        text = line(progress, seconds=now - self._began, since=self._first)
        published = progress.stage == "publish"
        self._erase()
        # The cursor goes back to the start of the line, so that whoever writes next writes over it and not behind it.
        self._console.out(text[: self._console.width - 1], end="\n" if published else "\r", highlight=False)
        self._shown = not published
        if published:
            self._version = None

    def clear(self) -> None:
        """Take the line away, if one is shown."""
        if self._shown:
            self._erase()
            self._shown = False

    def _erase(self) -> None:
        if not self._console.is_dumb_terminal:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def live_line() -> LiveLine:
    """A callback for ``connect(progress=...)`` that keeps one line on stderr; silent when that is no terminal."""
    return LiveLine()


def line(progress: Progress, *, seconds: float, since: int = 0) -> str:
    """``progress`` as text; ``seconds`` and ``since`` (bytes) are where its rate is counted from."""
    part = progress.done / progress.total if progress.total else 1.0
    filled = min(_BAR, int(part * _BAR))
    parts = [f"push {progress.weight_version!r}", f"[{'#' * filled}{'.' * (_BAR - filled)}] {part:4.0%}"]
    if progress.stage == "publish":
        parts.append("published")
    else:
        parts.append(f"{progress.stage} {min(progress.round + 1, progress.rounds)} of {progress.rounds}")
    parts.append(f"{size(progress.done)} of {size(progress.total)}")
    moved = progress.done - since
    if seconds > 0 and moved > 0:
        parts.append(f"{size(moved / seconds)}/s")
    return "  ".join(parts)
