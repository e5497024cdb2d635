"""Over HTTP: vLLM's routes and answers, log-probs that are transformers' own, and errors with a fitting status."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
import torch

import oracle
from engines.reference.server_updates import bare_payload, transformers_log_probs
from fleets import started_server
from rankcast.control.http import HttpClient
from rankcast.engines.reference.bodies import faults_answer
from rankcast.topology import Worker
from rankcast.wire.reports import Fault, Report

PROMPT = [3, 99, 0, 41, 7]
TOLERANCE = 2e-5
LAYOUT = {"tp": 2, "dp": 2, "expert_parallel": True}


@pytest.fixture(scope="module", params=[LAYOUT, {"pp": 2}], ids=["dp2_tp2_ep", "pp2"])
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def server(first, layout):
    with started_server(first.directory, **layout) as server:
        yield server


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        yield http


@pytest.fixture
def http_at_first(http, first):
    yield http
    http.post("/abort_weight_update")
    assert update(http, first, "first").status_code == 200
    assert http.post("/resume").status_code == 200


def update(http, checkpoint, version):
    with bare_payload(checkpoint.weights) as payload:
        assert http.post("/start_weight_update").status_code == 200
        assert http.post("/update_weights", json={"update_info": payload}).status_code == 200
        return http.post("/finish_weight_update", json={"weight_version": version})


def error(response):
    """Status and code; every error has the same three fields."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message", "faults"}
    return response.status_code, body["error"]["code"]


def generate(http, **wishes):
    response = http.post("/generate", json={"token_ids": PROMPT, "max_tokens": 4, "prompt_logprobs": True, **wishes})
    assert response.status_code == 200, response.text
    return response.json()


def assert_log_probs_are(checkpoint, answer):
    tokens = [*PROMPT, *answer["token_ids"]]
    expected = transformers_log_probs(checkpoint.directory, tokens)
    given = torch.tensor([*answer["prompt_logprobs"][1:], *answer["logprobs"]])
    assert torch.allclose(given, expected[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0], atol=TOLERANCE, rtol=0)
    greedy = expected[len(PROMPT) - 1 : -1]
    chosen = greedy.gather(1, torch.tensor(answer["token_ids"])[:, None])[:, 0]
    assert torch.allclose(greedy.max(dim=1).values, chosen, atol=TOLERANCE, rtol=0)


def assert_workers_hold(http, checkpoint, layout):
    answer = http.post("/weight_checker", json={"action": "checksum"}).json()
    flat = dict(answer["checksums"])
    for row in answer["workers"]:
        rank, held = row["rank"], row["parameters"]
        expected = oracle.worker_parameters(checkpoint.weights, checkpoint.config, oracle.Layout(**layout), rank)
        assert {name: parameter["sha256"] for name, parameter in held.items()} == {
            name: oracle.digest(bits) for name, bits in expected.items()
        }
        assert {name: tuple(parameter["shape"]) for name, parameter in held.items()} == {
            name: bits.shape for name, bits in expected.items()
        }
        assert {parameter["dtype"] for parameter in held.values()} == {"float32"}
        place = oracle.place(oracle.Layout(**layout), rank)
        prefix = f"dp{place.dp_index}:pp{place.pp_index}:pcp0:tp{place.tp_index}:"
        assert {flat.pop(prefix + name) for name in held} == {parameter["sha256"] for parameter in held.values()}
    assert flat == {}


def test_log_probs_and_weights_are_the_checkpoints_before_and_after_an_update(http_at_first, first, second, layout):
    http = http_at_first
    update(http, first, "first")
    for replica in range(layout.get("dp", 1)):
        assert_log_probs_are(first, generate(http, replica=replica))
    assert_workers_hold(http, first, layout)
    assert update(http, second, "second").json() == {"message": "Weight update finished"}
    for replica in range(layout.get("dp", 1)):
        answer = generate(http, replica=replica)
        assert_log_probs_are(second, answer)
        assert answer["weight_version"] == "second"
        assert answer["weight_versions"] == ["second"] * 4
    assert_workers_hold(http, second, layout)
    assert http.get("/weight_info").json()["weight_version"] == "second"


