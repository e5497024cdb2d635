"""What ``ask_status`` finds, also during a push and from any client, and what ``conclude`` makes of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rankcast
from control.raw_server import Peer, RawServer, answer
from rankcast.control.http import HttpClient
from rankcast.control.inprocess import InProcessClient
from rankcast.control.status import EngineStatus, WorkerStatus, ask_status, conclude
from rankcast.topology import Worker
from rankcast.wire.codec import Codec
from rankcast.wire.reports import Fault


def row(rank: int = 0, workers: int = 1, **fields: Any) -> WorkerStatus:
    usual = {"state": "idle", "servable": True, "generation": 1, "weight_version": "7"}
    rest = {"attested_version": "", "connection": "", "plan_hash": "", "unsent": 0}
    return WorkerStatus(worker=Worker(engine="e" * 32, rank=rank, workers=workers), **{**usual, **rest, **fields})


def engine(where: str = "http://a", **fields: Any) -> EngineStatus:
    usual = {"reachable": True, "weight_version": "7", "paused": False, "workers": (row(),), "faults": ()}
    return EngineStatus(where=where, **{**usual, **fields})


def test_a_whole_published_fleet_has_no_problem() -> None:
    fleet = conclude([engine(), engine("http://b")])
    assert (fleet.weight_version, fleet.mixed, fleet.servable, fleet.problems) == ("7", False, True, ())


def test_weights_that_were_never_pushed_are_no_problem() -> None:
    fleet = conclude([engine(weight_version="default", workers=(row(weight_version=""),))])
    assert (fleet.weight_version, fleet.problems) == ("default", ())


def test_an_engine_whose_workers_differ_is_mixed_and_they_are_named() -> None:
    workers = (row(0, 2), row(1, 2, weight_version="6"))
    fleet = conclude([engine(workers=workers)])
    assert fleet.mixed
    assert "'7' on workers [0]; '6' on workers [1]" in fleet.problems[0]


def test_a_worker_that_lost_its_version_is_not_taken_for_one_that_has_it() -> None:
    assert conclude([engine(workers=(row(0, 2), row(1, 2, weight_version="")))]).mixed


def test_installed_is_not_published() -> None:
    fleet = conclude([engine(weight_version="6")])
    assert not fleet.mixed
    assert "not published" in fleet.problems[0]


def test_weights_that_workers_attested_and_nobody_published_are_not_published() -> None:
    fleet = conclude([engine(weight_version="7", workers=(row(attested_version="8", weight_version=""),))])
    assert "'8' installed and calls it '7': not published" in fleet.problems[0]
    without_a_name = conclude([engine(weight_version=None, workers=(row(attested_version="8", weight_version=""),))])
    assert without_a_name.weight_version == ""


def without_routes(peer: Peer) -> None:
    while peer.request():
        peer.say(answer(b'{"detail": "Not Found"}', "404 Not Found"))


def test_a_server_without_the_routes_is_asked_once_and_says_once_how_it_gets_them() -> None:
    with RawServer(without_routes) as server, HttpClient(server.url) as client:
        [status] = ask_status([(server.url, client)], Codec())
    assert status.reachable
    assert [fault.message.count("VLLM_SERVER_DEV_MODE=1") for fault in status.faults] == [1]
    assert [request.split()[1] for request in server.asked] == [b"/init_weight_transfer_engine"]
    assert len(conclude([status]).problems) == 1


def test_an_unusable_worker_is_named() -> None:
    fleet = conclude([engine(workers=(row(0, 2), row(1, 2, servable=False, state="unusable", weight_version="")))])
    assert not fleet.servable
    assert "worker 1 of 2" in fleet.problems[0]
    assert "unusable" in fleet.problems[0]


def test_an_engine_that_says_nothing_of_its_version_counts_by_its_workers() -> None:
    other = engine("http://b", weight_version=None, workers=(row(weight_version="6"),))
    assert conclude([engine(), other]).mixed
    same = conclude([engine(), engine("http://b", weight_version=None)])
    assert (same.weight_version, same.problems) == ("7", ())


def test_without_an_answer_of_every_engine_there_is_no_common_version() -> None:
    dead = engine("http://b", reachable=False, weight_version=None, workers=(), faults=(Fault("engine", "silent"),))
    fleet = conclude([engine(), dead])
    assert (fleet.weight_version, fleet.reachable, fleet.servable) == (None, False, False)
    assert fleet.problems == ("http://b: silent",)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0))


def test_receivers_in_this_process_answer_too_and_nothing_is_guessed_for_them() -> None:
    workers = [Worker(engine="a" * 32, rank=rank, workers=2) for rank in range(2)]
    receivers = [rankcast.Receiver(Model(), worker=worker) for worker in workers]
    try:
        [status] = ask_status([("here", InProcessClient(receivers))], Codec())
        assert [one.worker for one in status.workers] == workers
        assert (status.reachable, status.weight_version, status.paused, status.faults) == (True, None, None, ())
        [part] = ask_status([("here", InProcessClient(receivers[:1]))], Codec())
        assert "1 of 2 workers reported" in part.faults[0].message
        assert part.reachable
    finally:
        for receiver in receivers:
            receiver.close()


class Busy(InProcessClient):
    """Receivers of which the last has no time to get its report through for the first ``late`` calls."""

    def __init__(self, receivers: list[rankcast.Receiver], late: int) -> None:
        super().__init__(receivers)
        self.last, self.late, self.asked = receivers[-1], late, 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.asked += 1
        self.last._reporter._seconds = 0.0 if self.asked <= self.late else 5.0
        super().init_weight_transfer_engine(init_info)


@pytest.mark.parametrize(("late", "asked", "answers"), [(0, 1, 2), (1, 2, 2), (9, 2, 1)])
def test_a_worker_whose_report_did_not_get_through_is_asked_once_more(late: int, asked: int, answers: int) -> None:
    workers = [Worker(engine="a" * 32, rank=rank, workers=2) for rank in range(2)]
    receivers = [rankcast.Receiver(Model(), worker=worker) for worker in workers]
    client = Busy(receivers, late)
    try:
        [status] = ask_status([("here", client)], Codec())
        assert client.asked == asked
        assert [one.worker for one in status.workers] == workers[:answers]
        assert [fault.code for fault in status.faults] == ["engine"] * (answers < len(workers))
    finally:
        for receiver in receivers:
            receiver.close()


def test_what_the_first_asking_brought_is_told_also_when_the_second_one_fails() -> None:
    class Gone(Busy):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            if self.asked:
                raise rankcast.EngineError("gone")
            super().init_weight_transfer_engine(init_info)

    workers = [Worker(engine="a" * 32, rank=rank, workers=2) for rank in range(2)]
    receivers = [rankcast.Receiver(Model(), worker=worker) for worker in workers]
    try:
        [status] = ask_status([("here", Gone(receivers, 1))], Codec())
        assert [one.worker for one in status.workers] == workers[:1]
        assert [fault.code for fault in status.faults] == ["engine"]
    finally:
        for receiver in receivers:
            receiver.close()


class Hanging:
    """A client whose engine never answers."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.over.wait(60)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def test_an_engine_that_never_answers_is_given_up_and_the_others_are_told() -> None:
    receiver = rankcast.Receiver(Model())
    stuck = Hanging()
    try:
        late, good = ask_status([("stuck", stuck), ("here", InProcessClient(receiver))], Codec(), timeout=2.0)
        assert (late.where, late.reachable) == ("stuck", False)
        assert "within 2 s" in late.faults[0].message
        assert len(good.workers) == 1
    finally:
        stuck.over.set()
        receiver.close()


