"""``rankcast plan``: what it prints for programs and for people, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import tiny_config
from fleets import environment

MODES = ["broadcast", "per_layer", "ranklocal", "direct"]
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
GRIDS = ["--trainer", "tp=4,cp=2,ep=8", "--rollout", "tp=8,ep=8,engines=1"]


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_json_has_every_count_by_mode(run, tmp_path: Path) -> None:
    ran = run("plan", "--model", write(tmp_path, QWEN3_30B), *GRIDS, "--bucket", "512MiB", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = ran.json
    assert list(found["worker_calls"]) == MODES
    assert {mode: found["worker_calls"][mode] for mode in ("broadcast", "per_layer", "direct")} == {
        "broadcast": 3120,
        "per_layer": 432,
        "direct": 8,
    }
    assert found["worker_calls"]["ranklocal"] <= 176
    for name in ("bytes_per_worker", "sender_bytes", "request_bytes"):
        assert list(found[name]) == MODES, name
        assert all(value > 0 for value in found[name].values())
        assert found[name]["direct"] < found[name]["broadcast"]
    assert found["request_bytes"]["direct"] / found["rollout"]["workers"] < 1024
    assert found["routes"] == 8 * (128 * 48 * 3 // 8 + (18_867 - 128 * 48 * 3))
    assert found["seconds_planning"] > 0
    assert 0 < found["peak_rss_mib"] < 10_000
    assert found["bytes_per_worker"]["broadcast"] == found["bytes"] == 61_064_245_248


def test_people_get_a_table_and_nothing_on_stdout(run, tmp_path: Path) -> None:
    write(tmp_path, QWEN3_30B)
    ran = run("plan", "--model", tmp_path, *GRIDS)
    assert (ran.code, ran.out) == (0, "")
    for words in (*MODES, "3,120", "432", "8 trainer ranks to 8 workers", "18,867 tensors", "56.9 GiB", "planned in"):
        assert words in ran.words


def test_a_smaller_bucket_is_more_calls_but_not_in_direct(run, tmp_path: Path) -> None:
    model = write(tmp_path, tiny_config())
    grids = ["--trainer", "ep=2", "--rollout", "tp=2,ep=2", "--json"]
    coarse, fine = (run("plan", "--model", model, *grids, "--bucket", size).json for size in ("1MiB", "4KiB"))
    assert fine["rounds"] > coarse["rounds"]
    for mode in MODES:
        assert (fine["worker_calls"][mode] > coarse["worker_calls"][mode]) == (
            mode in ("ranklocal", "broadcast", "per_layer")
        )
    assert fine["plan_hash"] == coarse["plan_hash"]


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        (["--trainer", "tp=3", "--rollout", "tp=1"], "trainer tp=3 does not divide num_attention_heads = 32"),
        (["--trainer", "tp=1", "--rollout", "tp=4,ep=2"], "ep=2"),
        (["--trainer", "dp=x", "--rollout", "tp=1"], "dp=x"),
    ],
)
def test_a_grid_that_does_not_fit_is_exit_1_and_named(run, tmp_path: Path, grids: list[str], said: str) -> None:
    model = write(tmp_path, QWEN3_30B)
    ran = run("plan", "--model", model, *grids)
    assert (ran.code, ran.out) == (1, "")
    assert said in ran.words
    ran = run("plan", "--model", model, *grids, "--json")
    assert (ran.code, ran.err) == (1, "")
    assert said in ran.json["error"]["message"]
    assert ran.json["error"]["code"] == "unsupported"


def test_a_model_that_cannot_be_read_is_named(run, tmp_path: Path) -> None:
    for path, text in ((tmp_path / "absent.json", None), (tmp_path / "odd.json", "{"), (tmp_path / "list.json", "[]")):
        if text is not None:
            path.write_text(text)
        ran = run("plan", "--model", path, *GRIDS, "--json")
        assert ran.code == 1
        assert path.name in ran.json["error"]["message"]


@pytest.mark.parametrize("arguments", [[], ["--model", "x"], ["--model", "x", *GRIDS, "--bucket", "12parsecs"]])
def test_a_wrong_command_line_is_exit_2(run, arguments: list[str]) -> None:
    ran = run("plan", *arguments)
    assert (ran.code, ran.out) == (2, "")


def test_planning_loads_neither_torch_nor_an_engine(tmp_path: Path) -> None:
    code = (
        "import sys, rankcast.cli\n"
        f"sys.argv = ['rankcast', 'plan', '--model', {str(write(tmp_path, tiny_config()))!r}, '--trainer', 'tp=2',"
        " '--rollout', 'tp=2', '--json']\n"
        "code = rankcast.cli.main()\n"
        "print(code, sorted(set(sys.modules) & {'torch', 'vllm', 'transformers', 'starlette'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.stdout.endswith("0 []\n"), done.stdout + done.stderr
