"""Engines that a trainer left paused: whoever publishes next resumes them, unless it was the user who paused them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoints import as_torch
from fleets_inprocess import Stream, WatchedClient
from rankcast import PushError
from trainer.two_engines import NEW, NEXT, OLD, Mortal, Two, connect, connect_as, silence


class Caching(WatchedClient):
    """An engine with a prefix cache, which ``resets`` or not, and with a pause that can take until a test allows it."""

    resets = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pausing = threading.Event()
        self.pausing.set()
        self.asked = threading.Event()

    def reset_prefix_cache(self) -> bool:
        return self.resets

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        self.asked.set()
        assert self.pausing.wait(60)
        super().pause(mode, clear_cache)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two(client=Caching)
    yield made
    made.close()


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    made = Mortal()
    yield made
    made.kill()


def paused(two: Two) -> list[bool]:
    return [client.paused for client in two.clients]


def assert_next_trainer_publishes_and_resumes(two: Two, clients: Any = None) -> None:
    with connect(clients or two.clients, Stream(as_torch(NEXT))) as sync:
        sync.push("next")
        assert [client.paused for client in clients or two.clients] == [False] * len(clients or two.clients)
        assert {client.weight_version for client in clients or two.clients} == {"next"}


@pytest.mark.parametrize("broken", ["version", "cache"])
def test_after_a_publication_that_failed_half_way_the_next_trainer_resumes(broken: str, two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        if broken == "version":
            two.clients[1].fail["version"] = TimeoutError("busy")
        else:
            two.clients[1].resets = False  # type: ignore[attr-defined]
        with pytest.raises(PushError, match="Engines stay paused") as failure:
            sync.push("2")
        assert paused(two) == [True, True]
    said = str(failure.value)
    if broken == "version":
        assert "engines that may carry '2' although it is not published: WatchedClient" not in said
        assert "may carry '2' although it is not published: Caching 0, Caching 1 (not known)" in said
    else:
        assert "Caching 1 did not reset its prefix cache" in said
    assert "complete at '2', which is not published" in said
    two.clients[1].fail.clear()
    two.clients[1].resets = True  # type: ignore[attr-defined]
    assert_next_trainer_publishes_and_resumes(two)
    assert two.differences(NEXT) == []


@pytest.mark.parametrize("again", ["same", "another"])
@pytest.mark.parametrize("call", ["start", "prepare"])
@pytest.mark.parametrize("broken", ["version", "cache", "finish"])
def test_after_a_publication_that_failed_a_push_that_is_refused_resumes_nobody(
    broken: str, call: str, again: str, two: Two
) -> None:
    """The weights that each worker has kept since are not those that the fleet last served under one name."""
    first = connect(two.clients, Stream(as_torch(NEW)))
    second = two.clients[1]
    if broken == "cache":
        second.resets = False  # type: ignore[attr-defined]
    else:
        second.fail[broken] = TimeoutError("busy")
    with pytest.raises(PushError, match="Engines stay paused"):
        first.push("2")
    second.fail.clear()
    second.resets = True  # type: ignore[attr-defined]
    if again == "another":
        first.close()
    sync = first if again == "same" else connect(two.clients, Stream(as_torch(NEXT)))
    two.clients[0].fail[call] = ConnectionError("lost")
    for _ in range(2):
        with pytest.raises(PushError, match=r"complete at '2', which is not published.*Engines stay paused"):
            sync.push("3")
        assert paused(two) == [True, True]
    two.clients[0].fail.clear()
    sync.close()
    assert paused(two) == [True, True]
    assert_next_trainer_publishes_and_resumes(two)
    assert two.differences(NEXT) == []
    # What is published is what a push that is refused goes back to.
    with connect(two.clients, Stream(as_torch(NEW))) as last:
        two.clients[0].fail[call] = ConnectionError("lost")
        with pytest.raises(PushError, match="every worker still serves the weights it had before"):
            last.push("4")
        assert paused(two) == [False, False]
    two.clients[0].fail.clear()


@pytest.mark.parametrize("call", ["start", "prepare"])
def test_a_refused_connect_in_between_does_not_make_the_fleet_forget_that_a_dead_trainer_paused_it(
    call: str, two: Two, mortal: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = connect_as(mortal, monkeypatch, two.clients, Stream(as_torch(NEW)))
    silence(two.clients, call)
    with pytest.raises(PushError):
        gone.push("half")
    for client in two.clients:
        client.fail.clear()
    mortal.kill()
    assert paused(two) == [True, True]
    wrong = {name: tensor for name, tensor in as_torch(NEW).items() if "o_proj" not in name}
    with pytest.raises(PushError, match="missing tensors leave"):
        connect(two.clients, Stream(wrong))
    assert paused(two) == [True, True]
    assert_next_trainer_publishes_and_resumes(two)
    silence(two.clients)
    gone.close()


@pytest.mark.parametrize("written", [True, False], ids=["half written", "untouched"])
def test_an_engine_that_was_kept_paused_because_another_one_died_is_resumed_by_a_push_to_it_alone(
    written: bool, two: Two
) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        silence([two.clients[1]], "install", "finish")
        if not written:
            two.clients[0].fail["install"] = ConnectionError("the network is gone")
        with pytest.raises(PushError, match="Engines stay paused"):
            sync.push("2")
        assert two.fleets[0].servable == [not written] * 2
        assert paused(two) == [True, True]
    two.clients[0].fail.clear()
    assert_next_trainer_publishes_and_resumes(two, [two.clients[0]])
    assert two.fleets[0].differences(NEXT) == []


def test_an_engine_that_did_not_resume_after_publication_is_resumed_by_the_next_trainer(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.clients[0].fail["resume"] = TimeoutError("busy")
        with pytest.raises(PushError, match="'2' is published but an engine did not resume"):
            sync.push("2")
    two.clients[0].fail.clear()
    assert paused(two) == [True, False]
    assert_next_trainer_publishes_and_resumes(two)


def test_what_the_user_had_paused_stays_paused_also_over_a_push_that_failed(two: Two) -> None:
    two.clients[0].paused = True
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.clients[1].fail["install"] = ConnectionError("lost")
        with pytest.raises(PushError, match="unusable until the next full push"):
            sync.push("2")
        two.clients[1].fail.clear()
        for version in ("3", "4"):
            sync.push(version)
            assert paused(two) == [True, False]
        assert two.differences(NEW) == []


def test_a_trainer_that_is_refused_by_a_lease_does_not_resume_what_the_holder_paused(two: Two) -> None:
    seen: list[list[bool]] = []
    with connect(two.clients, Stream(as_torch(NEXT))) as other, connect(two.clients, Stream(as_torch(NEW))) as sync:

        def intrude() -> None:
            two.clients[0].before.clear()
            for act in (lambda: other.push("theirs"), lambda: connect(two.clients, Stream(as_torch(NEXT)))):
                with pytest.raises(PushError) as refusal:
                    act()
                assert refusal.value.codes == ("lease",)
                seen.append(paused(two))

        # The workers are not servable then.
        two.clients[0].before["finish"] = intrude
        sync.push("ours")
        assert seen == [[True, True]] * 2
        assert paused(two) == [False, False]


def test_a_pause_that_failed_but_took_hold_is_undone(two: Two) -> None:
    late = two.clients[1]

    def pause_and_say_nothing(mode: str = "keep", clear_cache: bool = True) -> None:
        late.paused = True
        raise TimeoutError("no answer; whether it was done is not known")

    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(late, "pause", pause_and_say_nothing)
            with pytest.raises(PushError, match="whether it was done is not known"):
                sync.push("2")
        assert paused(two) == [False, False]
        assert two.differences(OLD) == []


def test_an_engine_that_pauses_after_it_was_given_up_is_named_and_resumed_by_the_next_push(two: Two) -> None:
    late = two.clients[1]
    assert isinstance(late, Caching)
    with connect(two.clients, Stream(as_torch(NEW)), timeout=5) as sync:
        late.pausing.clear()
        with pytest.raises(PushError, match="did not answer pause") as failure:
            sync.push("2")
        said = str(failure.value)
        assert "Caching 1 may be paused now, or pause later, and could not be resumed" in said
        assert paused(two) == [False, False]
        assert two.differences(OLD) == []
        late.pausing.set()
        sync.push("3")
        assert paused(two) == [False, False]
        assert two.differences(NEW) == []


def test_an_engine_that_pauses_after_it_was_given_up_is_resumed_when_the_sync_is_closed(two: Two) -> None:
    late = two.clients[1]
    assert isinstance(late, Caching)
    with connect(two.clients, Stream(as_torch(NEW)), timeout=5) as sync:
        late.pausing.clear()
        with pytest.raises(PushError, match="did not answer pause"):
            sync.push("2")
        late.pausing.set()
    assert paused(two) == [False, False]
    assert not any(receiver.session_open for fleet in two.fleets for receiver in fleet.receivers)
