"""``make demo-vllm`` as its user runs it, and whether its comparisons can fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import oracle
from checkpoints import as_torch, scaled_weights
from fleets import environment
from vllm_engine.demo import CONFIG, LAYOUT, MODES, RANKS, STEPS
from vllm_engine.demo_expected import Expected, digest

pytestmark = pytest.mark.vllm

SECONDS = 580.0
COMMAND = [sys.executable, "-m", "vllm_engine.demo"]
Weights = dict[str, Any]


def surroundings(folder: Path) -> dict[str, str]:
    return {**environment(), "TMPDIR": str(folder)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """The one object of ``--json``, and the lines of standard error."""
    folder = tmp_path_factory.mktemp("d")
    done = subprocess.run(
        [*COMMAND, "--json"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env=surroundings(folder),
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert list(folder.iterdir()) == [], "the demo leaves files behind"
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout), done.stderr.splitlines()


@pytest.mark.timeout(600)
def test_every_push_of_every_mode_is_verified(ran: tuple[dict[str, Any], list[str]]) -> None:
    outcome, lines = ran
    assert outcome["verified"] is True
    assert outcome["differences"] == []
    assert list(outcome["modes"]) == list(MODES)
    pushed = [f"{mode}-{step}" for mode in MODES for step in range(1, STEPS + 1)]
    assert [line.split()[0] for line in lines if line.endswith("verified")] == pushed
    assert outcome["losses"][-1] < outcome["losses"][0]
    held = oracle.worker_parameters(scaled_weights(CONFIG), CONFIG, LAYOUT, 0)
    assert outcome["compared_parameters"] > len(held) * LAYOUT.workers
    assert outcome["fresh_tensors"] > outcome["compared_parameters"]
    assert outcome["generation_patches"] == ["cpu-expert-parallel"]


@pytest.mark.timeout(600)
def test_the_numbers_of_each_mode_agree_with_each_other(ran: tuple[dict[str, Any], list[str]]) -> None:
    total = ran[0]["trainer"]["nbytes"]
    modes = ran[0]["modes"]
    for mode in modes.values():
        rows = mode["workers"]
        assert [(row["rank"], row["tp"], row["ep"]) for row in rows] == [(0, 0, 0), (1, 1, 1)]
        assert mode["payload_bytes"] == sum(row["nbytes"] for row in rows)
        assert mode["worker_calls"] == sum(row["calls"] for row in rows)
        assert mode["pushes"] == STEPS
        assert min(mode["request_bytes"], mode["seconds"], mode["worker_calls"]) > 0
    assert modes["broadcast"]["payload_bytes"] == LAYOUT.workers * total
    for mode in ("ranklocal", "auto"):
        # Nearly all of it is experts, of which each worker reads half.
        assert modes[mode]["payload_bytes"] < 0.6 * modes["broadcast"]["payload_bytes"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_no_process_outlives_a_demo_that_is_ended(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    # Whoever is left over is found by the fixture that looks after every test of this suite.
    folder = tmp_path_factory.mktemp("e")
    with subprocess.Popen(
        COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder, env=surroundings(folder)
    ) as running:
        assert running.stderr is not None
        everybody = RANKS + 1
        deadline = time.monotonic() + 120
        while len(Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()) < everybody:
            assert running.poll() is None, running.stderr.read()
            assert time.monotonic() < deadline, "the demo starts nothing"
        running.send_signal(number)
        _, said = running.communicate(timeout=120)
    assert running.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), said
    assert list(folder.iterdir()) == []


def read_back(weights: Weights) -> list[dict[str, str]]:
    """What the workers of a machine without matrix tiles read back, with one table that no checkpoint fills."""
    from vllm import _custom_ops  # not above: the file is collected without vLLM too

    workers = []
    for rank in range(LAYOUT.workers):
        held = {"model.layers.0.self_attn.rotary_emb.cos_sin_cache": "table"}
        bits = oracle.worker_parameters(weights, CONFIG, LAYOUT, rank)
        for name, tensor in as_torch(bits, "bfloat16").items():
            if name.endswith(("w13_weight", "w2_weight")):
                packed = _custom_ops.cpu_prepack_moe_weight(tensor, "vec")
                held[name.replace("experts.", "experts.routed_experts.")] = digest(packed)
            else:
                held[name] = digest(tensor)
                if name.endswith(("proj.weight", "lm_head.weight")):
                    held[f"{name} (packed)"] = digest(tensor)
        workers.append(held)
    return workers


@pytest.fixture(scope="module")
def weights() -> Weights:
    return scaled_weights(CONFIG)


@pytest.fixture(scope="module")
def expected(weights: Weights) -> Expected:
    return Expected(CONFIG, LAYOUT, weights, read_back(weights))


@pytest.mark.parametrize(
    ("name", "workers", "parameter"),
    [
        ("model.embed_tokens.weight", [0], "model.embed_tokens.weight"),
        ("model.norm.weight", [0, 1], "model.norm.weight"),
        ("model.layers.3.self_attn.v_proj.weight", [0], "model.layers.3.self_attn.qkv_proj.weight"),
        ("model.layers.1.mlp.gate.weight", [0, 1], "model.layers.1.mlp.gate.weight"),
        ("model.layers.2.mlp.experts.7.up_proj.weight", [0], "model.layers.2.mlp.experts.routed_experts.w13_weight"),
        ("model.layers.2.mlp.experts.8.down_proj.weight", [1], "model.layers.2.mlp.experts.routed_experts.w2_weight"),
    ],
)
def test_one_bit_shows_on_every_worker_that_holds_it(
    expected: Expected, weights: Weights, name: str, workers: list[int], parameter: str
) -> None:
    assert expected.differences(weights, read_back(weights)) == []
    damaged = {**weights, name: weights[name].copy()}
    damaged[name].reshape(-1)[0] ^= 1
    lines = expected.differences(weights, read_back(damaged))
    for worker in range(LAYOUT.workers):
        named = f"worker {worker}: {parameter} is not what the trainer ranks hold" in lines
        assert named == (worker in workers), lines


def test_a_server_that_took_nothing_differs_in_everything(expected: Expected, weights: Weights) -> None:
    lines = expected.differences(scaled_weights(CONFIG, seed=1), read_back(weights))
    assert len([line for line in lines if "is not what the trainer ranks hold" in line]) == expected.parameters


def test_what_is_not_read_back_and_what_must_not_change_is_named(expected: Expected, weights: Weights) -> None:
    said = read_back(weights)
    del said[1]["model.norm.weight"]
    said[0]["model.layers.0.self_attn.rotary_emb.cos_sin_cache"] = "another"
    assert expected.differences(weights, said) == [
        "worker 0: model.layers.0.self_attn.rotary_emb.cos_sin_cache is not what the trainer ranks hold",
        "worker 1: model.norm.weight is gone",
        "worker 1: model.norm.weight was not read back",
    ]
    assert expected.differences(weights, said[:1]) == ["1 workers answered, must be 2"]


def test_a_server_of_another_checkpoint_is_no_start(weights: Weights) -> None:
    with pytest.raises(RuntimeError, match="does not hold the checkpoint it was started from"):
        Expected(CONFIG, LAYOUT, scaled_weights(CONFIG, seed=1), read_back(weights))
