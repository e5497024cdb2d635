"""The report channel over real sockets: what it takes, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rankcast.control.report_channel import ReportChannel
from rankcast.control.report_store import ReportStore
from rankcast.control.reporter import REPORT_LIMIT, Reporter
from rankcast.errors import AuthenticationError, EngineError, LimitError
from rankcast.wire.codec import Codec
from rankcast.wire.reports import Report

JSON = {"Content-Type": "application/json"}
Make = Callable[..., Report]


@pytest.fixture
def channel() -> Iterator[ReportChannel]:
    with ReportChannel(Codec()) as opened:
        yield opened


@pytest.fixture
def poster() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, headers=JSON, timeout=10) as client:
        yield client


def test_reports_of_eight_workers_at_the_same_time_all_arrive_and_the_waiter_is_woken(make_report: Make) -> None:
    codec = Codec(b"shared secret")
    rounds = 20
    with ReportChannel(codec) as channel:
        outcomes: list[bool] = []

        def work(rank: int) -> None:
            reporter = Reporter(codec)
            for sequence in range(rounds):
                outcomes.append(reporter.send(channel.url, make_report(rank, sequence=sequence)))
            reporter.close()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
        for thread in threads:
            thread.start()
        assert channel.wait_for(lambda: len(channel.reports("session", "install", rounds - 1)) == 8, timeout=60)
        for thread in threads:
            thread.join(30)
        assert outcomes == [True] * 8 * rounds
        for sequence in range(rounds):
            found = channel.reports("session", "install", sequence)
            assert {rank: report.sequence for (_, rank), report in found.items()} == dict.fromkeys(range(8), sequence)
        assert channel.dropped == 0


def test_a_report_has_arrived_when_send_returns(channel: ReportChannel, make_report: Make) -> None:
    report = make_report(3, request="r", seconds=0.25, touched=None)
    reporter = Reporter(Codec())
    assert reporter.send(channel.url, report)
    reporter.close()
    assert channel.reports("session", "install", 1) == {("e" * 32, 3): report}
    assert channel.reports("r", "install", 1) == {("e" * 32, 3): report}
    assert channel.latest("e" * 32, 3) == report
    assert channel.latest("e" * 32, 4) is None


def test_a_wait_that_nothing_fulfils_ends(channel: ReportChannel) -> None:
    assert channel.wait_for(lambda: False, timeout=0.01) is False


def test_a_wrong_or_missing_mac_is_answered_401_and_nothing_is_kept(make_report: Make, poster: httpx.Client) -> None:
    with ReportChannel(Codec(b"right")) as channel:
        for codec in (Codec(b"wrong"), Codec()):
            answer = poster.post(channel.url, content=msgspec.json.encode(codec.seal(make_report())))
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "authentication"
        assert channel.reports("session", "install", 1) == {}
        assert poster.post(channel.url, json=Codec(b"right").seal(make_report())).status_code == 204
        assert len(channel.reports("session", "install", 1)) == 1


class _Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_garbage_is_answered_400_never_run_and_the_channel_goes_on(
    channel: ReportChannel, poster: httpx.Client, make_report: Make, tmp_path: Path
) -> None:
    trap = pickle.dumps(_Trap(str(tmp_path / "sprung")))
    sealed = Codec().seal(make_report())
    garbage = [
        b"",
        b"\x00\xff" * 50,
        trap,
        msgspec.json.encode({"body": trap.hex()}),
        b"[" * 100_000,
        b'{"body": ' + b"[" * 100_000,
        b"null",
        b"[]",
        b'{"body": 1}',
        msgspec.json.encode({**sealed, "more": 1}),
        msgspec.json.encode({"body": sealed["body"][:-1]}),
        msgspec.json.encode({"body": sealed["body"].replace('"protocol":1', '"protocol":2')}),
        msgspec.json.encode({"body": sealed["body"].replace('"rank":0', '"rank":99')}),
        msgspec.json.encode({"body": sealed["body"].replace('"call"', '"cull"')}),
        b'{"body": "\\ud800"}',
    ]
    for data in garbage:
        answer = poster.post(channel.url, content=data)
        assert answer.status_code == 400, data[:60]
        assert answer.json()["error"]["message"]
    assert list(tmp_path.iterdir()) == []
    assert channel.reports("session", "install", 1) == {}
    assert poster.post(channel.url, json=sealed).status_code == 204


def test_plain_text_as_any_web_page_may_post_it_is_refused(
    channel: ReportChannel, poster: httpx.Client, make_report: Make
) -> None:
    data = msgspec.json.encode(Codec().seal(make_report()))
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert poster.post(channel.url, content=data, headers={"Content-Type": kind}).status_code == 415
    assert channel.latest("e" * 32, 0) is None
    typed = {"Content-Type": "application/json; charset=utf-8"}
    assert poster.post(channel.url, content=data, headers=typed).status_code == 204


def test_other_routes_and_methods_are_not_there(channel: ReportChannel, poster: httpx.Client) -> None:
    assert poster.get(channel.url).status_code == 405
    assert poster.post(channel.url.removesuffix("/report"), content=b"{}").status_code == 404


def test_an_oversized_report_is_refused_by_its_declared_length_before_it_is_sent(channel: ReportChannel) -> None:
    url = httpx.URL(channel.url)
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        head = (
            f"POST /report HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {REPORT_LIMIT + 1}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode())
        answer = connection.makefile("rb").read()  # to the end: the server closes, and reads no such body
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"16,777,217 bytes, the limit is 16,777,216" in answer


def test_an_oversized_report_of_no_declared_length_is_cut_off(channel: ReportChannel, poster: httpx.Client) -> None:
    part = b"x" * 2**20
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1024):
            sent += len(part)
            yield part

    with contextlib.suppress(httpx.TransportError):  # closed in the sender's face, as it may be
        assert poster.post(channel.url, content=parts()).status_code == 413
    assert sent < 64 * 2**20


@pytest.mark.parametrize("line", [b"X: " + b"y" * 16_000 + b"\r\n", b"y" * 16_000], ids=["headers", "one"])
def test_a_head_without_end_is_cut_off(
    channel: ReportChannel, make_report: Make, poster: httpx.Client, line: bytes
) -> None:
    url = httpx.URL(channel.url)
    sent = 0
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        connection.sendall(b"POST /report HTTP/1.1\r\nHost: x\r\nX-First: ")
        with contextlib.suppress(OSError):  # closed in the sender's face
            for _ in range(10_000):
                connection.sendall(line)
                sent += len(line)
    assert sent < 64 * 2**20
    # What comes in a body is not counted, on one connection as often as one likes.
    for _ in range(3):
        long = "x" * 100_000
        assert poster.post(channel.url, json=Codec().seal(make_report(weight_version=long))).status_code == 204


def test_a_report_that_stops_half_way_leaves_the_channel_working(
    channel: ReportChannel, make_report: Make, poster: httpx.Client
) -> None:
    url = httpx.URL(channel.url)
    head = b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with socket.create_connection((url.host, url.port or 0), timeout=10) as stalled:
        stalled.sendall(head)
        with socket.create_connection((url.host, url.port or 0), timeout=10) as broken:
            broken.sendall(head)
        assert poster.post(channel.url, json=Codec().seal(make_report())).status_code == 204


def test_of_one_workers_reports_about_one_call_the_last_counts(channel: ReportChannel, make_report: Make) -> None:
    reporter = Reporter(Codec())
    for tensors in (1, 2, 3):
        assert reporter.send(channel.url, make_report(tensors=tensors))
    reporter.close()
    assert [report.tensors for report in channel.reports("session", "install", 1).values()] == [3]


def test_a_channel_leaves_no_thread_and_frees_its_port_with_connections_open(make_report: Make) -> None:
    before = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    reporter = Reporter(Codec())
    with ReportChannel(Codec()) as channel:
        url = httpx.URL(channel.url)
        assert reporter.send(channel.url, make_report())
        idle = socket.create_connection((url.host, url.port or 0), timeout=10)
        half = socket.create_connection((url.host, url.port or 0), timeout=10)
        half.sendall(
            b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        channel.reports("session", "install", 1)
    assert set(threading.enumerate()) - before == set()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((url.host, url.port or 0), timeout=10)
    for connection in (idle, half):
        connection.close()
    reporter.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with ReportChannel(Codec(), listen=f"{url.host}:{url.port}") as again:
        assert again.url == str(url)


def test_a_channel_can_be_opened_and_closed_many_times_without_growing() -> None:
    channel = ReportChannel(Codec())
    with channel:
        pass
    descriptors = len(os.listdir("/proc/self/fd"))
    urls = set()
    for _ in range(5):
        channel.start()
        channel.start()
        urls.add(channel.url)
        channel.close()
        channel.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert urls
    with pytest.raises(EngineError, match="not open"):
        _ = channel.url


def test_what_arrived_can_be_asked_for_after_closing(make_report: Make) -> None:
    reporter = Reporter(Codec())
    with ReportChannel(Codec()) as channel:
        assert reporter.send(channel.url, make_report())
    reporter.close()
    assert len(channel.take("session", "install", 1)) == 1


def test_beyond_loopback_a_secret_is_demanded_unless_told_otherwise() -> None:
    with pytest.raises(AuthenticationError, match=r"192\.0\.2\.1, beyond loopback"):
        ReportChannel(Codec(), listen="192.0.2.1")
    ReportChannel(Codec(b"secret"), listen="192.0.2.1")
    ReportChannel(Codec(), listen="192.0.2.1", allow_unsigned=True)


def test_an_address_that_cannot_be_listened_on_is_named_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(LimitError, match=r"cannot listen on 192\.0\.2\.1"):
        ReportChannel(Codec(b"secret"), listen="192.0.2.1").start()
    assert set(threading.enumerate()) - before == set()


def test_the_store_keeps_to_its_bounds_and_drops_the_oldest_first(make_report: Make) -> None:
    store = ReportStore(kept_reports=10, kept_bytes=1000)
    for sequence in range(25):
        store.put(make_report(sequence=sequence), 10)
    assert [s for s in range(25) if store.reports("session", "install", s)] == list(range(15, 25))
    assert store.dropped == 15
    store.put(make_report(sequence=99), 950)
    assert [s for s in range(100) if store.reports("session", "install", s)] == [20, 21, 22, 23, 24, 99]
    for rank in range(20):
        store.put(make_report(rank, workers=20, session=f"s{rank}"), 0)
    assert [rank for rank in range(20) if store.latest("e" * 32, rank)] == list(range(10, 20))


def test_taking_and_forgetting_make_room(make_report: Make) -> None:
    store = ReportStore(kept_reports=10, kept_bytes=1000)
    for sequence in range(5):
        store.put(make_report(sequence=sequence, request="r"), 100)
    assert len(store.take("session", "install", 0)) == 1
    assert store.take("session", "install", 0) == {}
    assert len(store.reports("r", "install", 0)) == 1
    store.forget("session")
    store.forget("r")
    store.forget("never was")
    assert [s for s in range(5) if store.reports("session", "install", s) or store.reports("r", "install", s)] == []
    for sequence in range(10):
        store.put(make_report(sequence=sequence), 100)
    assert store.dropped == 0


def test_a_report_about_nothing_in_particular_is_still_the_workers_latest(make_report: Make) -> None:
    store = ReportStore()
    store.put(make_report(session="", call="abort"), 10)
    latest = store.latest("e" * 32, 0)
    assert latest is not None
    assert latest.call == "abort"
    assert store.reports("", "abort", 1) == {}
