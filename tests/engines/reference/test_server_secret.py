"""A server with a secret: what it takes unsigned, what it does not, and how large a body each route takes."""

from __future__ import annotations

import secrets

import httpx
import pytest

from fleets import started_server
from rankcast.control.http import HttpClient
from rankcast.engines.reference.bodies import SMALL_BODY_LIMIT
from rankcast.errors import EngineError
from rankcast.wire.codec import MAC_HEADER, Codec

# As a file of random bytes gives it: no text in any encoding.
SECRET = b"\xff\xfe" + secrets.token_bytes(16).replace(b"\0", b"1").replace(b"\n", b"2")
CODEC = Codec(SECRET)
MUTATING = (
    "/start_weight_update",
    "/finish_weight_update",
    "/abort_weight_update",
    "/update_weight_version",
    "/pause?mode=keep",
    "/resume",
    "/reset_prefix_cache",
)


@pytest.fixture(scope="module")
def server(first):
    with started_server(first.directory, secret=SECRET.decode(errors="surrogateescape")) as server:
        yield server


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        yield http


def body_of(route):
    return b'{"new_version":"x"}' if route == "/update_weight_version" else b""


def forged(route):
    yield {}
    yield {MAC_HEADER: "0" * 64}
    yield {MAC_HEADER: Codec(b"another").sign(route, body_of(route))}
    yield {MAC_HEADER: CODEC.sign("/generate", body_of(route))}
    yield {MAC_HEADER: CODEC.sign(route, body_of(route) + b" ")}
    yield {MAC_HEADER: CODEC.sign(f"{route}&" if "?" in route else f"{route}?", body_of(route))}


@pytest.mark.parametrize("route", MUTATING)
def test_what_changes_something_must_be_signed_for_this_route_and_this_body(http, route):
    before = http.get("/weight_info").json()
    for headers in forged(route):
        response = http.post(route, content=body_of(route), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "authentication")
        assert "MAC" in response.json()["error"]["message"] or MAC_HEADER in response.json()["error"]["message"]
    after = http.get("/weight_info").json()
    assert (after["is_paused"], after["weight_version"]) == (before["is_paused"], before["weight_version"])


def test_what_only_asks_need_not_be_signed(http):
    assert http.post("/generate", json={"token_ids": [1, 2], "max_tokens": 1}).status_code == 200
    assert http.post("/weight_checker", json={"action": "checksum"}).status_code == 200
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_a_client_that_signs_is_obeyed(server):
    with HttpClient(server.url, sign=CODEC.sign, headers={"Authorization": "Bearer an API key"}) as client:
        client.pause("wait", clear_cache=False)
        assert client.is_paused()
        client.resume()
        assert not client.is_paused()
        assert client.reset_prefix_cache()
        with pytest.raises(EngineError, match=r"401.*signed claim"):
            client.start_weight_update()
        with pytest.raises(EngineError, match=r"401.*'mine'"):
            client.update_weight_version("mine")


@pytest.mark.parametrize("route", [*MUTATING, "/generate", "/weight_checker"])
def test_only_the_routes_of_messages_take_large_bodies(http, route):
    response = http.post(route, content=b" " * (SMALL_BODY_LIMIT + 1))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("route", "field"), [("/update_weights", "update_info"), ("/init_weight_transfer_engine", "init_info")]
)
def test_messages_may_be_large(http, route, field):
    response = http.post(route, json={field: {"body": " " * (SMALL_BODY_LIMIT + 1)}})
    assert response.status_code == 401, "read whole, and then refused for its missing MAC"
