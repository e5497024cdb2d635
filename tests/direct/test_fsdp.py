"""A real trainer: transformers' Qwen3-MoE under FSDP2 on two ranks, five optimizer steps, a direct push after each.

Into the embedded fleet of four workers (DP2 x TP2, experts over all four), over HTTP. What workers hold is compared
with the oracle over weights that the trainer gathers for this purpose only, and what they say with transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from direct.fsdp_ranks import FsdpTrainer, checkpoint_of
from end_to_end.seen import PROMPT, answer, differences, info
from fleets import started_server
from oracle import Layout

CONFIG = tiny_config(
    num_hidden_layers=2,
    hidden_size=128,
    head_dim=64,
    moe_intermediate_size=96,
    num_key_value_heads=4,
    vocab_size=300,
)
LAYOUT = Layout(dp=2, tp=2, expert_parallel=True)
STEPS = 5
TOLERANCE = 1e-4


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[FsdpTrainer]:
    with FsdpTrainer(CONFIG, tmp_path) as made:
        yield made


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
    trainer: FsdpTrainer, tmp_path: Path
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
            assert report["cast_tensors"] == 0
            assert report["staged_bytes"] < 0.05 * report["nbytes"]
            gathered = trainer.all("save", f"step{step}.npz")
            # What counts collectives does see them.
            assert all(sum(counts.values()) > 0 for counts in gathered)
            weights = checkpoint_of(CONFIG, tmp_path / f"step{step}.npz")
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
