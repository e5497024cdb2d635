"""Sessions over a whole fleet: who holds it, in which order calls go out, and who is met again after a restart."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import rankcast
from checkpoints import as_torch, tiny_config
from fleets_inprocess import Failing, Fleet, Stream
from rankcast import PushError
from rankcast.engines.reference.layout import Layout
from rankcast.trainer.callers import Callers
from trainer.two_engines import CONFIG, LAYOUT, NEW, NEXT, OLD, Mortal, Two, connect, connect_as, silence


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


# -- order -----------------------------------------------------------------------------------------------------------


def test_calls_go_out_in_the_order_of_a_session_and_no_stage_begins_before_the_last_one_ended_everywhere(
    two: Two,
) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.log.clear()
        rounds = sync.push("2").rounds
        assert rounds > 2
        stages = ["claim", "pause", "start", "prepare", *["install"] * rounds, "finish", "version", "resume", "release"]
        for name in ("engine 0", "engine 1"):
            asked = [what for who, what in two.log if who == name and not what.endswith(" answered")]
            assert asked == stages
        for earlier, later in itertools.pairwise(stages):
            if earlier != later:
                assert max(two.places(f"{earlier} answered")) < min(two.places(later))
        # Of the installs, the next goes to nobody before the one before is answered by all.
        begun, over = two.places("install"), two.places("install answered")
        for turn in range(rounds - 1):
            assert max(over[2 * turn : 2 * turn + 2]) < min(begun[2 * turn + 2 : 2 * turn + 4])


def test_an_install_whose_thread_gets_its_turn_only_after_the_abort_is_never_sent(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[tuple[Any, ...]] = []

    def source() -> Iterator[tuple[str, Any]]:
        for item in as_torch(NEW).items():
            if late:  # the first round is on its way, and this is the second
                raise ValueError("the trainer's own fault")
            yield item

    with connect(two.clients, source) as sync:
        sync.push("2")
        two.log.clear()
        start = Callers.start

        def begin_late(callers: Callers, name: str, *rest: Any) -> None:
            # Of the thread that asks for an install, and not of those that send it.
            late.append((callers, name, *rest)) if name == "rankcast install" else start(callers, name, *rest)

        monkeypatch.setattr(Callers, "start", begin_late)
        with pytest.raises(Exception, match="the trainer's own fault"):
            sync.push("3")
        monkeypatch.undo()
        ((callers, name, call, _),) = late
        late.clear()
        assert two.places("abort")
        over = threading.Event()
        callers.start(name, call, lambda _: over.set())
        assert over.wait(30)
        assert two.places("install") == []
        sync.push("4")
    assert two.differences(NEW) == []


def test_no_install_goes_out_before_every_worker_of_every_engine_is_prepared(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.log.clear()
        two.clients[1].change = lambda call, payload: {"rankcast": 1, "entries": {}} if call == "prepare" else payload
        with pytest.raises(PushError, match="no entry for worker"):
            sync.push("2")
        assert two.places("install") == []
        assert two.places("finish") == []
        assert two.places("version") == []
        assert len(two.places("abort")) == 2
        assert max(two.places("abort answered")) < min(two.places("resume"))
        assert two.differences(OLD) == []
        two.clients[1].change = None
        sync.push("2")
        assert two.differences(NEW) == []


def test_an_engine_that_fails_at_prepare_lets_nobody_install(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.clients[0].fail["prepare"] = ConnectionError("the engine is gone")
        with pytest.raises(PushError, match="the engine is gone") as failure:
            sync.push("2")
        assert failure.value.codes == ("engine",)
        assert two.places("install") == []
        assert two.differences(OLD) == []


@pytest.mark.parametrize("broken", [0, 1])
def test_no_version_is_set_and_nothing_resumes_before_every_worker_attested(broken: int) -> None:
    made: list[Failing] = []

    def installer(rank: int, model: Any) -> Failing:
        made.append(Failing(model, stage="finish"))
        return made[-1]

    two = Two(installer)
    try:
        with connect(two.clients, Stream(as_torch(NEW))) as sync:
            made[2 * broken + 1].armed = True
            two.log.clear()
            with pytest.raises(PushError, match="the loader broke in finish") as failure:
                sync.push("2")
            assert "complete at '2', which is not published" in str(failure.value)
            assert "unusable until the next full push: worker 1 of 2" in str(failure.value)
            assert two.places("version") == []
            assert two.places("resume") == []
            assert [client.paused for client in two.clients] == [True, True]
            assert [client.weight_version for client in two.clients] == ["", ""]
            made[2 * broken + 1].armed = False
            sync.push("3")
            assert two.differences(NEW) == []
            assert [client.paused for client in two.clients] == [False, False]
            assert [client.weight_version for client in two.clients] == ["3", "3"]
    finally:
        two.close()


def test_an_engine_that_answers_finish_without_finishing_is_not_published(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        liar = two.clients[1]
        kept = liar.receivers
        liar.before["finish"] = lambda: setattr(liar, "receivers", kept[:1])
        with pytest.raises(PushError, match="worker 1 of WatchedClient 1 cannot reach"):
            sync.push("2")
        assert two.places("version") == []
        assert two.places("resume") == []
        liar.receivers = kept
        liar.before.clear()
        sync.push("3")
        assert two.differences(NEW) == []


def test_a_mixed_fleet_is_not_resumed_when_one_engine_broke_in_the_middle(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.clients[1].fail["install"] = ConnectionError("lost")
        with pytest.raises(PushError, match="Engines stay paused"):
            sync.push("2")
        assert two.fleets[0].servable == [False, False]
        assert two.differences(OLD) != []
        assert two.fleets[1].differences(OLD) == []
        assert [client.paused for client in two.clients] == [True, True]
        two.clients[1].fail.clear()
        sync.push("3")
        assert two.differences(NEW) == []
        assert [client.paused for client in two.clients] == [False, False]


# -- pausing ---------------------------------------------------------------------------------------------------------


def test_an_engine_that_the_user_paused_stays_paused_and_the_other_resumes(two: Two) -> None:
    two.clients[0].paused = True
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        for version in ("2", "3"):
            sync.push(version)
            assert [client.paused for client in two.clients] == [True, False]
    assert ("engine 0", "pause") not in two.log
    assert ("engine 0", "resume") not in two.log


def test_a_refused_push_leaves_engines_as_they_were_found(two: Two) -> None:
    two.clients[0].paused = True
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.clients[0].change = lambda call, payload: {} if call == "prepare" else payload
        with pytest.raises(PushError):
            sync.push("2")
        assert [client.paused for client in two.clients] == [True, False]


def test_when_one_engine_cannot_be_paused_the_others_go_on_and_nothing_is_started(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.clients[1].fail["pause"] = TimeoutError("busy")
        with pytest.raises(PushError, match="busy"):
            sync.push("2")
        assert [client.paused for client in two.clients] == [False, False]
        assert two.places("start") == []
        assert two.differences(OLD) == []
        two.clients[1].fail.clear()
        sync.push("2")
        assert [client.paused for client in two.clients] == [False, False]


def test_without_pause_nobody_is_paused_or_resumed(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW)), pause=None) as sync:
        sync.push("2")
    assert two.places("pause") == two.places("resume") == []


def test_a_fleet_that_is_published_but_does_not_resume_is_said_to_be_published(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.clients[0].fail["resume"] = TimeoutError("busy")
        with pytest.raises(PushError, match=r"'2' is published but an engine did not resume.*every worker serves '2'"):
            sync.push("2")
        assert two.differences(NEW) == []
        two.clients[0].fail.clear()
        sync.push("3")
        assert [client.paused for client in two.clients] == [False, False]


# -- the lease -------------------------------------------------------------------------------------------------------


def test_a_second_trainer_is_refused_naming_the_holder_and_until_when(two: Two) -> None:
    refusals: list[str] = []
    with connect(two.clients, Stream(as_torch(NEXT))) as other, connect(two.clients, Stream(as_torch(NEW))) as sync:

        def intrude() -> None:
            two.clients[0].before.clear()
            for act in (lambda: other.push("theirs"), lambda: connect(two.clients, Stream(as_torch(NEXT)))):
                with pytest.raises(PushError) as refusal:
                    act()
                assert refusal.value.codes == ("lease",)
                refusals.append(str(refusal.value))

        two.clients[0].before["install"] = intrude
        sync.push("ours")
        assert two.differences(NEW) == []
        assert [client.paused for client in two.clients] == [False, False]
        for refusal in refusals:
            assert "the trainer on " in refusal
            assert re.search(r"holds this fleet for \d+ s more \(or until it finishes\)", refusal)
        assert "every worker still serves the weights it had before" in refusals[0]
        # The lease was given back at the end.
        other.push("theirs")
        assert two.differences(NEXT) == []


def test_a_push_that_was_refused_by_a_lease_does_not_end_the_holders_session(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEXT))) as other, connect(two.clients, Stream(as_torch(NEW))) as sync:
        seen: list[Any] = []

        def intrude() -> None:
            two.clients[0].before.clear()
            with pytest.raises(PushError):
                other.push("theirs")
            seen.extend(receiver.state for fleet in two.fleets for receiver in fleet.receivers)

        two.clients[0].before["prepare"] = intrude
        sync.push("ours")
        assert set(seen) <= {"started", "prepared"}
        assert two.places("abort") == []
        assert two.differences(NEW) == []


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    made = Mortal()
    yield made
    made.kill()


@pytest.mark.parametrize("at", ["claim answered", "prepare answered", "install answered"])
def test_a_trainer_that_died_is_taken_over_at_once(
    at: str, two: Two, mortal: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead trainer's session is found open, ended, and the fleet resumed by the one that takes over."""
    gone = connect_as(mortal, monkeypatch, two.clients, Stream(as_torch(NEXT)))
    call = at.removesuffix(" answered")
    silence(two.clients, {"claim": "start", "prepare": "install", "install": "finish"}[call])
    with pytest.raises(rankcast.RankcastError):
        gone.push("half")
    for client in two.clients:
        client.fail.clear()
    assert any(receiver._session.claimed for fleet in two.fleets for receiver in fleet.receivers)
    assert [client.paused for client in two.clients] == [True, True]
    mortal.kill()
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        assert two.differences(NEW) == []
        assert [client.weight_version for client in two.clients] == ["2", "2"]
        assert [client.paused for client in two.clients] == [False, False]
    silence(two.clients)
    gone.close()