def test_the_library_s_own_client_speaks_to_every_route(server, http_at_first, second, layout):
    with HttpClient(server.url) as client, bare_payload(second.weights) as payload:
        workers = client.get_world_size()
        assert workers == layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
        assert client.get_world_size(include_dp=False) == workers // layout.get("dp", 1)
        client.pause("keep")
        assert client.is_paused()
        client.init_weight_transfer_engine({})
        client.start_weight_update()
        client.update_weights(payload)
        client.finish_weight_update()
        client.update_weight_version("mine")
        client.reset_prefix_cache()
        client.resume()
        assert not client.is_paused()
        baseline = client.weight_checker()["checksums"]
        assert client.weight_checker("compare", baseline)["match"] is True
        changed = {**baseline, sorted(baseline)[0]: "0" * 64}
        compared = client.weight_checker("compare", changed)
        assert (compared["match"], compared["mismatches"]) == (False, [sorted(baseline)[0]])
        info = client.weight_info()
        assert (info["weight_version"], info["engine"], info["is_paused"]) == ("mine", "rankcast-reference", False)
        assert [row["rank"] for row in info["workers"]] == list(range(workers))
        assert {(row["state"], row["servable"]) for row in info["workers"]} == {("idle", True)}
        assert client.generate(PROMPT, 1)["weight_version"] == "mine"
        client.start_weight_update()
        client.abort()


def test_a_list_payload_and_its_empty_entries_are_taken(http_at_first, second, layout):
    http = http_at_first
    workers = http.get("/get_world_size").json()["world_size"]
    with bare_payload(second.weights) as payload:
        http.post("/start_weight_update")
        assert http.post("/update_weights", json={"update_info": [payload] * workers}).status_code == 200
        assert http.post("/update_weights", json={"update_info": [{"names": []}] * workers}).status_code == 200
        assert http.post("/finish_weight_update").status_code == 200
    assert_workers_hold(http, second, layout)
    assert http.get("/weight_info").json()["weight_version"] == ""


def test_calls_out_of_order_are_conflicts_and_the_old_weights_serve(http_at_first, layout):
    http = http_at_first
    before = generate(http)
    assert error(http.post("/update_weights", json={"update_info": {"names": []}})) == (409, "state")
    assert error(http.post("/finish_weight_update")) == (409, "state")
    assert http.post("/start_weight_update").json() == {"message": "Weight update started"}
    refused = http.post("/start_weight_update")
    assert error(refused) == (409, "state")
    workers = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    assert [fault["rank"] for fault in refused.json()["error"]["faults"]] == list(range(workers))
    assert error(http.post("/update_weight_version", json={"new_version": "x"})) == (409, "state")
    assert error(http.post("/resume")) == (409, "state")
    assert generate(http) == before
    assert http.post("/abort_weight_update").json() == {"message": "Weight update aborted"}
    assert generate(http) == before


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/init_weight_transfer_engine", b""),
        ("/init_weight_transfer_engine", b'{"init_info": 3}'),
        ("/init_weight_transfer_engine", b'{"init_info": {"body": "no record"}}'),
        ("/update_weights", b"\x80\x04\x95"),
        ("/update_weights", b'{"update_info": "text"}'),
        ("/update_weights", b'{"update_info": [1, 2]}'),
        ("/update_weights", b'{"update_info": {"names": []}, "other": 1}'),
        ("/update_weights", b'{"update_info": ' + b"[" * 100_000),
        ("/update_weights", b'{"update_info": [{"names": []}]}'),
        ("/finish_weight_update", b'{"weight_version": 3}'),
        ("/update_weight_version", b"{}"),
        ("/pause?mode=drop", b""),
        ("/pause?clear_cache=perhaps", b""),
        ("/weight_checker", b'{"action": "compare"}'),
        ("/weight_checker", b'{"action": "reset"}'),
        ("/generate", b'{"token_ids": []}'),
        ("/generate", b'{"token_ids": [1], "max_tokens": 0}'),
        ("/generate", b'{"token_ids": [1], "max_tokens": 128}'),
        ("/generate", b'{"token_ids": [100]}'),
        ("/generate", b'{"token_ids": [-1]}'),
        ("/generate", b'{"token_ids": [1], "replica": 2}'),
        ("/generate", b'{"token_ids": [1], "tokens": 2}'),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else value.strip("/"),
)
def test_a_bad_request_is_400_and_changes_nothing(http, route, body):
    started = http.post("/start_weight_update")
    assert started.status_code == 200
    response = http.post(route, content=body)
    assert error(response)[0] == 400
    assert error(response)[1] in ("payload", "limit", "unsupported")
    assert not http.get("/is_paused").json()["is_paused"]
    rows = http.get("/weight_info").json()["workers"]
    assert {(row["state"], row["servable"]) for row in rows} == {("started", True)}
    assert http.post("/abort_weight_update").status_code == 200


