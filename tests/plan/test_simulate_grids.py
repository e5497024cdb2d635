"""Grids and families by name: what their defaults are, and what is refused because it does not divide."""

from __future__ import annotations

from typing import Any

import pytest

from rankcast.errors import UnsupportedError
from rankcast.plan.cost import simulate
from rankcast.plan.families import FAMILIES
from rankcast.plan.grids import RolloutGrid, TrainerGrid

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
SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 100,
    "mlp_bias": True,
    "attention_bias": True,
    "dtype": "float32",
}


@pytest.mark.parametrize(
    ("config", "trainer", "rollout", "said"),
    [
        (QWEN3_30B, "tp=3", "tp=1", "trainer tp=3 does not divide num_attention_heads = 32"),
        (QWEN3_30B, "tp=1", "tp=6", "rollout tp=6 does not divide num_attention_heads = 32"),
        ({**QWEN3_30B, "num_attention_heads": 36, "num_key_value_heads": 6}, "", "tp=4", "num_key_value_heads = 6"),
        (QWEN3_30B, "ep=3,dp=3", "tp=1", "trainer ep=3 does not divide the 128 experts"),
        (QWEN3_30B, "tp=2,ep=4,dp=1", "tp=1", "ep x etp = 4 does not divide the tp x cp x dp = 2"),
        (QWEN3_30B, "etp=5,dp=5", "tp=1", "trainer etp=5 does not divide moe_intermediate_size = 768"),
        (QWEN3_30B, "pp=49", "tp=1", "trainer pp=49 exceeds num_hidden_layers = 48"),
        (QWEN3_30B, "", "pp=49", "rollout pp=49 exceeds num_hidden_layers = 48"),
        (QWEN3_30B, "", "tp=4,ep=2", "ep=2, but experts are spread over all tp x dp = 4"),
        (SMALL_LLAMA, "ep=2", "tp=1", "llama of this config has no experts"),
        (SMALL_LLAMA, "", "tp=2,ep=2", "llama of this config has no experts"),
        (QWEN3_30B, "fsdp=8,tp=2", "tp=1", "fsdp goes with dp only, not with tp"),
        (QWEN3_30B, "tp=2,tp=2", "tp=1", "at most once"),
        (QWEN3_30B, "zz=2", "tp=1", "'zz=2' is none of tp=N"),
        (QWEN3_30B, "", "tp=0", "at least 1"),
        ({**QWEN3_30B, "model_type": "gpt9"}, "", "", "model_type 'gpt9'"),
        ({**QWEN3_30B, "quantization_config": {"bits": 4}}, "", "", "quantization_config"),
        ({key: value for key, value in QWEN3_30B.items() if key != "head_dim"} | {"hidden_size": "x"}, "", "", "'x'"),
        ({**QWEN3_30B, "moe_intermediate_size": None}, "", "", "no moe_intermediate_size"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    config: dict[str, Any], trainer: str, rollout: str, said: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        simulate(config, TrainerGrid.parse(trainer), RolloutGrid.parse(rollout), 2**20)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ("tp=4,cp=2,ep=8", 8),
        ("pp=16,ep=64", 1024),
        ("tp=4,ep=8,etp=2", 16),
        ("tp=2,dp=3", 6),
        ("fsdp=8,dp=2", 16),
        ("", 1),
    ],
)
def test_a_grid_without_dp_has_as_few_replicas_as_its_experts_need(trainer: str, ranks: int) -> None:
    assert TrainerGrid.parse(trainer).ranks == ranks


def test_a_rollout_grid_without_dp_has_as_many_replicas_as_ep_asks_for() -> None:
    grid = RolloutGrid.parse("tp=2,pp=2,ep=8,engines=3")
    assert (grid.dp, grid.workers, grid.engines) == (4, 16, 3)


def test_all_families_are_known_by_their_model_type() -> None:
    assert set(FAMILIES) >= {"qwen3_moe", "deepseek_v3", "llama", "qwen3"}
