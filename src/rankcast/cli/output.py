"""What commands print, and how a failure ends one: JSON on stdout for programs, everything for people on stderr.

This module knows the two audiences and the exit codes that all commands share. It must not know what any command does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rankcast.errors import RankcastError

#: A command did not do what it was asked to.
FAILED = 1
#: Nobody answered, or the command line was wrong.
UNREACHABLE = 2
# Wide enough that a table's columns are not broken where nobody sees an edge, as in a log.
_WIDTH_ELSEWHERE = 160


def people() -> Console:
    """The console for people: stderr, plain where that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_ELSEWHERE)
    return console


def write_json(value: Any) -> None:
    """``value`` as one JSON object, alone on one line of stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


@contextmanager
def reported(json: bool) -> Iterator[None]:
    """End the command with exit code 1 on a ``RankcastError``: its message on stderr, or with ``json`` an object.

    The object is ``{"error": {"code", "message", "faults", "tensor", "worker"}}``. Anything else is a bug and passes.
    """
    from rankcast.errors import RankcastError

    try:
        yield
    except RankcastError as error:
        if json:
            write_json({"error": _record(error)})
        else:
            people().print(f"rankcast: {error.message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(FAILED) from None


def _record(error: RankcastError) -> dict[str, Any]:
    return {
        "code": error.code,
        "message": error.message,
        "faults": list(getattr(error, "faults", ())),
        "tensor": error.tensor,
        "worker": error.worker,
    }
