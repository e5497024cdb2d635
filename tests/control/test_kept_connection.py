"""One kept connection: what travels over it, when it is used again, and that a call is over at its deadline."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from control.raw_server import CERTIFICATE, Peer, RawServer, answer, serving
from rankcast.control import kept_connection
from rankcast.control.exchange import (
    BrokenConnectionError,
    Call,
    LongAnswerError,
    SlowAnswerError,
    SlowConnectionError,
    UnreachableError,
)
from rankcast.control.kept_connection import KeptConnection

LONG = 60.0
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def call(connection: KeptConnection, body: bytes | None = b"{}", *, within: float = LONG, **fields: Any) -> Call:
    """A call of ``target``; with a body it is a POST."""
    now = time.monotonic()
    method = "GET" if body is None else "POST"
    headers = ((b"Host", connection.authority.encode()),)
    made = Call(method, connection.target, headers, body, now + LONG, now + within, 1000)
    return made._replace(**fields)


@contextlib.contextmanager
def connected(
    *scripts: Callable[[Peer], object], path: str = "/route", **options: Any
) -> Iterator[tuple[RawServer, KeptConnection]]:
    with RawServer(*scripts) as server, contextlib.closing(KeptConnection(server.url + path, **options)) as connection:
        yield server, connection


def test_head_and_body_are_one_request_with_its_length_and_nothing_is_added() -> None:
    with connected(serving, path="/a%20b?c=d") as (server, connection):
        assert connection.send(call(connection, b"body")) == (200, b"{}", "")
        assert connection.send(call(connection, b"")).status == 200
        assert connection.send(call(connection, None)).status == 200
    host = f"Host: 127.0.0.1:{server.port}\r\n".encode()
    assert server.asked == [
        b"POST /a%20b?c=d HTTP/1.1\r\n" + host + b"Content-Length: 4\r\n\r\nbody",
        b"POST /a%20b?c=d HTTP/1.1\r\n" + host + b"Content-Length: 0\r\n\r\n",
        b"GET /a%20b?c=d HTTP/1.1\r\n" + host + b"\r\n",
    ]
    assert len(server.peers) == 1


@pytest.mark.parametrize(
    ("said", "body", "kept"),
    [
        (answer(b"known"), b"known", True),
        (CHUNKED + b"2\r\nin\r\n6;x=y\r\n parts\r\n0\r\nA: b\r\n\r\n", b"in parts", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(b"last"), b"last", True),
        (answer(b"last one", "200 OK", "Connection: close"), b"last one", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold", b"old", False),
        (answer(b"and") + b"more", b"and", False),
    ],
)  # fmt: skip
def test_each_form_of_an_answer_is_read_and_the_connection_kept_only_where_the_next_one_can_be_told_apart(
    said: bytes, body: bytes, kept: bool
) -> None:
    def script(peer: Peer) -> None:
        while peer.request():
            peer.say(said)

    with connected(script) as (server, connection):
        for _ in range(2):
            assert connection.send(call(connection)).body == body
            assert connection.is_open is kept
        assert len(server.peers) == (1 if kept else 2)
        assert len(server.asked) == 2


def test_an_answer_without_a_length_ends_where_the_server_closes() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.say(b"HTTP/1.1 200 OK\r\n\r\nuntil ")
        peer.say(b"the end")

    with connected(script) as (_, connection):
        assert connection.send(call(connection)).body == b"until the end"
        assert not connection.is_open


def test_an_answer_byte_by_byte_is_the_same_answer() -> None:
    def script(peer: Peer) -> None:
        while peer.request():
            for byte in CHUNKED + b"3\r\nabc\r\n0\r\n\r\n":
                peer.say(bytes([byte]))

    with connected(script) as (_, connection):
        for _ in range(2):
            assert connection.send(call(connection)) == (200, b"abc", "")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\n", b"X-More: y\r\n"),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n", b"x"),
        (CHUNKED, b"0"),
    ],
)
def test_an_answer_that_trickles_in_at_whatever_place_is_given_up_at_the_deadline(first: bytes, then: bytes) -> None:
    ended: list[bool] = []

    def script(peer: Peer) -> None:
        peer.request()
        peer.say(first)
        ended.append(peer.trickle(then))

    with connected(script) as (server, connection):
        with pytest.raises((SlowAnswerError, BrokenConnectionError)) as caught:
            connection.send(call(connection, within=0.3, limit=10**6))
        # What can be no HTTP any more is given up even sooner.
        assert caught.type is SlowAnswerError or then in (b"H", b"0")
        assert not connection.is_open
        assert len(server.asked) == 1
    assert ended == [False]


def test_a_body_that_the_server_does_not_take_is_given_up_at_the_deadline() -> None:
    def script(peer: Peer) -> None:
        peer.head()
        peer.over.wait(LONG)

    with connected(script) as (_, connection):
        with pytest.raises(SlowAnswerError):
            connection.send(call(connection, bytes(64 * 2**20), within=0.3))


def test_a_server_that_refuses_a_body_before_its_end_is_heard() -> None:
    def script(peer: Peer) -> None:
        peer.head()
        peer.say(answer(b"too long", "413 Content Too Large"))

    with connected(script) as (server, connection):
        assert connection.send(call(connection, bytes(64 * 2**20)))[:2] == (413, b"too long")
        assert not connection.is_open
        assert len(server.peers) == 1


def test_an_answer_over_the_limit_is_cut_though_it_had_no_end() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.say(CHUNKED)
        while True:
            peer.say(b"3e8\r\n" + bytes(1000) + b"\r\n")

    with connected(script) as (_, connection):
        with pytest.raises(LongAnswerError, match="more than 5,000 bytes"):
            connection.send(call(connection, limit=5000))
        assert not connection.is_open


def test_a_head_without_end_is_cut() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.say(b"HTTP/1.1 200 OK\r\n")
        while True:
            peer.say(b"X-More: " + b"x" * 1000 + b"\r\n")

    with connected(script) as (_, connection):
        with pytest.raises(BrokenConnectionError):
            connection.send(call(connection))


@pytest.mark.parametrize(
    "said",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Le", answer(b"{}")[:-1], b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 101 Up\r\n\r\n"],
)
def test_what_ends_within_the_answer_or_is_none_is_a_broken_connection_and_is_not_sent_again(said: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.say(said)

    with connected(script, serving) as (server, connection):
        with pytest.raises(BrokenConnectionError, match=r"\w"):
            connection.send(call(connection))
        assert len(server.asked) == 1
        assert connection.send(call(connection)).status == 200
        assert len(server.asked) == len(server.peers) == 2


def test_what_the_server_says_or_does_while_idle_is_noticed() -> None:
    wanted, done = threading.Semaphore(0), threading.Semaphore(0)

    def unasked(peer: Peer) -> None:
        peer.request()
        peer.say(answer())
        wanted.acquire(timeout=LONG)
        peer.say(answer(b"nobody asked", "408 Request Timeout"))
        done.release()
        peer.request()

    def closing(peer: Peer) -> None:
        peer.request()
        peer.say(answer())
        wanted.acquire(timeout=LONG)
        peer.close()
        done.release()

    with connected(unasked, closing) as (_, connection):
        assert not connection.is_quiet()
        for _ in range(2):
            connection.send(call(connection))
            assert connection.is_quiet()
            wanted.release()
            assert done.acquire(timeout=LONG)
            assert not connection.is_quiet()
            connection.close()


def test_nobody_there_is_told_from_nobody_who_answers(free_port: int) -> None:
    with contextlib.closing(KeptConnection(f"http://127.0.0.1:{free_port}")) as connection:
        with pytest.raises(UnreachableError, match="refused"):
            connection.send(call(connection))
    for host in ("no.such.host.invalid", "a" * 70 + ".invalid"):
        connection = KeptConnection(f"http://{host}")
        with pytest.raises(UnreachableError, match=r"\w"):
            connection.send(call(connection))


def test_a_name_with_several_addresses_is_tried_at_each_of_them(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(serving) as (server, connection):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in (free_port, server.port)]
        found.insert(0, (-1, socket.SOCK_STREAM, 0, "", ("of a family that this machine does not know", 0)))
        monkeypatch.setattr(kept_connection.socket, "getaddrinfo", lambda *asked, **how: found)
        assert connection.send(call(connection)).status == 200
        connection.close()
        del found[-1]
        with pytest.raises(UnreachableError, match="refused"):
            connection.send(call(connection))


def test_an_address_where_nobody_answers_leaves_time_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(serving) as (server, connection), contextlib.ExitStack() as opened:
        # Whoever connects when as many as are let wait do so already is not answered at all.
        full = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        ports = (full.getsockname()[1], server.port)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports]
        monkeypatch.setattr(kept_connection.socket, "getaddrinfo", lambda *asked, **how: found)
        assert connection.send(call(connection, connect_by=time.monotonic() + 2.0)).status == 200


def test_a_connection_that_is_not_made_in_time_is_told_from_a_slow_answer() -> None:
    with RawServer(lambda peer: peer.over.wait(LONG)) as silent:
        with contextlib.closing(KeptConnection(silent.url.replace("http:", "https:"))) as connection:
            with pytest.raises(SlowConnectionError):
                connection.send(call(connection, connect_by=time.monotonic() + 0.3))


def encrypted(peer: Peer) -> None:
    peer.encrypt()
    serving(peer)


def test_https_is_spoken_with_whom_the_trust_covers_and_under_no_other_name() -> None:
    trust = ssl.create_default_context(cafile=CERTIFICATE)
    with RawServer(encrypted) as server, RawServer(encrypted, host="127.0.0.2") as other:
        with contextlib.closing(KeptConnection(f"https://127.0.0.1:{server.port}/r", trust)) as connection:
            assert connection.send(call(connection, bytes(2**20))).status == 200
            assert connection.is_quiet()
            assert connection.send(call(connection)).status == 200
        assert len(server.peers) == 1
        for url, whom in ((f"https://127.0.0.2:{other.port}", trust), (f"https://127.0.0.1:{server.port}", None)):
            with contextlib.closing(KeptConnection(url, whom)) as connection:
                with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
                    connection.send(call(connection))
    assert (len(server.asked), other.asked) == (2, [])


@pytest.mark.timeout(60)
def test_a_head_that_trickles_in_over_tls_is_given_up_at_the_deadline() -> None:
    def script(peer: Peer) -> None:
        peer.encrypt()
        peer.request()
        peer.say(b"HTTP/1.1 200 OK\r\n")
        assert not peer.trickle(b"x")

    with RawServer(script) as server:
        trust = ssl.create_default_context(cafile=CERTIFICATE)
        with contextlib.closing(KeptConnection(f"https://127.0.0.1:{server.port}", trust)) as connection:
            with pytest.raises(SlowAnswerError):
                connection.send(call(connection, within=0.5))


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_call_that_is_aborted_fails_at_once_and_no_other_is_made(encrypt: bool) -> None:
    arrived = threading.Event()

    def script(peer: Peer) -> None:
        if encrypt:
            peer.encrypt()
        peer.request()
        arrived.set()
        peer.over.wait(LONG)

    failed: list[BaseException] = []
    with RawServer(script) as server:
        url = f"{'https' if encrypt else 'http'}://127.0.0.1:{server.port}"
        connection = KeptConnection(url, ssl.create_default_context(cafile=CERTIFICATE))

        def ask() -> None:
            try:
                connection.send(call(connection))
            except BrokenConnectionError as fault:
                failed.append(fault)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert arrived.wait(LONG)
        connection.abort()
        thread.join(LONG)
        assert len(failed) == 1
        with pytest.raises(BrokenConnectionError, match="from this side"):
            connection.send(call(connection))
        assert len(server.asked) == 1


def test_ipv6_and_a_user_in_the_url_give_the_host_that_is_meant() -> None:
    assert KeptConnection("http://user:pw@[::1]:81/p").authority == "[::1]:81"
    try:
        server = RawServer(serving, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server, contextlib.closing(KeptConnection(server.url)) as connection:
        assert connection.send(call(connection)).status == 200
        assert f"\r\nHost: [::1]:{server.port}\r\n".encode() in server.asked[0]


def test_a_time_without_end_is_one() -> None:
    with connected(serving) as (_, connection):
        assert connection.send(call(connection, connect_by=float("inf"), deadline=float("inf"))).status == 200
