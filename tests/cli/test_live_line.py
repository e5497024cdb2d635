"""The live line: what it says, that it stays one line, and that it says nothing where nobody looks."""

from __future__ import annotations

import io

from rich.console import Console

from rankcast.telemetry.line import LiveLine, line, live_line
from rankcast.telemetry.progress import Progress

MIB = 2**20


def at(done: int, stage: str = "install", version: str = "7") -> Progress:
    return Progress(version, stage, round=1, rounds=4, done=done, total=4 * MIB)  # type: ignore[arg-type]


def terminal(width: int = 120) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=width), file


def test_a_line_says_version_round_bytes_and_rate() -> None:
    text = line(at(2 * MIB), seconds=0.5, since=MIB)
    for part in ("push '7'", "50%", "install 2 of 4", "2.0 MiB of 4.0 MiB", "2.0 MiB/s"):
        assert part in text


def test_a_push_of_nothing_is_complete() -> None:
    text = line(Progress("7", "publish", 0, 0, 0, 0), seconds=0.0)
    assert "100%" in text
    assert "/s" not in text


def test_lines_of_one_push_lie_over_each_other_and_the_last_one_stays() -> None:
    console, file = terminal()
    live = LiveLine(console)
    live(at(MIB))
    live(at(2 * MIB))
    assert "\n" not in file.getvalue()
    live(at(4 * MIB, "publish"))
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().endswith("\n")
    size = len(file.getvalue())
    live.clear()
    assert len(file.getvalue()) == size


def test_the_line_of_a_push_that_failed_is_taken_away() -> None:
    console, file = terminal()
    live = LiveLine(console)
    live(at(MIB))
    live.clear()
    assert file.getvalue().endswith("\r\x1b[2K")


def test_a_line_never_reaches_the_edge_of_the_terminal() -> None:
    console, file = terminal(width=30)
    LiveLine(console)(at(MIB, version="a very long name of a version " * 10))
    text = file.getvalue().rpartition("\x1b[2K")[2].rstrip("\r")
    assert 0 < len(text) < 30


def test_nothing_is_written_where_stderr_is_no_terminal(capfd) -> None:
    live = live_line()
    live(at(MIB))
    live(at(4 * MIB, "publish"))
    live.clear()
    assert capfd.readouterr() == ("", "")
