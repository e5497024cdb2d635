"""Messages that were recorded and are played again, and messages of one trainer that reach another's session.

All of them are properly signed: what refuses them is their number, the nonce of the connection, or the lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from by_hand import ByHand, codes
from checkpoints import as_torch, tiny_config
from fleets_inprocess import Fleet
from oracle import unique_weights
from rankcast import Receiver
from rankcast.engines.reference.layout import Layout
from rankcast.process import ProcessIdentity, this_process
from rankcast.rollout import connections
from rankcast.wire.bodies import Owner

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=16, num_experts=2)
OLD, NEW = (unique_weights(CONFIG, step) for step in (1, 2))
NONE = [(), ()]
STATE = [("state",), ("state",)]


class Recorded(ByHand):
    """A trainer that keeps what it said, as whoever listens on the wire can."""

    def __init__(self, fleet: Fleet, secret: str | None) -> None:
        super().__init__(fleet.receivers, as_torch(NEW), secret=secret)
        self.said: list[tuple[str, Any]] = []

    def say(self, body: msgspec.Struct) -> Any:
        self.said.append(("init", self.codec.seal(body)))
        return super().say(body)

    def deliver(self, payload: Any) -> Any:
        self.said.append(("update", payload))
        return super().deliver(payload)

    def push(self) -> None:
        assert codes(self.claim()) == NONE
        assert codes(self.start()) == NONE
        assert codes(self.prepare()) == NONE
        for sequence in range(1, self.installs + 1):
            assert codes(self.install(sequence)) == NONE
        assert codes(self.finish()) == NONE
        assert codes(self.release(published=True)) == NONE

    def again(self, which: int) -> list[Any]:
        call, payload = self.said[which]
        return [receiver.handle(call, payload) for receiver in self.receivers]


@pytest.fixture(params=["kept", None], ids=["signed", "unsigned"])
def secret(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture
def fleet(secret: str | None) -> Iterator[Fleet]:
    with Fleet(CONFIG, Layout(tp=2), secret=secret) as made:
        made.load(OLD)
        yield made


@pytest.fixture
def trainer(fleet: Fleet, secret: str | None) -> Iterator[Recorded]:
    with Recorded(fleet, secret) as made:
        yield made


def test_a_whole_push_that_was_recorded_changes_nothing_when_it_is_played_again(
    fleet: Fleet, trainer: Recorded
) -> None:
    assert codes(trainer.init()) == NONE
    trainer.push()
    trainer.segment.memory.fill_(99)  # what lies there now is not what was published
    before = fleet.bits()
    for which in range(len(trainer.said)):
        trainer.again(which)
        if trainer.said[which][0] == "init":
            for receiver in fleet.receivers:
                receiver.handle("start")
    for receiver in fleet.receivers:
        receiver.handle("finish")
    assert fleet.changed(before) == []
    assert fleet.differences(NEW) == []
    assert fleet.servable == [True, True]


def test_a_recorded_claim_is_worth_nothing_after_the_init_that_was_recorded_with_it(
    fleet: Fleet, trainer: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when the worker has forgotten the numbers of that connection: it drew another nonce."""
    monkeypatch.setattr(connections, "REMEMBERED", 2)
    assert codes(trainer.init()) == NONE
    trainer.push()
    other = ByHand(fleet.receivers, as_torch(OLD))
    other.codec = trainer.codec
    for number in range(3):
        assert codes(other.init(connection=f"another {number}")) == NONE
    assert codes(trainer.again(0)) == NONE, "forgotten, and so taken"
    claims = trainer.again(1)
    assert [(report.connection, report.nonce, report.faults) for report in claims] == [("", "", ())] * 2
    assert not any(receiver._session.claimed for receiver in fleet.receivers)
    other.segment.close()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["init", "claim", "release"])
def test_an_older_message_of_the_same_trainer_does_not_disturb_its_session(
    which: int, fleet: Fleet, trainer: Recorded
) -> None:
    trainer.init()
    trainer.claim()
    trainer.release()
    assert codes(trainer.claim()) == NONE
    assert codes(trainer.again(which)) == STATE
    assert codes(trainer.start()) == NONE
    assert codes(trainer.prepare()) == NONE
    assert codes(trainer.again(which)) == STATE
    for sequence in (1, 2):
        assert codes(trainer.install(sequence)) == NONE
    assert codes(trainer.finish()) == NONE
    assert fleet.differences(NEW) == []


