"""The server as a process: where it listens, who may write, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from engines.reference.server_updates import bare_payload
from fleets import started_server, wait_gone
from rankcast.engines.reference.fleet import Fleet
from rankcast.engines.reference.serve import check_address
from rankcast.engines.reference.server import application
from rankcast.errors import AuthenticationError

SECRET = "a secret of the tests"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "::1"])
def test_loopback_needs_no_secret(host):
    check_address(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_another_address_is_refused_by_name_without_a_secret(host):
    check_address(host, SECRET)
    with pytest.raises(AuthenticationError, match=f"listen on {host}, beyond loopback"):
        check_address(host, None)


def test_a_server_asked_for_another_address_without_a_secret_does_not_come_up(first):
    with pytest.raises(RuntimeError, match="beyond loopback, without a secret"):
        with started_server(first.directory, host="0.0.0.0"):
            pass


def test_with_a_secret_it_listens_beyond_loopback_and_takes_nothing_unsigned(first):
    with started_server(first.directory, host="0.0.0.0", secret=SECRET) as server:
        port = httpx.URL(server.url).port
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
            with bare_payload(first.weights) as payload:
                refused = [
                    http.post("/init_weight_transfer_engine", json={"init_info": {"body": "{}"}}),
                    http.post("/start_weight_update"),
                    http.post("/update_weights", json={"update_info": payload}),
                    http.post("/abort_weight_update"),
                ]
            assert [(r.status_code, r.json()["error"]["code"]) for r in refused] == [(401, "authentication")] * 4
            assert http.post("/generate", json={"token_ids": [1], "max_tokens": 1}).status_code == 200
            workers = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in server.workers)
            assert SECRET.encode() not in workers


def test_the_store_at_which_workers_meet_is_on_loopback_only(first):
    with started_server(first.directory, tp=2) as server:
        inodes = set()
        for pid in (server.pid, *server.workers):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        listening = []
        for table in ("tcp", "tcp6"):
            with open(f"/proc/net/{table}") as rows:
                for row in list(rows)[1:]:
                    fields = row.split()
                    if fields[3] == "0A" and fields[9] in inodes:
                        listening.append(fields[1].split(":")[0])
        assert len(listening) >= 2, "the server and the store must be among them"
        v4, v6 = "0100007F", "0000000000000000FFFF00000100007F"
        assert set(listening) <= {v4, v6}


def asking(server, body):
    """A connection on which POST /generate was sent and nothing read."""
    connection = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=60)
    connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return connection


def wait_for_requests(http, count):
    """Ask until the server has ``count`` requests in flight or waiting."""
    deadline = time.monotonic() + 60
    while (found := http.get("/weight_info").json()["requests"]) != count:
        assert time.monotonic() < deadline, f"{found} requests are there, {count} were expected"


def test_a_request_whose_client_left_is_dropped(first):
    with started_server(first.directory) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        assert http.post("/pause?mode=keep").json() == {"status": "paused"}
        with asking(server, b'{"token_ids": [1]}'):
            wait_for_requests(http, 1)
        wait_for_requests(http, 0)
        assert http.get("/is_paused").json() == {"is_paused": True}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_server_and_workers_and_answers_a_held_request(first, number):
    with started_server(first.directory, tp=2) as server:
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            http.post("/pause?mode=keep")
            with asking(server, b'{"token_ids": [1]}') as connection:
                wait_for_requests(http, 1)
                server.process.send_signal(number)
                answer = connection.makefile("rb").read()
        assert b"503" in answer.splitlines()[0]
        assert b"shutting down" in answer
        assert server.process.wait(20) == 0
        assert wait_gone(server.workers) == []


def test_killing_the_server_in_the_middle_of_a_request_ends_its_workers(first):
    with started_server(first.directory, tp=2) as server:
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            with asking(server, b'{"token_ids": [1], "max_tokens": 127}'):
                wait_for_requests(http, 1)
                server.process.kill()
                server.process.wait(20)
        assert wait_gone(server.workers) == []


def test_a_killed_worker_is_named_in_every_later_answer_and_the_server_lives(first):
    with started_server(first.directory, dp=2) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            os.kill(server.workers[1], signal.SIGKILL)
            assert wait_gone(server.workers[1:]) == []
            asked = [
                http.post("/resume"),
                http.get("/health"),
                http.get("/weight_info"),
                http.get("/is_paused"),
                http.post("/init_weight_transfer_engine", json={"init_info": {}}),
                http.post("/start_weight_update"),
                http.post("/pause?mode=keep"),
                http.post("/weight_checker", json={"action": "checksum"}),
                http.post("/generate", json={"token_ids": [1]}),
            ]
            assert {response.status_code for response in asked} == {503}
            for response in asked:
                assert "worker 1 of 2 (dp 1" in response.json()["error"]["message"]
                assert "restart the server" in response.json()["error"]["message"]
        assert server.process.poll() is None


def test_a_port_in_use_is_refused_before_a_worker_is_started(first):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}"):
            with started_server(first.directory, port=port):
                pass


@pytest.mark.anyio
async def test_a_body_over_the_limit_is_413_and_the_client_gets_to_read_it(first, anyio_backend):
    fleet = Fleet(first.directory)
    transport = httpx.ASGITransport(application(fleet, body_limit=1000))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as http:

        async def pieces():
            for _ in range(3):
                yield b" " * 500

        for content in (b" " * 1001, pieces()):
            response = await http.post("/update_weights", content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
            assert "1,000" in response.json()["error"]["message"]
    fleet.close()


@pytest.fixture
def anyio_backend():
    return "asyncio"
