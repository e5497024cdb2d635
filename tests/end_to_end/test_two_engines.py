"""A fleet of two engines takes new weights as a whole or not at all, and is never published or resumed as a mix."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from end_to_end.conftest import CONFIG
from end_to_end.here import Trainer, push
from end_to_end.seen import answer, ask, differences, info
from end_to_end.watched import Watched, bodies
from fleets import RunningServer, started_server, wait_gone
from oracle import Layout
from rankcast import PushError

LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
PIPED = Layout(pp=2, tp=2)
OLD, NEW, LATER = (scaled_weights(CONFIG, seed) for seed in (10, 11, 12))
#: As the fleet's model, but with wider experts.
WIDER = tiny_config(num_hidden_layers=2, moe_intermediate_size=24)


class Tampering(Watched):
    """Says another shape of one tensor to the worker of rank 1, when told to."""

    tamper = False

    def update_weights(self, update_info: Any) -> None:
        if self.tamper and "prepare" in {body["kind"] for body in bodies(update_info).values()}:
            body = bodies(update_info)["1"]
            body["schedule"]["shapes"][0] = [1, 1]
            update_info["entries"]["1"] = {"body": msgspec.json.encode(body).decode()}
        super().update_weights(update_info)


@pytest.fixture(autouse=True)
def settled(fleet: RunningServer, piped: RunningServer) -> None:
    push([fleet.url, piped.url], OLD, "old")


def assert_both_serve(fleet: RunningServer, piped: RunningServer, weights: Any, version: str) -> None:
    for server, layout in ((fleet, LAYOUT), (piped, PIPED)):
        assert differences(server.url, CONFIG, weights, layout) == []
        found = info(server.url)
        assert (found["weight_version"], found["is_paused"]) == (version, False)
        assert set(answer(server.url)["weight_versions"]) == {version}


@pytest.mark.parametrize("refusing", [0, 1])
def test_when_one_worker_of_one_engine_refuses_in_prepare_neither_engine_changes(
    fleet: RunningServer, piped: RunningServer, refusing: int
) -> None:
    clients = [Tampering(fleet.url), Tampering(piped.url)]
    with Trainer(clients, OLD) as trainer:
        clients[refusing].tamper = True
        with pytest.raises(PushError, match="worker 1 of 4") as refusal:
            trainer.push(NEW, "new")
        assert refusal.value.codes == ("manifest",)
        assert [client.kinds().count("install") for client in clients] == [0, 0]
        assert_both_serve(fleet, piped, OLD, "old")
        clients[refusing].tamper = False
        trainer.push(NEW, "new")
        assert_both_serve(fleet, piped, NEW, "new")


def test_an_engine_that_serves_a_model_of_another_size_is_refused_and_the_other_does_not_change(
    fleet: RunningServer, piped: RunningServer, tmp_path: Path
) -> None:
    wider = scaled_weights(WIDER, 0)
    with started_server(write_checkpoint(tmp_path / "wider", WIDER, wider)) as other:
        with pytest.raises(PushError, match="connect refused") as refusal:
            Trainer([fleet.url, other.url], NEW)
        assert all(other.url in fault for fault in refusal.value.faults)
        assert "gate_proj.weight" in str(refusal.value)
        assert differences(other.url, WIDER, wider, Layout()) == []
        assert answer(other.url)["weight_version"] == "default"
    assert_both_serve(fleet, piped, OLD, "old")


def test_when_one_engine_dies_before_the_installs_the_other_is_not_resumed_or_named_until_it_is_whole(
    fleet: RunningServer, piped: RunningServer, checkpoint: Path
) -> None:
    with started_server(checkpoint) as doomed:
        clients = [Watched(fleet.url), Watched(doomed.url)]
        with Trainer(clients, OLD) as trainer:
            clients[1].at("before", "install", lambda: killed(doomed))
            with pytest.raises(PushError) as failure:
                trainer.push(NEW, "new")
        assert doomed.url in str(failure.value)
        assert "not reached: worker 0 of 1" in str(failure.value)
        assert {call for client in clients for call in client.kinds()} & {"finish", "version", "resume"} == set()
    found = info(fleet.url)
    assert (found["is_paused"], found["weight_version"]) == (True, "old")
    assert {row["state"] for row in found["workers"]} == {"unusable"}
    refused = ask(fleet.url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_servable")
    push([fleet.url, piped.url], LATER, "later")
    assert_both_serve(fleet, piped, LATER, "later")


def test_when_one_engine_dies_after_all_attested_nothing_is_resumed_as_a_mix(
    fleet: RunningServer, piped: RunningServer, checkpoint: Path
) -> None:
    with started_server(checkpoint) as doomed:
        clients = [Watched(fleet.url), Watched(doomed.url)]
        with Trainer(clients, OLD) as trainer:
            clients[1].at("before", "finish", lambda: killed(doomed))
            with pytest.raises(PushError) as failure:
                trainer.push(NEW, "new")
        assert "complete at 'new', which is not published: worker 0 of 4" in str(failure.value)
        assert {call for client in clients for call in client.kinds()} & {"version", "resume"} == set()
    found = info(fleet.url)
    assert (found["is_paused"], found["weight_version"]) == (True, "")
    assert differences(fleet.url, CONFIG, NEW, LAYOUT) == []
    push([fleet.url, piped.url], LATER, "later")
    assert_both_serve(fleet, piped, LATER, "later")


def killed(server: RunningServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert wait_gone([server.pid, *server.workers]) == []
