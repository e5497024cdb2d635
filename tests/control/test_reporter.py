"""A worker's reporter: bounded in time and memory, never raising, and delivering late what it could not before."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankcast.control import reporter as reporter_module
from rankcast.control.report_channel import ReportChannel
from rankcast.control.reporter import KEPT_UNSENT, SEND_SECONDS, Reporter
from rankcast.topology import Worker
from rankcast.wire.codec import Codec
from rankcast.wire.reports import Report, Touched

Make = Callable[..., Report]


@pytest.fixture
def reporter() -> Iterator[Reporter]:
    made = Reporter(Codec())
    yield made
    made.close()


def test_a_dead_channel_is_an_answer_and_not_an_exception(
    reporter: Reporter, make_report: Make, free_port: int
) -> None:
    url = f"http://127.0.0.1:{free_port}/report"
    assert reporter.send(url, make_report()) is False
    assert reporter.unsent == 1
    assert url in reporter.last_fault


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://", "ftp://127.0.0.1/", "http://127.0.0.1:99999/", "http://[::"]
)
def test_no_url_at_all_makes_it_raise(reporter: Reporter, make_report: Make, url: str) -> None:
    assert reporter.send(url, make_report()) is False
    assert reporter.last_fault


def test_a_channel_that_takes_the_connection_and_never_answers_is_given_up_within_the_bound(make_report: Make) -> None:
    # The bound is what is tested, so it is measured; that it is not overrun does not depend on how fast the machine is.
    reporter = Reporter(Codec(), seconds=1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert reporter.send(f"http://127.0.0.1:{silent.getsockname()[1]}/report", make_report()) is False
        assert time.monotonic() - began < SEND_SECONDS
    assert reporter.unsent == 1
    reporter.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 204 ", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
def test_an_answer_that_trickles_in_is_given_up_when_the_time_is_over(make_report: Make, answer: bytes) -> None:
    reporter = Reporter(Codec(), seconds=1.0)
    over = threading.Event()

    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(answer)
            # For far longer than the bound: a reporter that waits for as long as bytes come would see the end of them.
            for _ in range(200):
                if over.wait(0.1):
                    return
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        assert reporter.send(f"http://127.0.0.1:{server.getsockname()[1]}/report", make_report()) is False
        assert reporter.last_fault.endswith("not within 1 s")
        over.set()
        thread.join()
    assert reporter.unsent == 1
    reporter.close()


def test_what_could_not_be_delivered_goes_first_and_in_order_when_the_channel_is_back(
    reporter: Reporter, make_report: Make, free_port: int
) -> None:
    listen = f"127.0.0.1:{free_port}"
    url = f"http://{listen}/report"
    for sequence in range(3):
        assert reporter.send(url, make_report(sequence=sequence)) is False
    assert reporter.unsent == 3
    arrived: list[int] = []

    class Watching(ReportChannel):
        def put(self, report: Report, size: int) -> None:
            arrived.append(report.sequence)
            super().put(report, size)

    with Watching(Codec(), listen=listen) as channel:
        assert channel.url == url
        assert reporter.send(url, make_report(sequence=3)) is True
        assert arrived == [0, 1, 2, 3]
        assert (reporter.unsent, reporter.lost, reporter.last_fault) == (0, 0, "")


def test_what_waits_for_one_channel_is_never_given_to_another(
    reporter: Reporter, make_report: Make, free_port: int
) -> None:
    assert reporter.send(f"http://127.0.0.1:{free_port}/report", make_report(sequence=0)) is False
    with ReportChannel(Codec()) as other:
        assert reporter.send(other.url, make_report(sequence=1)) is True
        assert other.reports("session", "install", 0) == {}
    assert reporter.unsent == 1


def test_the_last_64_are_kept_and_the_rest_counted(reporter: Reporter, make_report: Make, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/report"
    for sequence in range(KEPT_UNSENT + 6):
        assert reporter.send(url, make_report(sequence=sequence)) is False
    assert (reporter.unsent, reporter.lost) == (64, 6)
    with ReportChannel(Codec(), listen=f"127.0.0.1:{free_port}") as channel:
        assert reporter.send(url, make_report(sequence=1000)) is True
        kept = [s for s in range(1001) if channel.reports("session", "install", s)]
    assert kept == [*range(6, KEPT_UNSENT + 6), 1000]
    assert reporter.unsent == 0


def test_a_restarted_channel_on_the_same_address_is_reached_again(
    reporter: Reporter, make_report: Make, free_port: int
) -> None:
    for sequence in range(3):
        with ReportChannel(Codec(), listen=f"127.0.0.1:{free_port}") as channel:
            assert reporter.send(channel.url, make_report(sequence=sequence)) is True
            assert len(channel.reports("session", "install", sequence)) == 1
    assert (reporter.unsent, reporter.lost) == (0, 0)


def test_a_connection_that_breaks_under_a_report_is_tried_once_more(reporter: Reporter, make_report: Make) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def serve() -> None:
        for answer in (b"", b"HTTP/1.1 204 No Content\r\n\r\n"):
            connection, _ = listener.accept()
            with connection:
                data = b""
                while b'"mac"' not in data and not data.endswith(b"}"):
                    data += connection.recv(65536)
                seen.append(data.rpartition(b"\r\n\r\n")[2])
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        assert reporter.send(f"http://127.0.0.1:{listener.getsockname()[1]}/report", make_report()) is True
        thread.join(10)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert reporter.unsent == 0


def test_a_refused_report_is_lost_and_does_not_stand_before_those_that_follow(make_report: Make) -> None:
    wrong = Reporter(Codec(b"wrong"))
    with ReportChannel(Codec(b"right")) as channel:
        for _ in range(3):
            assert wrong.send(channel.url, make_report()) is False
        assert "401" in wrong.last_fault
        assert "different secrets" in wrong.last_fault
    assert (wrong.unsent, wrong.lost) == (0, 3)
    wrong.close()


def test_a_server_in_trouble_is_asked_again_later(engine: Any, reporter: Reporter, make_report: Make) -> None:
    async def trouble(request: Request) -> Response:
        return JSONResponse({"error": "not now"}, status_code=503)

    url = f"{engine.url}/report"
    engine.answers["/report"] = trouble
    assert reporter.send(url, make_report(sequence=1)) is False
    assert "503: not now" in reporter.last_fault
    del engine.answers["/report"]
    assert reporter.send(url, make_report(sequence=2)) is True
    assert reporter.unsent == 0
    assert [b'sequence\\":1' in body for *_, body in engine.received] == [True, True, False]


def test_a_report_over_the_limit_arrives_without_its_columns_and_says_so(
    reporter: Reporter, make_report: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "REPORT_LIMIT", 2000)
    long = make_report(touched=Touched(tuple(range(1000)), ()), unreachable="x" * 500)
    with ReportChannel(Codec()) as channel:
        assert reporter.send(channel.url, long) is True
        arrived = channel.latest("e" * 32, 0)
        assert arrived is not None
        assert arrived.touched is None
        assert (arrived.call, arrived.session, arrived.sequence) == (long.call, long.session, long.sequence)
        assert [fault.code for fault in arrived.faults] == ["limit"]
        assert "the limit is 2,000" in arrived.faults[0].message
        assert reporter.send(channel.url, make_report()) is True
    assert (reporter.unsent, reporter.lost) == (0, 0)


def test_a_report_of_a_megabyte_arrives_whole(reporter: Reporter, make_report: Make) -> None:
    report = make_report(unreachable="x" * 2**20 + "end")
    with ReportChannel(Codec()) as channel:
        assert reporter.send(channel.url, report) is True
        assert channel.latest("e" * 32, 0) == report


def test_a_report_that_cannot_be_encoded_is_lost_and_nothing_is_raised(reporter: Reporter, make_report: Make) -> None:
    with ReportChannel(Codec()) as channel:
        assert reporter.send(channel.url, make_report(unreachable="\ud800")) is False
    assert (reporter.unsent, reporter.lost) == (0, 1)


def test_sending_from_several_threads_loses_nothing(reporter: Reporter, make_report: Make) -> None:
    with ReportChannel(Codec()) as channel:

        def work(rank: int) -> None:
            for sequence in range(10):
                assert reporter.send(channel.url, make_report(rank, sequence=sequence))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [len(channel.reports("session", "install", s)) for s in range(10)] == [4] * 10
    assert Worker(rank=0).label


def test_it_can_be_closed_twice_and_gives_up_what_waits(reporter: Reporter, make_report: Make, free_port: int) -> None:
    reporter.send(f"http://127.0.0.1:{free_port}/report", make_report())
    reporter.close()
    reporter.close()
    assert reporter.unsent == 0