def test_an_engine_whose_workers_cannot_report_is_told_from_one_that_is_gone(fleet_url: str) -> None:
    with HttpClient(fleet_url) as client:
        [status] = ask_status([(fleet_url, client)], Codec(b"a secret that the engine does not have"))
        assert status.reachable
        assert status.workers == ()
        assert "/report" in status.faults[0].message


def test_asking_within_a_push_sees_the_open_session_and_leaves_it_alone(
    fleet_url: str, checkpoint_dirs: dict[str, Path]
) -> None:
    seen: list[EngineStatus] = []

    def look(progress: rankcast.Progress) -> None:
        if progress.stage == "install":
            with HttpClient(fleet_url) as client:
                seen.extend(ask_status([(fleet_url, client)], Codec()))

    source = rankcast.SafetensorsSource(checkpoint_dirs["step-1"])
    with rankcast.connect(fleet_url, source, mode="ranklocal", bucket_bytes=64 * 2**10, progress=look) as sync:
        report = sync.push(weight_version="within")
        with HttpClient(fleet_url) as client:
            [after] = ask_status([(fleet_url, client)], Codec())
    assert len(seen) == report.rounds > 1
    for status in seen:
        assert status.faults == ()
        assert {one.state for one in status.workers} <= {"prepared", "installing", "installed"}
        assert status.paused
    assert not any(one.servable for one in seen[-1].workers)
    assert "a push is under way" in conclude(seen[-1:]).problems[0]
    assert conclude([after]).problems == ()
    assert {one.weight_version for one in after.workers} == {"within"}
    assert all(one.plan_hash and one.connection for one in after.workers)
    assert [one.generation for one in after.workers] == [one.generation + 1 for one in seen[0].workers]


@pytest.mark.parametrize("times", [3])
def test_asking_changes_nothing(fleet_url: str, times: int) -> None:
    with HttpClient(fleet_url) as client:
        answers = [ask_status([(fleet_url, client)], Codec()) for _ in range(times)]
    assert all(answer == answers[0] for answer in answers)