def test_the_lease_is_free_after_every_push_and_after_close(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        assert not any(receiver._session.claimed for fleet in two.fleets for receiver in fleet.receivers)
        two.clients[0].fail["install"] = ConnectionError("lost")
        with pytest.raises(PushError):
            sync.push("3")
        assert not any(receiver._session.claimed for fleet in two.fleets for receiver in fleet.receivers)
    assert all(receiver._connections.current is None for fleet in two.fleets for receiver in fleet.receivers)


# -- restarts --------------------------------------------------------------------------------------------------------


def test_an_engine_that_restarted_is_met_again_and_gets_everything(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        two.fleets[1].close()
        two.fleets[1] = Fleet(CONFIG, LAYOUT)
        two.clients[1].receivers = two.fleets[1].receivers
        two.log.clear()
        report = sync.push("3")
        assert two.differences(NEW) == []
        assert [(who, what) for who, what in two.log if what == "init"] == [("engine 1", "init")]
        assert {row.engine for row in report.workers} == {fleet.engine for fleet in two.fleets}
        assert two.fleets[1].versions == {"3"}


def test_an_engine_that_restarted_with_another_layout_is_met_again(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        two.fleets[0].close()
        two.fleets[0] = Fleet(CONFIG, Layout(tp=1, dp=3, expert_parallel=True))
        two.clients[0].receivers = two.fleets[0].receivers
        report = sync.push("3")
        assert two.differences(NEW) == []
        assert len(report.workers) == 5


def test_one_worker_that_lost_its_memory_is_met_again(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        receiver = two.fleets[1].receivers[1]
        assert receiver._connections.current is not None
        receiver._connections.close()
        two.log.clear()
        sync.push("3")
        assert two.differences(NEW) == []
        assert [who for who, what in two.log if what == "init"] == ["engine 1"]


def test_an_engine_that_came_back_as_another_model_is_refused_and_the_others_keep_the_old_weights(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        kept = two.clients[1].receivers
        with Fleet(tiny_config(num_hidden_layers=2, hidden_size=16, num_experts=4), LAYOUT) as other:
            two.clients[1].receivers = other.receivers
            with pytest.raises(PushError, match="missing tensors leave"):
                sync.push("2")
            assert two.fleets[0].differences(OLD) == []
            assert not any(receiver._session.claimed for receiver in [*other.receivers, *two.fleets[0].receivers])
            assert [client.paused for client in two.clients] == [False, False]
        two.clients[1].receivers = kept
        sync.push("3")
        assert two.differences(NEW) == []


def test_a_steady_push_sends_neither_names_nor_handles_of_tensors_again(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        sizes = []
        for version in ("3", "4"):
            for client in two.clients:
                client.payloads.clear()
            sync.push(version)
            sent = [payload for client in two.clients for call, payload in client.payloads if call != "claim"]
            text = repr(sent)
            assert "self_attn" not in text
            sizes.append(len(text))
        assert sizes[0] == sizes[1]
