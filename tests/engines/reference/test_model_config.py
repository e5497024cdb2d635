"""What the embedded engine accepts of a config.json, and what it refuses by name."""

from __future__ import annotations

import json

import pytest
from transformers import Qwen3MoeConfig

from checkpoints import tiny_config
from rankcast.engines.reference.config import parse_config, read_config
from rankcast.errors import RankcastError, UnsupportedError


def test_a_plain_config_is_read_as_written(tmp_path):
    raw = tiny_config(norm_topk_prob=False, mlp_only_layers=[1], rope_theta=50000.0)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path)
    assert config.mlp_only_layers == (1,)
    assert config.rope_theta == 50000.0
    assert not config.norm_topk_prob
    assert (config.vocab_size, config.head_dim, config.num_experts, config.dtype) == (100, 8, 8, "float32")


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saves_reads_as_the_same_config(tmp_path, tied):
    raw = tiny_config(tie_word_embeddings=tied, rope_theta=70000.0, dtype="bfloat16", decoder_sparse_step=2)
    Qwen3MoeConfig.from_dict(raw).save_pretrained(tmp_path)
    assert read_config(tmp_path) == parse_config(raw)


def test_older_and_newer_spellings_mean_the_same():
    new = {k: v for k, v in tiny_config().items() if k not in ("rope_theta", "dtype", "num_experts")}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}, "num_local_experts": 8}
    new |= {"torch_dtype": "bfloat16"}
    assert parse_config(new) == parse_config(tiny_config(rope_theta=123.0, dtype="bfloat16"))


def test_a_missing_head_dim_follows_from_hidden_size_and_heads():
    raw = {k: v for k, v in tiny_config(hidden_size=64).items() if k != "head_dim"}
    assert parse_config(raw).head_dim == 16


def test_sparse_layers_follow_transformers_rule():
    config = parse_config(tiny_config(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert config.sparse_layers == (1, 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": None}, "None"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float33"}, "float33"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(change, said):
    with pytest.raises(RankcastError, match=said):
        parse_config(tiny_config() | change)


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_directory_without_a_usable_config_is_refused_by_path(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedError, match=r"config\.json"):
        read_config(tmp_path)
