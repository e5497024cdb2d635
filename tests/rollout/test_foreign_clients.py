"""Two clients at one worker: a bare one and a trainer's claim, and who of them hears of what went wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from by_hand import ByHand, codes
from rankcast import AuthenticationError, RankcastError, Receiver, StateError, UnsupportedError
from rankcast.control.report_channel import ReportChannel
from rankcast.errors import LeaseError
from rankcast.process import ProcessIdentity, this_process
from rankcast.wire.bodies import Owner
from rankcast.wire.codec import Codec

NEW = {"weight": torch.full((2, 2), 5.0), "bias": torch.full((2,), 5.0)}


class Place:
    """One worker, a trainer made by hand, and the channel on which the trainer listens."""

    def __init__(self, channel: ReportChannel) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.receiver = Receiver(self.model)
        self.channel = channel
        self.trainer = ByHand([self.receiver], NEW)

    def claim(self, *, dead: bool = False, lease_seconds: float = 60.0, report: str | None = None) -> None:
        if dead:
            here = this_process()
            gone = ProcessIdentity(here.host, here.namespace, here.pid, here.start_time - 1)
            self.trainer.owner = Owner("d" * 32, gone, "a trainer that died")
        assert codes(self.trainer.init()) == [()]
        url = self.channel.url if report is None else report
        assert codes(self.trainer.claim(lease_seconds, report=url)) == [()]

    def push_bare(self) -> None:
        self.receiver.start_weight_update()
        self.receiver.update_weights(self.trainer.bare())
        self.receiver.finish_weight_update("bare")
        assert self.model.bias.tolist() == [5.0, 5.0]
        assert (self.receiver.servable, self.receiver.weight_version) == (True, "bare")


@pytest.fixture
def place() -> Iterator[Place]:
    with ReportChannel(Codec()) as channel:
        made = Place(channel)
        yield made
        made.trainer.segment.close()
        made.receiver.close()


@pytest.mark.parametrize("left", ["dead", "expired"])
@pytest.mark.parametrize("started", [False, True])
def test_a_claim_that_was_left_behind_swallows_no_bare_update(left: str, started: bool, place: Place) -> None:
    place.claim()
    if started:
        place.receiver.start_weight_update()
    session = place.receiver._session
    if left == "dead":
        session._provably_dead = lambda process: True
    else:
        session._lease_until = 0.0
    place.push_bare()
    assert place.receiver.handle("start").orphaned, "it may have paused the engine"


def test_a_bare_start_after_a_dead_claim_raises_for_its_caller_and_not_on_the_dead_trainers_channel(
    place: Place,
) -> None:
    place.claim(dead=True)
    place.receiver.start_weight_update()
    with pytest.raises(StateError, match="a session is started already"):
        place.receiver.start_weight_update()
    with pytest.raises(RankcastError, match="nobody"):
        place.receiver.update_weights({**place.trainer.bare(), "names": ["nobody", "bias"]})
    assert place.channel.latest(place.receiver.worker.engine, 0) is None or (
        place.channel.latest(place.receiver.worker.engine, 0).call == "claim"
    )


def test_a_second_start_in_a_living_session_raises_and_is_reported(place: Place) -> None:
    place.claim()
    place.receiver.start_weight_update()
    with pytest.raises(StateError, match="a session is started already"):
        place.receiver.start_weight_update()
    [report] = place.channel.take(place.trainer.session, "start").values()
    assert [fault.code for fault in report.faults] == ["state"]


def test_a_bare_entry_in_a_living_session_raises_and_is_reported(place: Place) -> None:
    place.claim()
    place.receiver.start_weight_update()
    with pytest.raises(StateError, match="a rankcast session is open"):
        place.receiver.update_weights(place.trainer.bare())
    last = place.channel.latest(place.receiver.worker.engine, 0)
    assert last is not None
    assert [fault.code for fault in last.faults] == ["state"]


def test_an_abort_by_somebody_else_in_a_living_session_raises_and_ends_nothing(place: Place) -> None:
    place.claim()
    place.receiver.start_weight_update()
    with pytest.raises(LeaseError):
        place.receiver.abort_weight_update()
    assert place.receiver.state == "started"


def test_a_fault_whose_report_arrived_does_not_raise_and_one_whose_report_did_not_does(
    place: Place,
) -> None:
    place.claim()
    place.receiver.start_weight_update()
    place.receiver.finish_weight_update()
    [report] = place.channel.take(place.trainer.session, "finish").values()
    assert "the session is started after 0 of 0" in report.faults[0].message
    place.trainer.claim(report="http://127.0.0.1:1/report")  # where nobody listens
    with pytest.raises(StateError, match="no session is open"):
        place.receiver.finish_weight_update()


def test_a_finish_that_failed_names_no_weights(place: Place) -> None:
    place.push_bare()
    place.claim()
    place.receiver.start_weight_update()
    place.receiver.finish_weight_update("not these")
    assert place.receiver.weight_version == "bare"


@pytest.mark.parametrize("transport", ["collective", "nixl", "cuda_ipc", "vllm_ipc", "file", "pigeon"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_bare_dict_for_a_transport_that_the_worker_does_not_speak_is_refused(
    transport: str, empty: bool, place: Place
) -> None:
    place.receiver.start_weight_update()
    with pytest.raises(UnsupportedError, match=transport):
        place.receiver.update_weights({**place.trainer.bare([] if empty else None), "transport": transport})
    place.receiver.update_weights(place.trainer.bare())
    place.receiver.finish_weight_update()


def test_a_prepare_for_a_transport_that_the_worker_does_not_speak_is_refused(place: Place) -> None:
    place.trainer.open()
    assert codes(place.trainer.prepare(transport="nixl")) == [("unsupported",)]
    assert codes(place.trainer.prepare()) == [()]


def test_a_signed_worker_takes_a_name_only_if_a_signed_session_installed_it() -> None:
    receiver = Receiver(torch.nn.Linear(2, 2), secret=b"\xffsecret")
    with ByHand([receiver], NEW) as trainer:
        trainer.codec = Codec(b"\xffsecret")
        with pytest.raises(AuthenticationError, match="'forged'"):
            receiver.update_weight_version("forged")
        trainer.open()
        assert codes(trainer.prepare()) == [()]
        for sequence in (1, 2):
            assert codes(trainer.install(sequence)) == [()]
        receiver.finish_weight_update()
        with pytest.raises(AuthenticationError, match=r"'forged'.*'by hand'"):
            receiver.update_weight_version("forged")
        receiver.update_weight_version("by hand")
        assert receiver.weight_version == "by hand"
    receiver.close()
