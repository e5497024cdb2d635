"""What people see of a demo: sizes in one kind of unit, in the live bar, in the lines and in the table."""

from __future__ import annotations

import io
import re

from rich.console import Console
from rich.progress import Progress

from rankcast.cli.demo.display import Display, SpeedColumn
from rankcast.cli.demo.messages import Moving

MIB = 2**20


def test_the_live_bar_counts_in_powers_of_1024() -> None:
    file = io.StringIO()
    display = Display()
    display._console = Console(file=file, force_terminal=True, width=200)
    with display.running():
        moving = Moving(weight_version="1", stage="install", round=0, rounds=1, done=3 * MIB, total=4 * MIB)
        display.doing("pushing")
        display.moving(moving)
        assert display._bars is not None
        display._bars.refresh()
    shown = file.getvalue()
    assert "3.0/4.0 MiB" in shown
    assert not re.search(r"\d [kMG]?B\b|\d [KMG]B\b", shown)


def test_a_speed_is_said_in_powers_of_1024_and_not_at_all_while_nobody_knows_it() -> None:
    with Progress(console=Console(file=io.StringIO())) as bars:
        bars.add_task("pushing", total=None)
        (task,) = bars.tasks
        assert SpeedColumn().render(task).plain == ""
        task.finished_speed = 3 * MIB
        assert SpeedColumn().render(task).plain == "3.0 MiB/s"
