"""Two servers as one fleet, one of them behind TLS and with an API key; and a server that has no routes for weights.

It knows vLLM's flags for certificates and keys. It must not know how a push runs. Both serve a dense model, with one
worker each.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import rankcast
from control.raw_server import CERTIFICATE
from end_to_end.watched import Watched, bodies, kind_of
from fleets import environment
from vllm_engine.conftest import Checkpoints, Reference
from vllm_engine.servers import TP1, Layout, VllmServer, bearer, started_server

pytestmark = pytest.mark.vllm

Fresh = Callable[[str, str, Layout], Reference]

KEY = "only for tests"
#: What a client of the guarded server is given; the other server has no use for it, and passes over it.
GUARDED: dict[str, Any] = {"headers": bearer(KEY), "tls_verify": CERTIFICATE}


@pytest.fixture(scope="module")
def guarded(checkpoints: Checkpoints) -> Iterator[VllmServer]:
    with started_server(checkpoints("llama", "a"), certificate=CERTIFICATE, api_key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> Iterator[VllmServer]:
    with started_server(checkpoints("llama", "a")) as server:
        yield server


@pytest.fixture
def a(checkpoints: Checkpoints) -> Path:
    return checkpoints("llama", "a")


@pytest.fixture
def b(checkpoints: Checkpoints) -> Path:
    return checkpoints("llama", "b")


class Damaging(Watched):
    """Says another shape of one tensor to the worker, when told to."""

    damage = False

    def update_weights(self, update_info: Any) -> None:
        if self.damage and kind_of(update_info) == "prepare":
            body = bodies(update_info)["0"]
            body["schedule"]["shapes"][0] = [1, 1]
            update_info["entries"]["0"] = {"body": msgspec.json.encode(body).decode()}
        super().update_weights(update_info)


def push(target: object, checkpoint: Path, **options: Any) -> rankcast.PushReport:
    with rankcast.connect(target, checkpoint, mode="ranklocal", timeout=60, **options) as sync:
        return sync.push(weight_version=checkpoint.name)


def assert_serves(server: VllmServer, expected: Reference, version: str) -> None:
    assert server.digests() == expected.digests
    assert server.get("/weight_info") == {"weight_version": version}
    assert server.get("/is_paused") == {"is_paused": False}
    assert server.probe() == expected.said


def command(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankcast", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(), **variables},
        check=False,
    )


# -- two servers -----------------------------------------------------------------------------------------------------


def test_one_push_reaches_both_servers_and_names_its_version_on_both(
    guarded: VllmServer, plain: VllmServer, a: Path, b: Path, fresh: Fresh
) -> None:
    at_a, at_b = fresh("llama", "a", TP1), fresh("llama", "b", TP1)
    assert at_a.said != at_b.said
    urls = [guarded.url, plain.url]
    with rankcast.connect(urls, b, timeout=60, **GUARDED) as sync:
        report = sync.push(weight_version="both at b")
    assert [row.where for row in report.workers] == urls
    assert len({row.engine for row in report.workers}) == 2
    for server in (guarded, plain):
        assert_serves(server, at_b, "both at b")
    push(urls, a, **GUARDED)
    for server in (guarded, plain):
        assert_serves(server, at_a, a.name)


@pytest.mark.parametrize("refusing", [0, 1])
def test_when_one_server_of_two_refuses_both_go_on_with_the_old_weights(
    refusing: int, guarded: VllmServer, plain: VllmServer, a: Path, b: Path, fresh: Fresh
) -> None:
    push([guarded.url, plain.url], a, **GUARDED)
    with Damaging(guarded.url, **GUARDED) as first, Damaging(plain.url) as second:
        clients = [first, second]
        with rankcast.connect(clients, b, mode="ranklocal", timeout=60) as sync:
            clients[refusing].damage = True
            with pytest.raises(rankcast.PushError, match="is announced, but it was") as refusal:
                sync.push(weight_version="never")
            assert [fault.count(clients[refusing].url) for fault in refusal.value.faults] == [1]
            assert [client.kinds().count("install") for client in clients] == [0, 0]
            for server in (guarded, plain):
                assert_serves(server, fresh("llama", "a", TP1), a.name)
            clients[refusing].damage = False
            sync.push(weight_version="again")
            for server in (guarded, plain):
                assert_serves(server, fresh("llama", "b", TP1), "again")


# -- TLS -------------------------------------------------------------------------------------------------------------


def test_a_server_s_certificate_is_trusted_only_when_who_signed_it_is_named(
    guarded: VllmServer, a: Path, b: Path, fresh: Fresh
) -> None:
    push(guarded.url, a, **GUARDED)
    with pytest.raises(rankcast.PushError, match=rf"{guarded.url}: its certificate is not trusted .*tls_verify="):
        push(guarded.url, b, headers=bearer(KEY))
    assert_serves(guarded, fresh("llama", "a", TP1), a.name)
    push(guarded.url, b, headers=bearer(KEY), tls_verify=False)
    assert_serves(guarded, fresh("llama", "b", TP1), b.name)


def test_the_command_line_trusts_whom_the_environment_names(
    guarded: VllmServer, a: Path, b: Path, fresh: Fresh
) -> None:
    push(guarded.url, a, **GUARDED)
    header = f"Authorization: Bearer {KEY}"
    for words in (("push", b, guarded.url), ("status", guarded.url)):
        done = command(*words, "--header", header)
        assert done.returncode != 0
        assert "its certificate is not trusted" in done.stderr
    done = command("push", b, guarded.url, "--header", header, SSL_CERT_FILE=str(CERTIFICATE))
    assert done.returncode == 0, done.stderr
    assert_serves(guarded, fresh("llama", "b", TP1), b.name)
    done = command("status", guarded.url, "--header", header, SSL_CERT_FILE=str(CERTIFICATE))
    assert done.returncode == 0, done.stderr


# -- API keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [None, bearer("another one")], ids=["without a key", "with another key"])
def test_a_key_guards_generation_and_not_the_routes_for_weights(
    headers: dict[str, str] | None, guarded: VllmServer, a: Path, b: Path, fresh: Fresh
) -> None:
    push(guarded.url, a, **GUARDED)
    trust = ssl.create_default_context(cafile=CERTIFICATE)
    with httpx.Client(verify=trust, trust_env=False, headers=headers) as client:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        assert client.post(f"{guarded.url}/inference/v1/generate", json=body).status_code == 401
        assert client.get(f"{guarded.url}/v1/models").status_code == 401
    # So whoever reaches the port can change the weights, as docs/vllm.md says.
    push(guarded.url, b, headers=headers, tls_verify=CERTIFICATE)
    assert_serves(guarded, fresh("llama", "b", TP1), b.name)


# -- without the routes ----------------------------------------------------------------------------------------------


def test_a_server_without_development_mode_is_refused_by_the_variable_s_name_and_goes_on(
    a: Path, b: Path, fresh: Fresh
) -> None:
    with started_server(a, environment={"VLLM_SERVER_DEV_MODE": "0"}) as server:
        with pytest.raises(rankcast.PushError, match="VLLM_SERVER_DEV_MODE=1") as refusal:
            rankcast.connect(server.url, b, timeout=60)
        assert len(refusal.value.faults) == 1
        assert server.url in refusal.value.faults[0]
        for words in (("push", b, server.url), ("status", server.url)):
            done = command(*words)
            assert done.returncode == 1, done.stderr
            assert done.stderr.count("start vLLM with VLLM_SERVER_DEV_MODE=1") == 1
            assert "Traceback" not in done.stderr
        assert server.probe() == fresh("llama", "a", TP1).said
