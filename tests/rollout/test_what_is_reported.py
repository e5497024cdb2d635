"""What reaches a trainer's report channel: every call that proves or changes something, and every fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from by_hand import ByHand
from checkpoints import as_torch, tiny_config
from fleets_inprocess import Fleet
from oracle import unique_weights
from rankcast.control.report_channel import ReportChannel
from rankcast.engines.reference.layout import Layout
from rankcast.wire.codec import Codec

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=16, num_experts=2)
OLD, NEW = (unique_weights(CONFIG, step) for step in (1, 2))


@pytest.fixture
def channel() -> Iterator[ReportChannel]:
    with ReportChannel(Codec()) as made:
        yield made


@pytest.fixture
def trainer(channel: ReportChannel) -> Iterator[ByHand]:
    with Fleet(CONFIG, Layout(tp=2)) as fleet, ByHand(fleet.receivers, as_torch(NEW)) as made:
        fleet.load(OLD)
        made.init(report=channel.url, request="init")
        made.claim(report=channel.url, request="claim")
        yield made


def ranks(channel: ReportChannel, name: str, call: str, sequence: int = -1) -> list[int]:
    return sorted(report.worker.rank for report in channel.take(name, call, sequence).values())


def test_a_start_and_a_release_that_go_well_take_no_time_of_anybody_s(channel: ReportChannel, trainer: ByHand) -> None:
    trainer.start()
    trainer.prepare()
    for sequence in range(1, trainer.installs + 1):
        trainer.install(sequence)
    trainer.finish()
    trainer.release(report=channel.url, request="release", published=True)
    assert ranks(channel, "init", "init") == ranks(channel, "claim", "claim") == [0, 1]
    assert ranks(channel, trainer.session, "prepare", 0) == [0, 1]
    assert [ranks(channel, trainer.session, "install", sequence) for sequence in (1, 2)] == [[0, 1]] * 2
    assert ranks(channel, trainer.session, "finish") == [0, 1]
    assert ranks(channel, trainer.session, "start") == ranks(channel, "release", "release") == []


def test_a_start_that_fails_is_reported_by_every_worker(channel: ReportChannel, trainer: ByHand) -> None:
    trainer.start()
    trainer.start()
    found = channel.take(trainer.session, "start", -1)
    assert sorted(report.worker.rank for report in found.values()) == [0, 1]
    assert all("finish it or abort it first" in report.faults[0].message for report in found.values())
