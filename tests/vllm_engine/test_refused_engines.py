"""What a push would get wrong without anybody noticing is refused by name at connect; and vLLM goes on as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rankcast
from vllm_engine.conftest import Checkpoints
from vllm_engine.inprocess import digests, probe, started_llm

pytestmark = pytest.mark.vllm


def refusal(llm: Any, checkpoint: Path) -> str:
    """Why connecting is refused; the engine's weights and words are the same before and after."""
    held, said = digests(llm), probe(llm)
    with pytest.raises(rankcast.RankcastError) as refused:
        rankcast.connect(llm, checkpoint, timeout=60)
    assert digests(llm) == held
    assert probe(llm) == said
    return str(refused.value)


def test_an_engine_with_lora_is_refused(checkpoints: Checkpoints) -> None:
    with started_llm(checkpoints("llama", "a"), enable_lora=True, max_lora_rank=8) as llm:
        assert "LoRA (enable_lora)" in refusal(llm, checkpoints("llama", "b"))


def test_an_engine_with_a_draft_model_is_refused(checkpoints: Checkpoints) -> None:
    draft = {"method": "draft_model", "model": str(checkpoints("llama", "b")), "num_speculative_tokens": 2}
    with started_llm(checkpoints("llama", "a"), speculative_config=draft) as llm:
        assert "draft model" in refusal(llm, checkpoints("llama", "b"))


def test_an_engine_with_a_quantised_checkpoint_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    # vLLM's CPU build has no fp8 kernels; eight-bit integers it does run.
    quantised = write_eight_bit(checkpoints("llama", "a"), tmp_path)
    with started_llm(quantised) as llm:
        assert "quantisation (compressed-tensors)" in refusal(llm, checkpoints("llama", "b"))


def test_experts_that_are_rebalanced_are_refused(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM itself does not start with it on CPU: so the configuration of a running engine is changed.
    with started_llm(checkpoints("moe", "a")) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.llm_engine.vllm_config.parallel_config, "enable_eplb", True)
            assert "rebalanced (enable_eplb)" in refusal(llm, checkpoints("moe", "b"))
        rankcast.connect(llm, checkpoints("moe", "b"), timeout=60).close()


def test_speculation_without_a_model_of_its_own_is_not_refused(checkpoints: Checkpoints) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with started_llm(checkpoints("llama", "a"), speculative_config=lookup) as llm:
        with rankcast.connect(llm, checkpoints("llama", "b"), timeout=60) as sync:
            sync.push(weight_version="b")
        held = digests(llm)
    with started_llm(checkpoints("llama", "b")) as llm:
        assert digests(llm) == held


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
