"""Asking all engines at once: one call at a time for each, short ends, and an ear for the other trainer ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from end_to_end.seen import wait_until
from rankcast.control.report_channel import ReportChannel
from rankcast.errors import TrainerError
from rankcast.trainer import fleet as asking
from rankcast.trainer.fleet import Fleet
from rankcast.wire.codec import Codec


class Slow:
    """An engine whose calls last until ``go`` is set; says how many ran at the same time."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Event()
        self.calls: list[str] = []
        self.at_once = 0
        self._running = 0
        self._counting = threading.Lock()

    def do(self, what: str) -> None:
        with self._counting:
            self._running += 1
            self.at_once = max(self.at_once, self._running)
            self.calls.append(what)
        self.entered.set()
        assert self.go.wait(60)
        with self._counting:
            self._running -= 1


class Other:
    """Another trainer rank, which fails when it is told to."""

    failed = False

    def check(self) -> None:
        if self.failed:
            raise TrainerError("trainer rank 1 died")


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.go.set()


def fleet_of(*engines: Any, other: Other | None = None, timeout: float = 30.0) -> Fleet:
    channel = ReportChannel(Codec(None))
    named = [(f"engine {number}", engine) for number, engine in enumerate(engines)]
    check = other.check if other is not None else lambda: None
    return Fleet(named, channel, timeout=timeout, check=check, alone=other is None)


def each(fleet: Fleet, what: str) -> list[str]:
    return [str(error) for _, error in fleet.each(what, lambda engine: engine.client.do(what))]


def in_background(act: Any) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_wait_for_a_slow_engine_ends_when_another_trainer_rank_fails(slow: Slow) -> None:
    other = Other()
    fleet = fleet_of(slow, other=other)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            each(fleet, "install")
        except TrainerError as error:
            raised.append(error)

    thread = in_background(ask)
    assert slow.entered.wait(10)
    other.failed = True
    thread.join(10)
    assert not thread.is_alive()
    assert [str(error) for error in raised] == ["trainer rank 1 died"]
    assert fleet.engines[0].busy


def test_what_ends_a_session_is_not_stopped_by_the_failure_that_it_is_about(slow: Slow) -> None:
    other = Other()
    other.failed = True
    fleet = fleet_of(slow, other=other)
    slow.go.set()
    with fleet.ending():
        assert each(fleet, "abort") == []
    assert slow.calls == ["abort"]


def test_an_engine_that_is_busy_is_named_with_what_it_does_and_gets_nothing_else_meanwhile(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "BUSY_SECONDS", 0.2)
    quick = Slow()
    quick.go.set()
    fleet = fleet_of(slow, quick)
    thread = in_background(lambda: each(fleet, "install"))
    assert slow.entered.wait(10)
    assert quick.entered.wait(10)
    with fleet.ending():
        said = each(fleet, "abort")
    assert said == ["engine 0 has still not answered install, so that abort could not be sent"]
    assert quick.calls == ["install", "abort"]
    slow.go.set()
    thread.join(10)
    assert each(fleet, "claim") == []
    assert slow.calls == ["install", "claim"]
    assert slow.at_once == 1


def test_whoever_ends_a_session_patiently_waits_for_the_busy_engine(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "BUSY_SECONDS", 0.01)
    fleet = fleet_of(slow)
    in_background(lambda: each(fleet, "install"))
    assert slow.entered.wait(10)
    said: list[str] = ["not yet"]

    def end() -> None:
        with fleet.ending(patient=True):
            said[:] = each(fleet, "abort")

    thread = in_background(end)
    slow.go.set()
    thread.join(20)
    assert said == []
    assert slow.calls == ["install", "abort"]


def test_calls_that_end_a_session_take_little_time_together_while_other_ranks_wait(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the bounds only their sum is looked at: three calls, none of which is answered.
    monkeypatch.setattr(asking, "BUSY_SECONDS", 0.5)
    monkeypatch.setattr(asking, "ENDING_SECONDS", 0.8)
    monkeypatch.setattr(asking, "_LEAST_SECONDS", 0.1)
    fleet = fleet_of(slow, other=Other(), timeout=600.0)
    began = time.monotonic()
    with fleet.ending():
        assert "did not answer abort" in each(fleet, "abort")[0]
        for call in ("resume", "release"):
            assert each(fleet, call) != []
    assert time.monotonic() - began < 300.0


def test_an_engine_that_makes_no_progress_is_given_up_and_named(slow: Slow) -> None:
    fleet = fleet_of(slow, timeout=0.2)
    assert each(fleet, "finish") == ["engine 0 did not answer finish within 0.2 s"]
    assert each(fleet, "abort") == ["engine 0 has still not answered finish, so that abort could not be sent"]


def test_a_call_that_waits_for_its_turn_when_the_session_is_ended_is_never_sent(slow: Slow) -> None:
    other = Other()
    fleet = fleet_of(slow, other=other)
    first = in_background(lambda: each(fleet, "prepare"))
    assert slow.entered.wait(30)
    said: list[str] = []
    second = in_background(lambda: said.extend(each(fleet, "install")))
    wait_until(lambda: any(thread.name.startswith("rankcast install") for thread in threading.enumerate()))
    with fleet.ending():
        slow.go.set()
        first.join(30)
        second.join(30)
    assert slow.calls == ["prepare"]
    assert said == ["install was not sent to engine 0: its session was ended before"]
    assert each(fleet, "start") == []
    assert slow.calls == ["prepare", "start"]
