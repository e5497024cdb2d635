"""The checks of ``conftest`` that nothing is left behind: cheap, and as strict as if nothing were remembered.

It knows how a process is known as this run's. It must not know what any other test starts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

#: Lives until its input ends; the first byte lets it go on as a program with another environment.
_CHANGES = "import os; os.read(0, 1); os.execve('/bin/cat', ['cat'], {'NOT': 'ours'})"


@pytest.fixture
def checks(request: pytest.FixtureRequest) -> Any:
    (found,) = [plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "_started_by_us")]
    return found


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", _CHANGES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with made:
        yield made
        made.kill()


def marked(checks: Any, pid: int) -> bool:
    return bool(checks._is_marked(pid, checks._status(pid).incarnation))


def test_a_process_is_asked_for_its_environment_once(
    checks: Any, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []
    read = checks._read
    while not marked(checks, child.pid):  # it has no environment for a moment while it starts
        assert child.poll() is None
    monkeypatch.setattr(checks, "_read", lambda pid, what: asked.append((pid, what)) or read(pid, what))
    for _ in range(2):
        assert child.pid in checks._started_by_us()
    assert asked.count((child.pid, "stat")) == 2
    assert (child.pid, "environ") not in asked


def test_a_process_that_went_on_as_another_program_is_asked_again(checks: Any, child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    while not marked(checks, child.pid):
        assert child.poll() is None
    child.stdin.write(b"xline\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"line\n"
    assert not marked(checks, child.pid)
    assert child.pid in checks._started_by_us(), "it is still a child of this process"


def test_what_is_remembered_of_a_process_goes_when_it_is_gone(checks: Any, child: subprocess.Popen[bytes]) -> None:
    assert child.pid in checks._started_by_us()
    child.kill()
    child.wait()
    assert child.pid not in checks._started_by_us()
    assert child.pid not in checks._marked