def test_messages_of_an_earlier_trainer_do_not_disturb_a_session(
    fleet: Fleet, trainer: Recorded, secret: str | None
) -> None:
    with Recorded(fleet, secret) as earlier:
        earlier.init()
        earlier.claim()
        earlier.release(close=True)
        trainer.init()
        trainer.claim()
        for _ in range(2):
            assert set(codes([*earlier.again(0), *earlier.again(1), *earlier.again(2)])) == {("state",)}
            # Also its living owner's new ones.
            assert codes(earlier.init()) == [("lease",)] * 2
            assert codes(earlier.claim()) == [("lease",)] * 2
            assert codes(earlier.release()) == NONE
            trainer.start()
        assert codes(trainer.prepare()) == NONE
        for sequence in (1, 2):
            assert codes(trainer.install(sequence)) == NONE
        assert codes(trainer.finish()) == NONE
        assert fleet.differences(NEW) == []


def test_an_init_does_not_end_the_session_that_its_own_trainer_has_open(trainer: Recorded) -> None:
    trainer.open()
    nonces = trainer.nonces
    assert codes(trainer.init()) == STATE
    trainer.nonces = nonces
    assert codes(trainer.prepare()) == NONE
    # A claim does: it is how a trainer begins again after an abort that did not arrive.
    trainer.session = "b" * 32
    reports = trainer.claim()
    assert codes(reports) == NONE
    assert all(report.ended for report in reports)


def test_a_claim_without_the_nonce_of_the_connection_only_says_how_the_worker_is(trainer: Recorded) -> None:
    trainer.init()
    for nonces in ({}, {"0": "0" * 32, "1": "0" * 32}):
        reports = trainer.claim(nonces=nonces)
        assert codes(reports) == NONE
        assert [(report.connection, report.nonce, report.plan_hash) for report in reports] == [("", "", "")] * 2
    assert not any(receiver._session.claimed for receiver in trainer.receivers)
    # It begins with an init then, and is known.
    trainer.init()
    trainer.push()


def test_a_worker_that_was_replaced_takes_nothing_of_what_its_predecessor_was_told(
    fleet: Fleet, trainer: Recorded, secret: str | None
) -> None:
    trainer.init()
    trainer.push()
    old = fleet.receivers[1]
    new = Receiver(fleet.models[1], worker=old.worker, secret=secret)
    trainer.receivers[1] = new
    reports = trainer.claim()
    assert [report.connection for report in reports] == [trainer.connection, ""]
    assert not new._session.claimed
    assert codes(trainer.init()) == NONE
    trainer.push()
    assert fleet.differences(NEW) == []
    new.close()


def test_what_is_remembered_of_connections_is_bounded_and_never_forgets_the_current_one(
    fleet: Fleet, trainer: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REMEMBERED", 3)
    trainer.init()
    for number in range(10):
        codes(trainer.say(trainer.claim_body(connection=f"another {number}")))
    assert all(len(receiver._connections._last) <= 3 for receiver in fleet.receivers)
    assert codes(trainer.again(0)) == STATE


def test_what_a_claim_left_is_said_until_its_owner_or_a_later_one_settles_it(fleet: Fleet, trainer: Recorded) -> None:
    here = this_process()
    dead = ProcessIdentity(here.host, here.namespace, here.pid, here.start_time - 1)
    living = trainer.owner
    trainer.owner = Owner("d" * 32, dead, "a trainer that died")
    assert not any(report.orphaned for report in (*trainer.init(), *trainer.claim()))
    trainer.owner, trainer.connection = living, "c" * 32
    # It may have paused the engine: whoever comes next learns it at init, and again as long as nobody pushed.
    assert all(report.ended and report.orphaned for report in trainer.init())
    assert all(report.orphaned and not report.ended for report in trainer.claim())
    assert all(report.orphaned for report in trainer.send(trainer.abort_body))
    assert all(report.orphaned for report in trainer.release(settled=False))
    trainer.push()
    assert not any(report.orphaned for report in trainer.init())


def test_an_abort_leaves_something_to_be_settled_until_its_trainer_says_that_nothing_is_paused(
    trainer: Recorded,
) -> None:
    trainer.open()
    assert all(report.orphaned for report in trainer.send(trainer.abort_body))
    assert not any(report.orphaned for report in trainer.release())


def test_weights_have_their_name_when_they_are_published_and_not_when_they_are_installed(
    fleet: Fleet, trainer: Recorded
) -> None:
    trainer.open()
    trainer.prepare()
    for sequence in (1, 2):
        trainer.install(sequence)
    reports = trainer.finish()
    assert [(report.attested_version, report.weight_version) for report in reports] == [("by hand", "")] * 2
    assert fleet.versions == {""}
    reports = trainer.release()
    assert [(report.attested_version, report.weight_version) for report in reports] == [("by hand", "")] * 2
    trainer.push()
    assert fleet.versions == {"by hand"}
