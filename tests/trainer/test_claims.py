"""Claims: what they carry, so that none can be played again, and what becomes of workers that do not know a trainer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoints import as_torch
from fleets_inprocess import Fleet, Stream, opened
from rankcast import PushError
from rankcast.rollout.connection import Connection
from trainer.two_engines import CONFIG, LAYOUT, NEW, NEXT, OLD, Two, connect

LEASE_ROUTE = ("init", "claim", "release")


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def said(two: Two, call: str, engine: int = 0) -> list[dict[str, Any]]:
    return [opened(payload) for kind, payload in two.clients[engine].payloads if kind == call]


def test_every_message_of_a_connection_counts_on_and_every_claim_carries_the_nonces_of_its_engine(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        two.clients[0].change = lambda call, payload: {} if call == "prepare" else payload
        with pytest.raises(PushError):
            sync.push("3")
        two.clients[0].change = None
        sync.push("4")
    for engine, client in enumerate(two.clients):
        counts = [opened(payload)["count"] for call, payload in client.payloads if call in LEASE_ROUTE]
        assert len(counts) >= 8
        assert all(earlier < later for earlier, later in itertools.pairwise(counts))
        nonces = [claim["nonces"] for claim in said(two, "claim", engine)]
        assert len(nonces) == 3
        assert all(set(one) == {"0", "1"} and all(one.values()) for one in nonces)
    assert said(two, "claim", 0)[0]["nonces"] != said(two, "claim", 1)[0]["nonces"]


def test_a_release_says_whether_the_push_is_published_and_whether_the_engine_is_settled(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        assert [(one["published"], one["settled"], one["close"]) for one in said(two, "release")] == [
            (True, True, False)
        ]
        two.clients[0].change = lambda call, payload: {} if call == "prepare" else payload
        with pytest.raises(PushError):
            sync.push("3")
        two.clients[0].change = None
        last = said(two, "release")[-1]
        assert (last.get("published", False), last["settled"]) == (False, True)
    assert said(two, "release")[-1]["close"] is True


def test_workers_that_are_met_again_are_claimed_again_before_anything_is_started(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        two.fleets[1].close()
        two.fleets[1] = Fleet(CONFIG, LAYOUT)
        two.clients[1].receivers = two.fleets[1].receivers
        two.log.clear()
        sync.push("3")
        asked = [call for who, call in two.log if who == "engine 1" and not call.endswith(" answered")]
        assert asked[:4] == ["claim", "init", "claim", "pause"]
        assert [call for who, call in two.log if who == "engine 0" and call in LEASE_ROUTE] == ["claim", "release"]
        assert two.differences(NEW) == []


def test_workers_that_forget_a_trainer_at_once_are_named_and_the_others_keep_what_they_have(two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:

        def forget() -> None:
            for receiver in two.fleets[1].receivers:
                receiver._connections.close()

        two.clients[1].before["claim"] = forget
        with pytest.raises(PushError, match="workers of WatchedClient 1 forget this trainer") as failure:
            sync.push("2")
        assert failure.value.codes == ("engine",)
        assert "every worker still serves the weights it had before" in str(failure.value)
        assert two.places("start") == two.places("pause") == []
        assert two.differences(OLD) == []
        assert not any(receiver._session.claimed for fleet in two.fleets for receiver in fleet.receivers)
        two.clients[1].before.clear()
        sync.push("3")
        assert two.differences(NEW) == []


def test_an_engine_that_came_back_unable_to_open_the_trainers_memory_is_refused_before_anything_is_started(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        two.fleets[1].close()
        two.fleets[1] = Fleet(CONFIG, LAYOUT)
        two.fleets[1].load(OLD)
        two.clients[1].receivers = two.fleets[1].receivers
        starts = len(two.places("start"))
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "try_probe", lambda handle: (False, "another pid namespace"))
            with pytest.raises(PushError, match=r"another pid namespace.*connect again") as failure:
                sync.push("3")
        assert failure.value.codes == ("unsupported",)
        assert len(two.places("start")) == starts
        assert [client.paused for client in two.clients] == [False, False]
        assert two.fleets[0].differences(NEW) == two.fleets[1].differences(OLD) == []
    with connect(two.clients, Stream(as_torch(NEXT))) as sync:
        sync.push("4")
        assert two.differences(NEXT) == []


def test_a_worker_of_whose_claim_nothing_was_heard_is_not_said_to_be_complete(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("2")
        leading = sync._leading
        assert leading is not None
        channel = leading._fleet._channel
        right = channel.take

        def lossy(name: str, call: str, sequence: int = -1) -> Any:
            came = right(name, call, sequence)
            if call == "claim":
                return {who: report for who, report in came.items() if who[0] != two.fleets[1].engine}
            return came

        monkeypatch.setattr(channel, "take", lossy)
        with pytest.raises(PushError, match="cannot reach") as failure:
            sync.push("3")
        assert "complete at" not in str(failure.value)
        assert "every worker still serves the weights it had before" in str(failure.value)
        assert two.differences(NEW) == []
