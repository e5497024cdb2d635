"""The way to an engine: straight, or by a proxy of the environment; either fails in the same words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import certifi
import httpx
import pytest

from control.raw_server import CERTIFICATE, Peer, RawServer, answer, serving
from rankcast.control import http
from rankcast.control.egress import exchange_with, proxy_for
from rankcast.control.http import HttpClient
from rankcast.control.kept_connections import KeptConnections
from rankcast.control.proxied import ProxiedCalls
from rankcast.errors import EngineError

LONG = 60.0
ELSEWHERE = "engine.invalid:8000"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD")
Reach = Callable[[RawServer], str]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(params=["straight", "proxied"])
def reach(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reach:
    """The URL of an engine whose calls come to a server: it is the engine, or the proxy on the way to it."""

    def reached(server: RawServer) -> str:
        if request.param == "straight":
            return server.url
        monkeypatch.setenv("HTTP_PROXY", server.url)
        return f"http://{ELSEWHERE}"

    return reached


def saying(data: bytes) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.request()
        peer.say(data)

    return script


@pytest.mark.parametrize(
    "said",
    [
        answer(b'{"is_paused": true}'),
        answer(b'{"is_paused": true}', "200 OK", "Content-Encoding: identity"),
        CHUNKED + b'd\r\n{"is_paused":\r\n5\r\ntrue}\r\n0\r\n\r\n',
        b'HTTP/1.1 200 OK\r\n\r\n{"is_paused": true}',
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(b'{"is_paused": true}'),
    ],
)
def test_each_form_of_an_answer_is_understood(reach: Reach, said: bytes) -> None:
    with RawServer(saying(said)) as server, HttpClient(reach(server)) as client:
        assert client.is_paused() is True
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "the connection broke .* whether it was done is not known"),
        (b"no HTTP\r\n\r\n", "the connection broke .* whether it was done is not known"),
        (answer(b"{}")[:-1], "the connection broke .* whether it was done is not known"),
        (answer(b"moved", "307 Temporary Redirect", "Location: /elsewhere"), "answered 307: moved"),
        (answer(b"{}", "200 OK", "Content-Encoding: gzip"), "answered 200 in the encoding 'gzip', which it was"),
        (answer(b"{}", "502 Bad Gateway", "Content-Encoding: br"), "answered 502 in the encoding 'br'"),
        (answer(b"busy", "503 Service Unavailable"), "answered 503: busy"),
    ],
)  # fmt: skip
def test_each_failure_is_told_and_the_call_not_sent_again(reach: Reach, said: bytes, words: str) -> None:
    with RawServer(saying(said)) as server, HttpClient(reach(server)) as client:
        with pytest.raises(EngineError, match=f"/resume of {client.url}: {words}"):
            client.resume()
        assert len(server.asked) == client.requests == 1


def test_an_answer_without_end_is_cut_at_the_limit(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REPLY_LIMIT", 100_000)

    def endless(peer: Peer) -> None:
        peer.request()
        peer.say(CHUNKED)
        while True:
            peer.say(b"3e8\r\n" + b" " * 1000 + b"\r\n")

    with RawServer(endless) as server, HttpClient(reach(server)) as client:
        with pytest.raises(EngineError, match="answered with more than 100,000 bytes"):
            client.resume()


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\n"])
def test_an_answer_that_does_not_come_is_given_up_at_the_timeout(reach: Reach, first: bytes) -> None:
    def silent(peer: Peer) -> None:
        peer.request()
        peer.say(first)
        peer.over.wait(LONG)

    with RawServer(silent) as server, HttpClient(reach(server), timeout=0.3) as client:
        with pytest.raises(EngineError, match=r"no answer within .* \(timeout=0.3\); whether it was done is not known"):
            client.resume()


@pytest.mark.timeout(60)
def test_a_body_that_trickles_in_is_given_up_at_the_timeout(reach: Reach) -> None:
    ended: list[bool] = []

    def script(peer: Peer) -> None:
        peer.request()
        peer.say(CHUNKED)
        ended.append(peer.trickle(b"1\r\n \r\n"))

    with RawServer(script) as server, HttpClient(reach(server), timeout=0.3) as client:
        with pytest.raises(EngineError, match=r"no answer within .* \(timeout=0.3\)"):
            client.resume()
    assert ended == [False]


def test_nobody_there_cannot_be_reached(reach: Reach, free_port: int) -> None:
    with RawServer(serving) as server:
        server.url = f"http://127.0.0.1:{free_port}"
        with HttpClient(reach(server)) as client:
            with pytest.raises(EngineError, match=r"cannot be reached \(.*refused"):
                client.resume()


def test_a_closed_client_says_so(reach: Reach) -> None:
    with RawServer(serving) as server:
        client = HttpClient(reach(server))
        client.resume()
        client.close()
        with pytest.raises(EngineError, match="this client is closed"):
            client.resume()
        assert len(server.asked) == 1


def test_what_is_sent_is_the_same_but_for_the_form_of_the_target(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(serving) as server:
        host = reach(server).removeprefix("http://")
        with HttpClient(
            f"http://us%40er:pass@{host}/a%2Fb/c d/",
            headers={"X-Team": "blue", "accept-encoding": "gzip", "Content-Type": "text/plain"},
            sign=lambda asked, body: f"{asked} <{body.decode()}>",
        ) as client:
            client.pause("wait")
            client.update_weight_version("17")
        lines = [request.split(b"\r\n") for request in server.asked]
        where = b"" if host != ELSEWHERE else f"http://{ELSEWHERE}".encode()
        assert [line[0].split()[1] for line in lines] == [
            where + b"/a%2Fb/c%20d/pause?mode=wait&clear_cache=true",
            where + b"/a%2Fb/c%20d/update_weight_version",
        ]
        same = {
            b"Host: " + host.encode(),
            b"X-Team: blue",
            b"Accept-Encoding: identity",
            b"Authorization: Basic dXNAZXI6cGFzcw==",
        }
        assert same | {b"Content-Length: 0", b"X-Rankcast-Mac: /pause?mode=wait&clear_cache=true <>"} <= set(lines[0])
        body = b'{"new_version":"17"}'
        mac = b"X-Rankcast-Mac: /update_weight_version <" + body + b">"
        assert same | {b"Content-Length: 20", b"Content-Type: application/json", mac, body} <= set(lines[1])
        names = [[line.partition(b":")[0].lower() for line in one[1 : one.index(b"")]] for one in lines]
        assert all(len(set(found)) == len(found) for found in names)


@pytest.mark.timeout(60)
def test_a_head_that_trickles_in_is_given_up_at_the_timeout() -> None:
    ended: list[bool] = []

    def script(peer: Peer) -> None:
        peer.request()
        peer.say(b"HTTP/1.1 200 OK\r\nX-Long: ")
        ended.append(peer.trickle(b"x"))

    with RawServer(script) as server, HttpClient(server.url, timeout=0.3) as client:
        with pytest.raises(EngineError, match=r"/resume of .*: no answer within .* \(timeout=0.3\)"):
            client.resume()
        assert len(server.asked) == 1
    assert ended == [False]


def test_a_call_in_flight_fails_when_the_client_is_closed() -> None:
    arrived = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        arrived.set()
        peer.over.wait(LONG)

    with RawServer(script) as server:
        client = HttpClient(server.url)
        closing = threading.Thread(target=lambda: arrived.wait(LONG) and client.close())
        closing.start()
        with pytest.raises(EngineError, match=r"this client is closed .*whether it was done is not known"):
            client.resume()
        closing.join(LONG)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_proxies_are_never_asked_for_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(serving) as proxy, RawServer(serving) as server:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        with HttpClient(f"http://{host}:{server.port}") as client:
            client.resume()
        assert (len(server.asked), len(proxy.asked)) == (1, 0)


def test_an_engine_elsewhere_that_no_proxy_is_for_is_asked_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(serving) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "engine.invalid")
        with HttpClient(f"http://{ELSEWHERE}") as client:
            with pytest.raises(EngineError, match="cannot be reached"):
                client.resume()
        assert proxy.asked == []


@pytest.mark.parametrize(
    ("named", "excepted", "url", "proxy"),
    [
        ({}, "", "http://engine", None),
        ({"HTTP_PROXY": "http://p:1"}, "", "http://engine", "http://p:1"),
        ({"http_proxy": "p:1"}, "", "http://engine", "http://p:1"),
        ({"HTTP_PROXY": "http://p:1"}, "", "https://engine", None),
        ({"HTTPS_PROXY": "http://p:1"}, "", "http://engine", None),
        ({"HTTPS_PROXY": "http://p:1", "ALL_PROXY": "http://p:2"}, "", "https://engine", "http://p:1"),
        ({"ALL_PROXY": "http://p:2"}, "", "https://engine", "http://p:2"),
        ({"HTTP_PROXY": "http://p:1"}, "*", "http://engine", None),
        ({"HTTP_PROXY": "http://p:1"}, "engine", "http://engine:8000", None),
        ({"HTTP_PROXY": "http://p:1"}, "other, engine:8000", "http://engine:8000", None),
        ({"HTTP_PROXY": "http://p:1"}, "engine:80", "http://engine", None),
        ({"HTTP_PROXY": "http://p:1"}, "engine:8001", "http://engine:8000", "http://p:1"),
        ({"HTTP_PROXY": "http://p:1"}, "cluster.local", "http://a.cluster.local", None),
        ({"HTTP_PROXY": "http://p:1"}, ".cluster.local", "http://a.cluster.local", None),
        ({"HTTP_PROXY": "http://p:1"}, "cluster.local", "http://acluster.local", "http://p:1"),
        ({"HTTP_PROXY": "http://p:1"}, "10.0.0.1", "http://10.0.0.1:8000", None),
        ({"HTTP_PROXY": "http://p:1"}, "10.0.0.1", "http://10.0.0.10:8000", "http://p:1"),
        ({"HTTP_PROXY": "http://p:1"}, "fd00::1", "http://[fd00::1]:8000", None),
        ({"HTTP_PROXY": "http://p:1"}, "", "http://[fd00::1]:8000", "http://p:1"),
    ],
)  # fmt: skip
def test_which_proxy_the_environment_names(
    named: dict[str, str], excepted: str, url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", excepted)
    assert proxy_for(httpx.URL(url)) == proxy


@pytest.mark.parametrize("proxy", ["ftp://user:hush@p:1", "http://user:hush@p:port"])
def test_a_proxy_that_cannot_be_used_is_said_at_once_and_its_password_is_not(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(EngineError, match=rf"^http://{ELSEWHERE} .* cannot be used .*NO_PROXY") as caught:
        HttpClient(f"http://us:er@{ELSEWHERE}")
    assert "hush" not in str(caught.value)


def encrypted(peer: Peer) -> None:
    peer.encrypt()
    serving(peer)


UNTRUSTED = r"certificate is not trusted \(.*CERTIFICATE_VERIFY_FAILED.*tls_verify=False"


@pytest.fixture
def https_engine() -> Iterator[RawServer]:
    with RawServer(encrypted) as server:
        server.url = server.url.replace("http:", "https:")
        yield server


def test_a_certificate_that_nobody_vouches_for_is_refused_unless_it_is_not_asked_for(https_engine: RawServer) -> None:
    with HttpClient(https_engine.url) as client:
        with pytest.raises(EngineError, match=UNTRUSTED):
            client.resume()
    assert https_engine.asked == []
    with HttpClient(https_engine.url, tls_verify=False) as client:
        client.resume()
        client.resume()
    assert len(https_engine.asked) == 2
    assert len(https_engine.peers) == 2  # the one that was refused, and one for both calls


def test_a_certificate_that_the_caller_names_is_trusted(https_engine: RawServer) -> None:
    for named in (CERTIFICATE, str(CERTIFICATE)):
        with HttpClient(https_engine.url, tls_verify=named) as client:
            client.resume()
    assert len(https_engine.asked) == 2


def test_what_the_caller_names_is_trusted_in_the_place_of_what_the_environment_names(
    https_engine: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with HttpClient(https_engine.url, tls_verify=certifi.where()) as client:
        with pytest.raises(EngineError, match=UNTRUSTED):
            client.resume()
    assert https_engine.asked == []


@pytest.mark.parametrize("named", ["", "absent.pem", ".", __file__])
def test_certificates_that_cannot_be_read_are_said_at_once(named: str) -> None:
    with pytest.raises(EngineError, match=r"^https://engine.invalid .*cannot be read .* PEM form$") as caught:
        HttpClient("https://engine.invalid", tls_verify=named)
    assert f"tls_verify={named!r}" in str(caught.value)


def tunnel(peer: Peer) -> None:
    peer.request()
    peer.say(b"HTTP/1.1 200 Connection established\r\n\r\n")
    encrypted(peer)


def test_an_https_engine_behind_a_proxy_is_asked_through_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(tunnel) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with HttpClient("https://engine.invalid", tls_verify=False) as client:
            client.resume()
        assert [request.split(b" HTTP")[0] for request in proxy.asked] == [
            b"CONNECT engine.invalid:443",
            b"POST /resume",
        ]
        with HttpClient("https://engine.invalid") as client:
            with pytest.raises(EngineError, match=UNTRUSTED):
                client.resume()


def test_both_ways_trust_the_certificates_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with RawServer(tunnel) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with HttpClient("https://engine.invalid") as client:
            with pytest.raises(EngineError, match="Hostname mismatch"):
                client.resume()


def test_a_certificate_of_this_machine_that_the_environment_names_is_trusted_on_loopback(
    https_engine: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with HttpClient(https_engine.url.replace("127.0.0.1", "localhost")) as client:
        client.resume()
    assert len(https_engine.asked) == 1


def test_the_address_that_servers_print_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for host in ("0.0.0.0", "[::]", "[::ffff:127.0.0.1]"):
        assert isinstance(exchange_with(httpx.URL(f"http://{host}:8000"), tls_verify=True), KeptConnections)
    assert isinstance(exchange_with(httpx.URL("http://192.0.2.1:8000"), tls_verify=True), ProxiedCalls)


def test_a_handshake_that_does_not_end_is_no_connection_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.3)
    with RawServer(lambda peer: peer.over.wait(LONG)) as server:
        with HttpClient(server.url.replace("http:", "https:"), tls_verify=False) as client:
            with pytest.raises(EngineError, match=r"/resume of .*: no connection within 0.3 s"):
                client.resume()
