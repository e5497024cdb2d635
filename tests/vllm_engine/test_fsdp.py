"""A real trainer into a real server: transformers' Qwen3-MoE under FSDP2 on two ranks, into vLLM with TP2 and experts
spread.

The masters are float32 and the workers bfloat16, so each copy rounds as well. Every worker is compared with the oracle
after each step, over weights that the trainer gathers for this purpose only, and at the end with a fresh engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from checkpoints import as_torch, bits_of, write_checkpoint
from direct.fsdp_ranks import FsdpTrainer, checkpoint_of
from vllm_engine import inprocess
from vllm_engine.conftest import Bench
from vllm_engine.demo_expected import Expected
from vllm_engine.models import config_of, weights_of
from vllm_engine.servers import TP2_EP

pytestmark = pytest.mark.vllm

CONFIG = config_of("moe")
STEPS = 5


def rounded(weights: dict[str, Any]) -> dict[str, Any]:
    """The bits of float32 weights as bfloat16, rounded as torch rounds."""
    return {name: bits_of(tensor.to(torch.bfloat16)) for name, tensor in as_torch(weights).items()}


@pytest.mark.parametrize("bench", [TP2_EP], indirect=True, ids=lambda layout: layout.name, scope="session")
def test_every_step_of_an_fsdp2_trainer_reaches_vllm_without_a_gather_or_a_copy(bench: Bench, tmp_path: Path) -> None:
    started = {name: bits_of(tensor) for name, tensor in weights_of("moe", "a").items()}
    layout = oracle.Layout(tp=bench.layout.tp, expert_parallel=bench.layout.expert_parallel)
    expected = Expected(CONFIG, layout, started, bench.at_a.digests)
    with FsdpTrainer({**CONFIG, "dtype": "float32"}, tmp_path) as trainer:
        trainer.all("train", 0)
        trainer.all("connect", bench.server.url, "direct")
        local = trainer.all("local")
        small = sum(own["small"] for own in local)
        before = started
        for step in range(1, STEPS + 1):
            trainer.all("train", step)
            pushed = trainer.all("push", f"step {step}")
            for said in pushed:
                assert said["collectives"] == {}
                assert said["made"] == []
            report = pushed[0]["report"]
            assert report["direct_tensors"] == report["cast_tensors"] == report["tensors"]
            assert report["worker_calls"] == bench.layout.tp
            # Storages below 64 KiB are packed; of so small a model they are a part that can be seen.
            assert report["staged_bytes"] == small
            trainer.all("save", f"step{step}.npz")
            after = rounded(checkpoint_of(CONFIG, tmp_path / f"step{step}.npz"))
            assert all(np.any(before[name] != after[name]) for name in after)
            assert expected.differences(after, bench.server.digests()) == []
            before = after
        trainer.all("close")
    held, said_last = bench.server.digests(), bench.server.probe()
    assert said_last != bench.at_a.said
    with inprocess.started_llm(write_checkpoint(tmp_path / "end", CONFIG, before), bench.layout) as fresh:
        assert held == inprocess.digests(fresh)
        assert said_last == inprocess.probe(fresh)
