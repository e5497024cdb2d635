"""As many connections as there are calls at once, and each used again only while it surely can be."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from control.raw_server import Peer, RawServer, answer, serving
from rankcast.control import kept_connections
from rankcast.control.exchange import Answer, BrokenConnectionError, Call, ClosedError, UnreachableError
from rankcast.control.kept_connections import KeptConnections

LONG = 60.0


class Clock:
    """What the pool takes for the time; a test says how much of it goes by."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(kept_connections, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def server() -> Iterator[RawServer]:
    with RawServer(serving) as made:
        yield made


@pytest.fixture
def pool(server: RawServer) -> Iterator[KeptConnections]:
    with contextlib.closing(KeptConnections(server.url)) as made:
        yield made


def ask(pool: KeptConnections, body: bytes = b"{}") -> Answer:
    by = time.monotonic() + LONG
    return pool.send(Call("POST", "/route", ((b"Host", b"here"),), body, by, by, 10**6))


def at_once(pool: KeptConnections, calls: int) -> list[Answer]:
    with ThreadPoolExecutor(calls) as threads:
        return list(threads.map(lambda number: ask(pool, str(number).encode()), range(calls)))


def test_an_idle_connection_is_used_again_for_four_seconds_and_let_go_of_then(
    server: RawServer, pool: KeptConnections, clock: Clock
) -> None:
    for wait, connections in ((0.0, 1), (3.9, 1), (3.9, 1), (4.1, 2), (0.0, 2)):
        clock.now += wait
        assert ask(pool).status == 200
        assert len(server.peers) == connections
    assert len(server.asked) == 5


def test_what_is_let_go_of_is_closed() -> None:
    closed = threading.Event()

    def script(peer: Peer) -> None:
        serving(peer)
        closed.set()

    with RawServer(script, serving) as server, contextlib.closing(KeptConnections(server.url)) as pool:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(kept_connections, "KEPT_SECONDS", 0.0)
            ask(pool)
            assert not closed.is_set()
            ask(pool)
            assert closed.wait(LONG)


def test_connections_that_fewer_calls_at_once_leave_over_are_let_go_of_while_the_one_in_use_is_kept(
    clock: Clock,
) -> None:
    together = threading.Barrier(3)
    ended = threading.Semaphore(0)

    def script(peer: Peer) -> None:
        peer.request()
        together.wait(LONG)
        peer.say(answer())
        serving(peer)
        ended.release()

    with RawServer(script) as server, contextlib.closing(KeptConnections(server.url)) as pool:
        at_once(pool, 3)
        for _ in range(6):
            clock.now += 1.0
            ask(pool)
        assert len(server.peers) == 3
        assert len(server.asked) == 9
        assert ended.acquire(timeout=LONG)
        assert ended.acquire(timeout=LONG)
        assert not ended.acquire(blocking=False)


@pytest.mark.parametrize("unasked", [b"", answer(b"nobody asked", "408 Request Timeout", "Connection: close")])
def test_a_connection_that_the_server_closed_or_spoke_on_while_idle_is_replaced_and_the_call_sent_once(
    unasked: bytes,
) -> None:
    closed = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.say(answer(b"first"))
        peer.say(unasked)
        peer.close()
        closed.set()

    with RawServer(script, serving) as server, contextlib.closing(KeptConnections(server.url)) as pool:
        assert ask(pool, b"one").body == b"first"
        assert closed.wait(LONG)
        assert ask(pool, b"two").body == b"{}"
        assert [request.rpartition(b"\r\n")[2] for request in server.asked] == [b"one", b"two"]
        assert len(server.peers) == 2


def test_a_connection_that_broke_is_not_kept() -> None:
    def script(peer: Peer) -> None:
        peer.request()

    with RawServer(script, serving) as server, contextlib.closing(KeptConnections(server.url)) as pool:
        with pytest.raises(BrokenConnectionError):
            ask(pool)
        assert ask(pool).status == 200
        assert len(server.asked) == 2


def test_calls_at_once_have_a_connection_each_and_get_their_own_answers_and_later_ones_use_them_again() -> None:
    calls = 16
    together = threading.Barrier(calls)  # nobody is answered before all have asked

    def script(peer: Peer) -> None:
        while request := peer.request():
            together.wait(LONG)
            peer.say(answer(request.rpartition(b"\r\n")[2]))

    with RawServer(script) as server, contextlib.closing(KeptConnections(server.url)) as pool:
        for _ in range(3):
            assert [reply.body for reply in at_once(pool, calls)] == [str(number).encode() for number in range(calls)]
        assert len(server.peers) == calls
        assert len(server.asked) == 3 * calls


def test_calls_in_flight_fail_when_it_is_closed_and_later_ones_are_refused() -> None:
    arrived = threading.Semaphore(0)

    def script(peer: Peer) -> None:
        peer.request()
        arrived.release()
        peer.over.wait(LONG)

    with RawServer(script) as server, ThreadPoolExecutor(3) as threads:
        pool = KeptConnections(server.url)
        calls = [threads.submit(ask, pool) for _ in range(3)]
        for _ in calls:
            assert arrived.acquire(timeout=LONG)
        pool.close()
        for call in calls:
            with pytest.raises(ClosedError, match="whether it was done is not known"):
                call.result(LONG)
        with pytest.raises(ClosedError, match="nothing was sent"):
            ask(pool)
        pool.close()
        assert len(server.asked) == 3


def test_idle_connections_are_closed_with_it(server: RawServer) -> None:
    pool = KeptConnections(server.url)
    ask(pool)
    pool.close()
    server.threads[0].join(LONG)
    assert not server.threads[0].is_alive()


def test_many_threads_with_many_calls_get_each_its_own_answer() -> None:
    def script(peer: Peer) -> None:
        while request := peer.request():
            peer.say(answer(request.rpartition(b"\r\n")[2]))

    def work(number: int) -> bool:
        bodies = [f"{number}.{time}".encode() for time in range(25)]
        return [ask(pool, body).body for body in bodies] == bodies

    with RawServer(script) as server, contextlib.closing(KeptConnections(server.url)) as pool:
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(work, range(8)))
        assert len(server.asked) == 200
        assert len(server.peers) <= 8


def test_nobody_there_leaves_nothing_behind(free_port: int) -> None:
    with contextlib.closing(KeptConnections(f"http://127.0.0.1:{free_port}")) as pool:
        for _ in range(3):
            with pytest.raises(UnreachableError):
                ask(pool)
