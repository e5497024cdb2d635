"""The demo's verdict: nothing differs on a fleet that holds the checkpoint, and one flipped bit is named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from fleets import running_server
from oracle import expert_range, read_weights
from rankcast.cli.demo.checkpoint import CONFIG, write_checkpoint
from rankcast.cli.demo.command import LAYOUT
from rankcast.cli.demo.expert_sum import alone
from rankcast.cli.demo.trainer import Trainer
from rankcast.cli.demo.verify import Finding, Verifier, log_prob_gap, read_held, unmoved, worker_differences
from rankcast.control.http import HttpClient

SHARED = "model.layers.1.self_attn.k_proj.weight"
EXPERT = "model.layers.2.mlp.experts.9.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, lasting_processes: set[int]) -> Iterator[HttpClient]:
    layout = {"tp": LAYOUT.tp, "dp": LAYOUT.dp, "expert_parallel": LAYOUT.expert_parallel}
    with running_server(checkpoint, **layout) as url, HttpClient(url, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="module")
def probe(checkpoint: Path) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return Trainer(checkpoint, reduce=alone).probe()


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def flip(folder: Path, name: str) -> None:
    """Flip the lowest bit of the tensor's first element, in the file."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])[name]["data_offsets"][0]] ^= 1
    path.write_bytes(bytes(data))


def check(engine: HttpClient, probe: Any, *folders: Path, version: str = "default") -> Finding:
    tokens, log_probs = probe
    return Verifier(engine, CONFIG, LAYOUT, {}).check(version, folders, tokens, log_probs)


def test_nothing_differs_on_a_fleet_that_holds_the_weights(engine: HttpClient, checkpoint: Path, probe: Any) -> None:
    finding = check(engine, probe, checkpoint)
    assert finding.differences == ()
    assert finding.log_prob_gap < 1e-4
    assert finding.parameters == 4 * (3 + CONFIG["num_hidden_layers"] * 9)
    assert finding.nbytes > 0


def test_one_flipped_bit_of_an_expert_is_named_on_the_worker_that_holds_it(
    engine: HttpClient, copy: Path, probe: Any
) -> None:
    flip(copy, EXPERT)
    (line,) = check(engine, probe, copy).differences
    holder = next(rank for rank in range(4) if 9 in expert_range(CONFIG["num_experts"], 4, rank))
    assert f"worker {holder} of 4" in line
    assert "model.layers.2.mlp.experts.w13_weight" in line


def test_one_flipped_bit_of_a_shared_tensor_is_named_on_every_worker_that_holds_it(
    engine: HttpClient, copy: Path, probe: Any
) -> None:
    flip(copy, SHARED)  # its first row belongs to the first tensor-parallel worker of each replica
    lines = check(engine, probe, copy).differences
    assert [line.split(":")[1].split(" of ")[0].strip() for line in lines] == ["worker 0", "worker 2"]
    assert all("model.layers.1.self_attn.qkv_proj.weight" in line for line in lines)


def test_a_version_that_the_fleet_does_not_serve_is_named(engine: HttpClient, checkpoint: Path, probe: Any) -> None:
    lines = check(engine, probe, checkpoint, version="17").differences
    assert len(lines) == 3
    assert all("'17'" in line and "default" in line for line in lines)


def test_log_probs_of_other_weights_are_a_difference(engine: HttpClient, checkpoint: Path, probe: Any) -> None:
    tokens, log_probs = probe
    (line,) = check(engine, (tokens, [log_probs[0] + 0.01, *log_probs[1:]]), checkpoint).differences
    assert "log-probs differ" in line


def test_ranks_that_disagree_about_a_shared_tensor_are_named(checkpoint: Path, copy: Path) -> None:
    assert read_held([checkpoint, copy])[1] == []
    flip(copy, SHARED)
    (line,) = read_held([checkpoint, copy])[1]
    assert line.startswith(f"trainer ranks 0 and 1 disagree about {SHARED}: 1 of ")


def test_an_incomplete_set_of_files_is_a_difference_and_not_a_crash(
    engine: HttpClient, tmp_path: Path, checkpoint: Path, probe: Any
) -> None:
    held = load_file(checkpoint / "model.safetensors")
    del held[EXPERT]
    save_file(held, tmp_path / "model.safetensors")
    (line,) = check(engine, probe, tmp_path).differences
    assert EXPERT in line
    assert "missing" in line


def test_a_tensor_that_did_not_move_is_named(checkpoint: Path, copy: Path) -> None:
    before = read_weights(checkpoint)
    flip(copy, EXPERT)
    assert unmoved(before, read_weights(copy)) == [
        f"{name} is the same before and after a training step" for name in before if name != EXPERT
    ]


def test_workers_and_parameters_that_are_missing_or_extra_are_named(engine: HttpClient, checkpoint: Path) -> None:
    weights = read_weights(checkpoint)
    workers = engine.weight_checker()["workers"]
    assert worker_differences(weights, CONFIG, LAYOUT, workers)[0] == []
    name = "model.norm.weight"
    reshaped = {**workers[1]["parameters"], name: {**workers[1]["parameters"][name], "shape": [1, 128]}}
    without = {key: value for key, value in workers[2]["parameters"].items() if key != name}
    more = {**workers[0]["parameters"], "extra": workers[0]["parameters"][name]}
    odd = [
        {"rank": 0, "parameters": more},
        {"rank": 1, "parameters": reshaped},
        {"rank": 2, "parameters": without},
        workers[3],
    ]
    first, second, third = worker_differences(weights, CONFIG, LAYOUT, odd)[0]
    assert first.startswith("worker 0 of 4")
    assert first.endswith("holds extra, and must not")
    assert "model.norm.weight has shape (1, 128), must be (128,)" in second
    assert third.startswith("worker 2 of 4")
    assert third.endswith("does not hold model.norm.weight")
    assert worker_differences(weights, CONFIG, LAYOUT, workers[:3])[0][0] == (
        "3 workers answered, ranks [0, 1, 2]: must be 4"
    )


def test_a_log_prob_that_is_no_number_is_infinitely_far(engine: HttpClient, probe: Any) -> None:
    tokens, log_probs = probe
    assert log_prob_gap(engine, tokens, log_probs) < 1e-4
    assert log_prob_gap(engine, tokens, [math.inf, *log_probs[1:]]) == math.inf
