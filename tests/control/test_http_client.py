"""The HTTP client says what vLLM's routes expect, and every way in which an engine can fail is an error with a name."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from rankcast.control import http
from rankcast.control.client import CAPABILITIES, WeightSyncClient, capability
from rankcast.control.http import HttpClient
from rankcast.errors import EngineError, PayloadError
from rankcast.wire.codec import MAC_HEADER, Codec

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
DICT = st.dictionaries(st.text(max_size=8), JSON, max_size=4)


@pytest.fixture
def client(engine: Any) -> Iterator[HttpClient]:
    with HttpClient(engine.url) as made:
        yield made


def answering(status: int, value: object) -> Any:
    async def answer(request: Request) -> Response:
        return JSONResponse(value, status_code=status)

    return answer


@pytest.mark.parametrize(
    ("call", "arguments", "method", "path", "query", "body"),
    [
        ("init_weight_transfer_engine", ({},), "POST", "init_weight_transfer_engine", {}, {"init_info": {}}),
        ("start_weight_update", (), "POST", "start_weight_update", {}, {}),
        ("update_weights", ({"names": []},), "POST", "update_weights", {}, {"update_info": {"names": []}}),
        ("update_weights", ([{}, {"n": 2}],), "POST", "update_weights", {}, {"update_info": [{}, {"n": 2}]}),
        ("finish_weight_update", (), "POST", "finish_weight_update", {}, {}),
        ("finish_weight_update", ("17",), "POST", "finish_weight_update", {}, {"weight_version": "17"}),
        ("update_weight_version", ("17",), "POST", "update_weight_version", {}, {"new_version": "17"}),
        ("pause", (), "POST", "pause", {"mode": "keep", "clear_cache": "true"}, None),
        ("pause", ("wait", False), "POST", "pause", {"mode": "wait", "clear_cache": "false"}, None),
        ("resume", (), "POST", "resume", {}, None),
        ("abort", (), "POST", "abort_weight_update", {}, {}),
        (
            "reset_prefix_cache",
            (),
            "POST",
            "reset_prefix_cache",
            {"reset_running_requests": "true", "reset_external": "true"},
            None,
        ),
        ("weight_checker", (), "POST", "weight_checker", {}, {"action": "checksum"}),
        ("weight_checker", ("compare", {}), "POST", "weight_checker", {}, {"action": "compare", "baseline": {}}),
        ("is_paused", (), "GET", "is_paused", {}, None),
        ("weight_info", (), "GET", "weight_info", {}, None),
        ("get_world_size", (), "GET", "get_world_size", {"include_dp": "true"}, None),
        ("generate", ([1, 2], 3), "POST", "generate", {}, {"token_ids": [1, 2], "max_tokens": 3}),
    ],
)  # fmt: skip
def test_each_call_is_the_request_that_the_route_expects(
    engine: Any,
    client: HttpClient,
    call: str,
    arguments: tuple[Any, ...],
    method: str,
    path: str,
    query: Any,
    body: Any,
) -> None:
    replies = {"is_paused": True, "weight_version": "17", "world_size": 8, "success": False}
    engine.answers[f"/{path}"] = answering(200, replies)
    reply = getattr(client, call)(*arguments)
    expected = {"is_paused": True, "weight_info": replies, "get_world_size": 8, "reset_prefix_cache": False}
    assert reply == (replies if call in ("weight_checker", "generate") else expected.get(call))
    ((was, at, asked, sent),) = engine.received
    assert (was, at, asked) == (method, f"/{path}", query)
    assert (msgspec.json.decode(sent) if sent else None) == body
    assert (client.requests, client.request_bytes) == (1, len(sent))
    if sent:
        assert engine.headers[0]["content-type"] == "application/json"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=DICT | st.lists(DICT, max_size=4))
def test_list_and_dict_payloads_are_the_same_objects_after_the_round_trip(
    engine: Any, client: HttpClient, payload: Any
) -> None:
    client.update_weights(payload)
    arrived = msgspec.json.decode(engine.received[-1][3])["update_info"]
    assert type(arrived) is type(payload)
    assert arrived == payload
    assert repr(arrived) == repr(payload)  # 1 and 1.0 and True, 0.0 and -0.0 differ here


def test_a_client_that_signs_signs_each_order_with_its_route_query_and_body(engine: Any) -> None:
    codec = Codec(b"secret")
    engine.answers["/is_paused"] = answering(200, {"is_paused": True})
    with HttpClient(
        f"{engine.url}/behind/a/proxy", sign=codec.sign, headers={"Authorization": "Bearer key"}
    ) as signing:
        signing.pause("wait")
        signing.resume()
        signing.update_weight_version("17")
    for (_, at, query, body), headers in zip(engine.received, engine.headers, strict=True):
        route = at.removeprefix("/behind/a/proxy")
        asked = f"{route}?mode=wait&clear_cache=true" if query else route
        codec.check_signature(asked, body, headers[MAC_HEADER.lower()])
        assert headers["authorization"] == "Bearer key"


def test_a_client_without_a_secret_signs_nothing(engine: Any, client: HttpClient) -> None:
    client.resume()
    assert MAC_HEADER.lower() not in engine.headers[0]


def test_all_calls_of_one_caller_go_over_one_kept_connection(engine: Any, client: HttpClient) -> None:
    for _ in range(20):
        client.start_weight_update()
    assert len(engine.peers) == 1
    assert client.requests == 20


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ({"error": {"code": "state", "message": "start twice", "faults": []}}, "start twice"),
        ({"error": {"message": "two", "faults": [{"message": "w0 bad"}, "w1 bad"]}}, "two; w0 bad; w1 bad"),
        ({"error": "in one line"}, "in one line"),
        ({"detail": "as FastAPI puts it"}, "as FastAPI puts it"),
        ({"detail": [{"loc": ["body"], "msg": "Field required"}]}, "Field required"),
        ({"object": "error", "message": "an older form"}, "an older form"),
        ([1, 2], r"\[1,2\]"),
        ({}, r"\{\}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("status", [400, 401, 409, 500, 503])
def test_a_refusal_names_the_url_the_call_the_status_and_what_the_server_said(
    engine: Any, client: HttpClient, status: int, reply: Any, says: str
) -> None:
    engine.answers["/start_weight_update"] = answering(status, reply)
    with pytest.raises(EngineError, match=rf"/start_weight_update of {engine.url}: answered {status}: .*{says}"):
        client.start_weight_update()
    assert client.requests == 1  # nothing is tried again


@pytest.mark.parametrize("phase", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_an_engine_that_answers_500_with_plain_text_fails_each_phase_and_the_next_call_works(
    engine: Any, client: HttpClient, phase: str
) -> None:
    async def fail(request: Request) -> Response:
        return PlainTextResponse("Internal\n  Server Error", status_code=500)

    engine.answers[f"/{phase}"] = fail
    arguments = ({},) if phase == "update_weights" else ()
    with pytest.raises(EngineError, match="500: Internal Server Error"):
        getattr(client, phase)(*arguments)
    del engine.answers[f"/{phase}"]
    getattr(client, phase)(*arguments)


def test_a_long_text_of_the_server_is_cut_and_bytes_that_are_no_text_do_no_harm(
    engine: Any, client: HttpClient
) -> None:
    async def fail(request: Request) -> Response:
        return Response(b"\xff" * 10 + b"x" * 100_000, status_code=500)

    engine.answers["/resume"] = fail
    with pytest.raises(EngineError) as caught:
        client.resume()
    assert 2000 < len(caught.value.message) < 2500


@pytest.mark.parametrize("phase", ["start_weight_update", "update_weights", "finish_weight_update", "is_paused"])
def test_an_engine_that_never_answers_fails_within_the_timeout_and_its_late_answer_is_nobody_elses(
    engine: Any, phase: str
) -> None:
    closing = engine.closing

    async def never(request: Request) -> Response:
        await closing.wait()
        return JSONResponse({"is_paused": "the late answer"})

    engine.answers[f"/{phase}"] = never
    engine.answers["/weight_info"] = answering(200, {"weight_version": "its own answer"})
    with HttpClient(engine.url, timeout=0.5) as client:
        with pytest.raises(EngineError, match=rf"/{phase} of .* no answer within .* \(timeout=0.5\)"):
            getattr(client, phase)(*([{}] if phase == "update_weights" else []))
        assert client.weight_info() == {"weight_version": "its own answer"}


def test_an_answer_that_trickles_without_end_fails_within_the_timeout(engine: Any) -> None:
    closing = engine.closing

    async def trickle(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            while not closing.is_set():
                yield b" " * 1000
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(closing.wait(), 0.01)

        return StreamingResponse(parts())

    engine.answers["/resume"] = trickle
    with HttpClient(engine.url, timeout=0.5) as client:
        with pytest.raises(EngineError, match="no answer within"):
            client.resume()


def test_an_answer_over_the_limit_is_refused(engine: Any, client: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REPLY_LIMIT", 1000)
    engine.answers["/weight_info"] = answering(200, {"weight_version": "x" * 1000})
    with pytest.raises(EngineError, match="more than 1,000 bytes"):
        client.weight_info()


def test_a_connection_that_closes_half_way_through_the_answer_is_an_error_and_the_next_call_connects_anew(
    engine: Any, client: HttpClient
) -> None:
    async def half(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b'{"is_pau'

        return StreamingResponse(parts(), headers={"Content-Length": "100"})

    client.start_weight_update()
    engine.answers["/is_paused"] = half
    with pytest.raises(EngineError, match=r"/is_paused of .* the connection broke"):
        client.is_paused()
    client.start_weight_update()
    assert len(engine.peers) == 2


def test_a_server_that_closes_without_a_word_was_asked_exactly_once() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(65536))
                if asked[-1].startswith(b"GET /is_paused"):
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener, HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=5) as client:
        with pytest.raises(EngineError, match=r"the connection broke .* whether it was done is not known"):
            client.update_weights({"names": []})
        with pytest.raises(EngineError, match="the connection broke"):
            client.is_paused()
        thread.join(10)
    assert [line.split(b" HTTP")[0] for line in asked] == [b"POST /update_weights", b"GET /is_paused"]


def test_after_a_restart_of_the_server_the_next_call_connects_anew(scripted: Any) -> None:
    first = scripted()
    with HttpClient(first.url) as client:
        client.start_weight_update()
        first.close()
        with pytest.raises(EngineError, match="cannot be reached"):
            client.start_weight_update()
        second = scripted(first.port)
        try:
            client.start_weight_update()
            assert len(second.received) == 1
        finally:
            second.close()


def test_an_engine_that_is_not_there_is_named(free_port: int) -> None:
    with HttpClient(f"http://127.0.0.1:{free_port}/") as client:
        with pytest.raises(EngineError, match=rf"/resume of http://127.0.0.1:{free_port}: cannot be reached"):
            client.resume()


@pytest.mark.parametrize("call", ["start_weight_update", "pause", "is_paused", "weight_info", "reset_prefix_cache"])
def test_a_server_without_the_routes_says_how_vllm_gets_them(engine: Any, client: HttpClient, call: str) -> None:
    engine.answers[f"/{call}"] = answering(404, {"detail": "Not Found"})
    with pytest.raises(EngineError, match=r"answered 404: Not Found .*VLLM_SERVER_DEV_MODE=1"):
        getattr(client, call)()


def test_a_route_of_the_embedded_server_alone_blames_no_setting_of_vllms(engine: Any, client: HttpClient) -> None:
    engine.answers["/abort_weight_update"] = answering(404, {"detail": "Not Found"})
    with pytest.raises(EngineError, match="only rankcast's embedded server") as caught:
        client.abort()
    assert "VLLM" not in caught.value.message


@pytest.mark.parametrize("reply", [b"", b"no JSON", b"[]", b'{"other": 1}', b'{"is_paused": "no"}', b"[" * 100_000])
def test_an_answer_of_another_form_is_an_error(engine: Any, client: HttpClient, reply: bytes) -> None:
    async def odd(request: Request) -> Response:
        return Response(reply)

    engine.answers["/is_paused"] = odd
    with pytest.raises(EngineError, match="/is_paused of"):
        client.is_paused()


def test_a_cache_reset_that_answers_nothing_worked_as_in_earlier_versions(engine: Any, client: HttpClient) -> None:
    async def nothing(request: Request) -> Response:
        return Response(status_code=200)

    engine.answers["/reset_prefix_cache"] = nothing
    assert client.reset_prefix_cache() is True


@pytest.mark.parametrize("call", ["resume", "pause", "start_weight_update", "finish_weight_update"])
def test_a_page_that_somebody_on_the_way_answers_with_is_no_engines_answer(
    engine: Any, client: HttpClient, call: str
) -> None:
    async def page(request: Request) -> Response:
        return Response("<html>log in</html>", media_type="text/html")

    engine.answers[f"/{call}"] = page
    with pytest.raises(EngineError, match=r"something else than a JSON object .*<html>log in.*does a proxy answer"):
        getattr(client, call)()


@pytest.mark.parametrize("payload", [{"a": object()}, {"a": "\ud800"}, {("a",): {1, 2}, "f": print}])
def test_a_payload_that_json_cannot_carry_is_refused_before_anything_is_sent(
    engine: Any, client: HttpClient, payload: Any
) -> None:
    with pytest.raises(PayloadError, match=r"/update_weights of .* is not JSON"):
        client.update_weights(payload)
    assert (engine.received, client.requests) == ([], 0)


def test_headers_go_with_every_request_and_no_error_shows_a_password(engine: Any) -> None:
    url = engine.url.replace("://", "://user:hush@")
    with HttpClient(url, headers={"X-Team": "blue"}) as client:
        client.resume()
        engine.answers["/resume"] = answering(500, "no")
        with pytest.raises(EngineError) as caught:
            client.resume()
        assert "hush" not in f"{caught.value}{client!r}{client.url}"
    assert engine.headers[0]["x-team"] == "blue"
    assert engine.headers[0]["authorization"].startswith("Basic ")


def test_a_path_before_the_routes_is_kept(engine: Any) -> None:
    with HttpClient(f"{engine.url}/fleet/a/") as client:
        client.resume()
    assert engine.received[0][1] == "/fleet/a/resume"


@pytest.mark.parametrize("url", ["http://me:hush@h:99999", "http://me:hush@h:port", "ftp://me:hush@h", "me:hush@h:80"])
def test_what_is_no_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(EngineError, match=r"is no engine's URL") as caught:
        HttpClient(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "host:8000", "ftp://host", "http://", "http://host:port", "http://h:65536", "http://h/?a=1", "[::"]
)
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(EngineError, match=r"is no engine's URL"):
        HttpClient(url)


def test_where_openai_s_clients_find_an_engine_its_own_url_is_named_and_a_gateway_may_lie_there(engine: Any) -> None:
    own = f"http://127.0.0.1:{engine.port}"
    engine.answers["/v1/start_weight_update"] = answering(404, {"detail": "Not Found"})
    with HttpClient(f"{own}/v1/") as client:
        with pytest.raises(EngineError, match=re.escape(f"/v1 is where OpenAI's clients find an engine: give {own})")):
            client.start_weight_update()
    with HttpClient(f"{own}/below/v1") as client:
        client.start_weight_update()


def test_proxies_of_the_environment_are_not_asked_for_loopback(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for host in ("127.0.0.1", "localhost"):
        with HttpClient(f"http://{host}:{engine.port}") as client:
            client.resume()
    assert len(engine.received) == 2


def test_a_closed_client_says_so(engine: Any) -> None:
    client = HttpClient(engine.url)
    client.close()
    with pytest.raises(EngineError, match="closed"):
        client.resume()


def test_calls_from_many_threads_are_all_counted(engine: Any, client: HttpClient) -> None:
    threads = [threading.Thread(target=lambda: [client.start_weight_update() for _ in range(10)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert client.requests == len(engine.received) == 80
    assert client.request_bytes == sum(len(body) for *_, body in engine.received)


def test_it_is_a_client_with_every_optional_call(client: HttpClient) -> None:
    assert isinstance(client, WeightSyncClient)
    assert all(capability(client, name) is not None for name in CAPABILITIES)
    required = {name for name in vars(WeightSyncClient) if not name.startswith("_")}
    assert len(required) == 4
    for name in required:
        assert inspect.signature(getattr(HttpClient, name)) == inspect.signature(getattr(WeightSyncClient, name))
