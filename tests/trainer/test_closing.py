"""Closing, and connects that are refused: everything is given back, also when a part of it cannot be."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankcast
from checkpoints import as_torch, write_checkpoint
from fleets_inprocess import Stream, WatchedClient
from rankcast import (
    IterableSource,
    LimitError,
    Progress,
    PushError,
    Receiver,
    SafetensorsSource,
    UnsupportedError,
)
from rankcast.control.http import HttpClient
from trainer.two_engines import CONFIG, NEW, OLD, Two, connect


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


@pytest.fixture
def clinging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source that ``connect`` makes of a function cannot be closed."""

    def close(self: IterableSource) -> None:
        raise OSError("the source does not close")

    monkeypatch.setattr(IterableSource, "close", close)


def segments() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("/memfd:rankcast" in line for line in maps)


def channels() -> int:
    return sum(thread.name == "rankcast-reports" for thread in threading.enumerate())


@pytest.mark.usefixtures("clinging")
def test_a_part_that_does_not_close_does_not_keep_the_rest_open(two: Two) -> None:
    before = segments(), channels()
    sync = connect(two.clients, Stream(as_torch(NEW)))
    sync.push("2")
    assert (segments(), channels()) > before
    with pytest.raises(OSError, match="the source does not close"):
        sync.close()
    assert (segments(), channels()) == before
    assert all(receiver._connections.current is None for fleet in two.fleets for receiver in fleet.receivers)
    sync.close()


@pytest.mark.usefixtures("clinging")
def test_a_refused_connect_gives_everything_back_and_raises_the_refusal_also_when_a_part_does_not_close(
    two: Two,
) -> None:
    before = segments(), channels()
    wrong = {name: tensor for name, tensor in as_torch(NEW).items() if "o_proj" not in name}
    with pytest.raises(PushError, match="missing tensors leave") as refusal:
        connect(two.clients, Stream(wrong))
    assert any("the source does not close" in note for note in refusal.value.__notes__)
    assert (segments(), channels()) == before
    assert two.differences(OLD) == []


def test_a_source_that_was_passed_in_serves_two_fleets_and_outlives_the_first_sync(two: Two, tmp_path: Path) -> None:
    source = SafetensorsSource(write_checkpoint(tmp_path, CONFIG, NEW))
    first, second = (connect([client], source, mode="direct") for client in two.clients)
    first.push("2")
    first.close()
    second.push("2")
    second.close()
    assert two.differences(NEW) == []


def test_a_source_that_connect_made_is_closed_with_the_sync(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[IterableSource] = []
    monkeypatch.setattr(IterableSource, "close", lambda self: closed.append(self))
    given = IterableSource(Stream(as_torch(NEW)))
    with connect(two.clients, given) as sync:
        sync.push("2")
    assert closed == []
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        sync.push("3")
    assert len(closed) == 1


def test_clients_of_urls_are_closed_by_a_refused_connect_and_others_stay_open(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    right = HttpClient.close

    def close(self: HttpClient) -> None:
        closed.append(self.url)
        right(self)

    monkeypatch.setattr(HttpClient, "close", close)
    nobody, given = "http://127.0.0.1:9", HttpClient("http://127.0.0.1:19")
    with pytest.raises(PushError, match="cannot be reached"):
        connect([nobody, given], Stream(as_torch(NEW)))
    assert closed == [nobody]
    given.close()


@pytest.mark.parametrize("version", [17, 1.5, b"17", True])
def test_a_version_that_is_no_string_is_refused_by_its_type_before_anything_is_done(version: Any, two: Two) -> None:
    with connect(two.clients, Stream(as_torch(NEW))) as sync:
        two.log.clear()
        with pytest.raises(rankcast.StateError, match=f"of type {type(version).__name__}; it must be a str"):
            sync.push(version)
        assert two.log == []
        sync.push("17")
        assert two.differences(NEW) == []


@pytest.mark.parametrize("turn", [0, 1])
def test_a_progress_callback_that_raises_is_logged_once_and_harms_nothing(
    turn: int, two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Progress] = []

    def callback(progress: Progress) -> None:
        told.append(progress)
        if len(told) > turn:
            raise RuntimeError("the display broke")

    with (
        caplog.at_level(logging.ERROR, logger="rankcast"),
        connect(two.clients, Stream(as_torch(NEW)), progress=callback) as sync,
    ):
        sync.push("2")
        sync.push("3")
    assert len(told) == turn + 1
    assert [record.name for record in caplog.records] == ["rankcast"]
    assert "the display broke" in caplog.text
    assert two.differences(NEW) == []
    assert [client.paused for client in two.clients] == [False, False]


def test_one_engine_under_two_names_is_refused_by_both_names(two: Two) -> None:
    first = two.clients[0]
    with pytest.raises(UnsupportedError, match=r"are the same engine: name it once"):
        connect([first, WatchedClient(two.fleets[0].receivers)], Stream(as_torch(NEW)))


@pytest.mark.parametrize("bucket", ["512MiB", 0, -1, 1.5])
def test_a_bucket_that_is_no_number_of_bytes_is_refused_with_an_example(bucket: Any, two: Two) -> None:
    with pytest.raises(LimitError, match=re.escape(f"bucket_bytes is {bucket!r}; it must be a positive number of")):
        connect(two.clients, Stream(as_torch(NEW)), bucket_bytes=bucket)


def test_a_plain_model_names_all_tensors_that_it_does_not_have() -> None:
    wider = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    served = torch.nn.Sequential(torch.nn.Linear(3, 3))
    with pytest.raises(PushError, match=r"unknown tensors: 1\.weight, 1\.bias, 2\.weight, 2\.bias \(4 in all\)"):
        connect(Receiver(served), wider)
