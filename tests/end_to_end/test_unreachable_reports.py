"""Workers that cannot reach the trainer's report channel: the push fails by name, and the engine is left whole."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from checkpoints import scaled_weights
from end_to_end.conftest import CONFIG
from end_to_end.here import Trainer, push
from end_to_end.seen import answer, differences, info
from end_to_end.watched import Watched
from fleets import RunningServer
from oracle import Layout
from rankcast import PushError
from rankcast.control.report_channel import ReportChannel

LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
OLD, NEW = (scaled_weights(CONFIG, seed) for seed in (10, 11))


class Misdirecting(Watched):
    """Tells workers another address than the trainer's in messages of ``kinds``."""

    address = ""
    kinds: tuple[str, ...] = ()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        body = msgspec.json.decode(init_info["body"])
        if body["kind"] in self.kinds:
            init_info = {"body": msgspec.json.encode({**body, "report": self.address}).decode()}
        super().init_weight_transfer_engine(init_info)


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    yield f"http://127.0.0.1:{port}/report"


@contextlib.contextmanager
def silence() -> Iterator[str]:
    """An address that takes no more connections and refuses none, as behind a firewall that drops packets."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listener.getsockname()[1]
        for _ in range(4):  # one more than the kernel keeps waiting is already enough
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield f"http://127.0.0.1:{port}/report"


@pytest.fixture(autouse=True)
def settled(fleet: RunningServer) -> None:
    push(fleet.url, OLD, "old")


def assert_whole(url: str) -> None:
    assert differences(url, CONFIG, OLD, LAYOUT) == []
    found = info(url)
    assert (found["weight_version"], found["is_paused"]) == ("old", False)
    assert {row["state"] for row in found["workers"]} == {"idle"}
    assert set(answer(url)["weight_versions"]) == {"old"}


@pytest.mark.parametrize("address", [nobody, silence], ids=lambda address: str(address.__name__))
def test_workers_that_cannot_report_are_named_at_connect_with_the_way_out(fleet: RunningServer, address: Any) -> None:
    with address() as where, Misdirecting(fleet.url) as client:
        client.address, client.kinds = where, ("init",)
        with pytest.raises(PushError) as refusal:
            Trainer(client, NEW)
    assert f"of {fleet.url} cannot reach http://127.0.0.1:" in str(refusal.value)
    assert "pass listen='ADDRESS'" in str(refusal.value)
    assert_whole(fleet.url)


@pytest.mark.parametrize("address", [nobody, silence], ids=lambda address: str(address.__name__))
def test_a_push_whose_reports_get_lost_fails_by_name_and_leaves_the_engine_whole(
    fleet: RunningServer, address: Any
) -> None:
    with address() as where, Misdirecting(fleet.url) as client, Trainer(client, OLD) as trainer:
        client.address, client.kinds = where, ("claim",)
        with pytest.raises(PushError) as refusal:
            trainer.push(NEW, "new")
        assert f"workers 0, 1, 2, 3 of {fleet.url} cannot reach" in str(refusal.value)
        assert_whole(fleet.url)
        client.kinds = ()
        trainer.push(NEW, "new")
        assert differences(fleet.url, CONFIG, NEW, LAYOUT) == []
        assert info(fleet.url)["weight_version"] == "new"


def test_a_channel_that_closes_before_prepare_is_answered_leaves_the_engine_whole(fleet: RunningServer) -> None:
    with Watched(fleet.url) as client, Trainer(client, OLD) as trainer:
        client.at("before", "prepare", lambda: broken(trainer.sync._leading._fleet._channel))
        with pytest.raises(PushError, match="cannot reach") as refusal:
            trainer.push(NEW, "new")
        assert "still has the weights it had before; not reached: worker 0 of 4" in str(refusal.value)
        assert_whole(fleet.url)
    push(fleet.url, NEW, "new")
    assert differences(fleet.url, CONFIG, NEW, LAYOUT) == []


def broken(channel: ReportChannel) -> None:
    """Its server ends, and the channel does not know."""
    channel._server.should_exit = True
    channel._thread.join(30)
    assert not channel._thread.is_alive()