def test_numbers_that_no_other_encoding_can_carry_reach_the_worker_s_own_refusal(http):
    http.post("/start_weight_update")
    entry = (
        '{"names": ["a"], "dtype_names": ["float32"], "shapes": [[123456789012345678901234567890]], "locations": []}'
    )
    assert error(http.post("/update_weights", content=f'{{"update_info": {entry}}}')) == (400, "payload")
    http.post("/abort_weight_update")


def test_unknown_routes_and_methods_are_json_errors(http):
    assert error(http.post("/nothing")) == (404, "route")
    assert error(http.get("/pause")) == (405, "route")


def test_half_new_weights_serve_nothing_until_they_are_all_there(http_at_first, second, layout):
    http = http_at_first
    with bare_payload(second.weights) as payload:
        http.post("/start_weight_update")
        assert http.post("/update_weights", json={"update_info": payload}).status_code == 200
        assert error(http.post("/generate", json={"token_ids": PROMPT})) == (503, "not_servable")
        http.post("/abort_weight_update")
    assert error(http.post("/generate", json={"token_ids": PROMPT})) == (503, "not_servable")
    assert error(http.post("/update_weight_version", json={"new_version": "x"})) == (503, "not_servable")
    assert {row["state"] for row in http.get("/weight_info").json()["workers"]} == {"unusable"}
    assert update(http, second, "second").status_code == 200
    assert_log_probs_are(second, generate(http))


def test_requests_at_the_same_time_get_the_answers_they_get_alone(server, http, layout):
    prompts = [[1, 2, 3], [40, 50], [99], [7, 7, 7, 7]]
    alone = [http.post("/generate", json={"token_ids": prompt, "max_tokens": 3}).json() for prompt in prompts]
    together = [None] * len(prompts)

    def ask(index):
        response = httpx.post(f"{server.url}/generate", json={"token_ids": prompts[index], "max_tokens": 3}, timeout=60)
        together[index] = response.json()

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


def test_the_gravest_fault_decides_the_status_and_all_are_told():
    def report(rank, *codes):
        return Report(
            call="install",
            worker=Worker(engine="e", rank=rank, workers=3),
            state="idle",
            servable=True,
            generation=0,
            faults=tuple(Fault(code, f"{code} here") for code in codes),
        )

    def status(*codes):
        response = faults_answer([report(0), report(1, "manifest"), report(2, *codes)])
        body = json.loads(bytes(response.body))["error"]
        assert [(fault["rank"], fault["code"]) for fault in body["faults"]] == [
            (1, "manifest"),
            *((2, c) for c in codes),
        ]
        return response.status_code

    assert faults_answer([report(0), report(1)]) is None
    assert status("payload") == 400
    assert status("state") == 409
    assert status("authentication", "state") == 401
    assert status("install", "authentication") == 422
    assert status("install", "internal") == 500
    assert status("never heard of") == 500
