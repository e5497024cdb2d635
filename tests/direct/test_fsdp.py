"""A real trainer: transformers' Qwen3-MoE under FSDP2 on two ranks, five optimizer steps, a direct push after each.

Into the embedded fleet of four workers (DP2 x TP2, experts over all four), over HTTP. What workers hold is compared
with the oracle over weights that the trainer gathers for this purpose only, and what they say with transformers.
"""

from __future__ import annotations

import itertools
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from end_to_end.seen import PROMPT, answer, differences, info
from fleets import environment, started_server
from oracle import Layout, checkpoint_shapes

CONFIG = tiny_config(
    num_hidden_layers=2,
    hidden_size=128,
    head_dim=64,
    moe_intermediate_size=96,
    num_key_value_heads=4,
    vocab_size=300,
)
LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
RANKS = 2
STEPS = 5
ANSWER_SECONDS = 180.0
TOLERANCE = 1e-4


class Trainer:
    """The ranks; every call is made by all of them at once."""

    def __init__(self, folder: Path) -> None:
        own = {"GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(Path(__file__).with_name("fsdp_trainer.py"))]
        self.folder = folder
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank), str(RANKS), str(folder), json.dumps(CONFIG)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment(), **own},
            )
            for rank in range(RANKS)
        ]

    def all(self, call: str, *arguments: Any) -> list[Any]:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([call, *arguments]) + "\n")
            rank.stdin.flush()
        answers = []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            ready = select.select([rank.stdout], [], [], ANSWER_SECONDS)[0]
            assert ready, f"trainer rank {number} has not answered {call} within {ANSWER_SECONDS} s"
            answers.append(json.loads(rank.stdout.readline() or '{"error": "it died"}'))
        assert not [said["error"] for said in answers if "error" in said], answers
        return [said["done"] for said in answers]

    def stop(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.stop()


def checkpoint_of(path: Path) -> dict[str, Any]:
    """The checkpoint's tensors, from a module's: an expert's gate lies above its up, and its down lies alone."""
    packed = np.load(path)
    found: dict[str, Any] = {}
    for name in checkpoint_shapes(CONFIG):
        if ".experts." not in name:
            found[name] = packed[name]
            continue
        layer, expert, kind = name.split(".")[2], int(name.split(".")[5]), name.split(".")[6]
        prefix = f"model.layers.{layer}.mlp.experts"
        rows = CONFIG["moe_intermediate_size"]
        if kind == "down_proj":
            found[name] = packed[f"{prefix}.down_proj"][expert]
        else:
            start = 0 if kind == "gate_proj" else rows
            found[name] = packed[f"{prefix}.gate_up_proj"][expert, start : start + rows]
    return {name: np.ascontiguousarray(bits) for name, bits in found.items()}


def assert_said_by_transformers(folder: Path, weights: dict[str, Any], said: dict[str, Any]) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(
        write_checkpoint(folder / "checkpoint", CONFIG, weights), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + said["token_ids"]])).logits[0].float()
    scores = torch.log_softmax(logits, dim=-1)
    for at, (token, value) in enumerate(zip(said["token_ids"], said["logprobs"], strict=True)):
        row = scores[len(PROMPT) + at - 1]
        assert value == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert float(row[token]) == pytest.approx(float(row.max()), abs=TOLERANCE)


def test_every_step_of_an_fsdp2_trainer_reaches_every_worker_without_a_gather_or_a_copy(
    trainer: Trainer, tmp_path: Path
) -> None:
    start = write_checkpoint(tmp_path / "start", CONFIG, scaled_weights(CONFIG, 0))
    with started_server(start, dp=2, tp=2, expert_parallel=True) as fleet:
        trainer.all("train", 0)
        made = trainer.all("connect", fleet.url, "direct")
        local = trainer.all("local")
        for own, beside in zip(local, made, strict=True):
            # Large shards lie in shared memory where they are; small ones are packed, and nothing else is made.
            assert own["shared"] == 1.0
            assert own["small"] < 0.05 * own["large"]
            assert 0 < beside < 2 * own["small"] + 2**16
        answers, seen = [], []
        for step in range(1, STEPS + 1):
            trainer.all("train", step)
            pushed = trainer.all("push", f"step {step}")
            for said in pushed:
                assert said["collectives"] == {}
                assert said["made"] == []
            report = pushed[0]["report"]
            assert report["direct_nbytes"] >= 0.95 * report["nbytes"]
            assert report["worker_calls"] == 4
            assert report["staged_bytes"] < 0.05 * report["nbytes"]
            gathered = trainer.all("save", f"step{step}.npz")
            # What counts collectives does see them.
            assert all(sum(counts.values()) > 0 for counts in gathered)
            weights = checkpoint_of(tmp_path / f"step{step}.npz")
            seen.append(weights)
            assert differences(fleet.url, CONFIG, weights, LAYOUT) == []
            assert info(fleet.url)["weight_version"] == f"step {step}"
            answers.append(answer(fleet.url, 8))
            assert_said_by_transformers(tmp_path, weights, answers[-1])
            if step > 1:
                assert report["request_bytes"] < 4 * 1024
        trainer.all("close")
    # Every step changed every tensor, and what the fleet says.
    for earlier, later in itertools.pairwise(seen):
        assert all((earlier[name] != later[name]).any() for name in earlier)
    assert len({tuple(said["logprobs"]) for said in answers}) == STEPS
