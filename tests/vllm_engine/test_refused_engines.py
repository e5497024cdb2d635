"""What a push would get wrong without anybody noticing is refused by name at connect; and vLLM goes on as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_engine.conftest import Checkpoints
from vllm_engine.servers import environment_of

pytestmark = pytest.mark.vllm


SCRIPT = Path(__file__).with_name("refused_engine.py")
LORA = {"enable_lora": True, "max_lora_rank": 8}
REBALANCED = {"enable_eplb": True}


def connecting(checkpoint: Path, another: Path, **options: Any) -> str:
    """What connecting to an engine of ``checkpoint`` with ``options`` comes to, for a trainer that has ``another``."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(checkpoint), str(another), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, **environment_of()},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_that_pushes_can_be_kept_correct_on_is_taken(checkpoints: Checkpoints) -> None:
    assert "connected" in connecting(checkpoints("llama", "a"), checkpoints("llama", "b"))


def test_an_engine_with_lora_is_refused(checkpoints: Checkpoints) -> None:
    assert "LoRA (enable_lora)" in connecting(checkpoints("llama", "a"), checkpoints("llama", "b"), **LORA)


def test_an_engine_with_a_draft_model_is_refused(checkpoints: Checkpoints) -> None:
    draft = {"method": "draft_model", "model": str(checkpoints("llama", "b")), "num_speculative_tokens": 2}
    said = connecting(checkpoints("llama", "a"), checkpoints("llama", "b"), speculative_config=draft)
    assert "draft model" in said


def test_an_engine_with_a_quantised_checkpoint_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    # vLLM's CPU build has no kernels for eight-bit floats; eight-bit integers it runs.
    quantised = write_eight_bit(checkpoints("llama", "a"), tmp_path)
    assert "quantisation (compressed-tensors)" in connecting(quantised, checkpoints("llama", "b"))


def test_experts_that_are_rebalanced_are_refused(checkpoints: Checkpoints) -> None:
    assert "rebalanced (enable_eplb)" in connecting(checkpoints("moe", "a"), checkpoints("moe", "b"), **REBALANCED)


def write_eight_bit(checkpoint: Path, directory: Path) -> Path:
    """The checkpoint with its linear layers as eight-bit integers, in the form of ``compressed-tensors``."""
    config = json.loads((checkpoint / "config.json").read_text())
    group = {
        "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "int"},
        "targets": ["Linear"],
        "weights": {"dynamic": False, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"},
    }
    config["quantization_config"] = {
        "config_groups": {"group_0": group},
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (tensor.float() / scale).round().to(torch.int8)
        tensors[name.removesuffix(".weight") + ".weight_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
