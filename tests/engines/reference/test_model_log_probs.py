"""At every layout the decoder's log-probs are transformers' own for the same checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import to_builtins
from transformers import Qwen3MoeForCausalLM

from checkpoints import as_torch, scaled_weights, tiny_config, write_checkpoint
from engines.reference.model_threads import on_every_worker
from rankcast.engines.reference.checkpoint import iterate_checkpoint
from rankcast.engines.reference.comm import SingleComm
from rankcast.engines.reference.config import parse_config, read_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout
from rankcast.engines.reference.parts import checkpoint_names
from rankcast.errors import LimitError

TOKENS = [3, 99, 0, 41, 41, 7, 63, 64, 65, 12, 88, 50, 1, 2]
TOLERANCE = 2e-5

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(pp=3),
    Layout(tp=2, pp=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, expert_parallel=True),
    Layout(tp=2, dp=2, expert_parallel=True),
    Layout(tp=2, pp=2, dp=2, expert_parallel=True),
]
MODELS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "dense layer": {"mlp_only_layers": [1]},
    "every second": {"decoder_sparse_step": 2, "norm_topk_prob": False, "rope_theta": 1e6},
    "biased": {"attention_bias": True},
    "uneven": {"num_experts": 7, "num_experts_per_tok": 3, "vocab_size": 130},
}


def transformers_model(directory):
    return Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def transformers_log_probs(directory):
    with torch.no_grad():
        return torch.log_softmax(transformers_model(directory)(torch.tensor([TOKENS])).logits[0].float(), dim=-1)


def log_probs(raw, weights, layout, spoil=lambda model: None):
    """Those of every worker of the last stage."""
    tokens = torch.tensor(TOKENS)
    found = on_every_worker(raw, weights, layout, lambda model, comm: model(tokens, comm), spoil)
    last = [layout.place(rank).is_last_stage for rank in range(layout.workers)]
    assert [result is not None for result in found] == last
    return [result for result in found if result is not None]


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "_"))
def model(request, tmp_path_factory):
    raw = tiny_config(**MODELS[request.param])
    bits = scaled_weights(raw, seed=5)
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), raw, bits)
    return raw, as_torch(bits), transformers_log_probs(directory)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_log_probs_equal_transformers_on_every_worker_of_the_last_stage(model, layout):
    raw, weights, expected = model
    for found in log_probs(raw, weights, layout):
        assert found.dtype == torch.float32
        assert found.shape == (len(TOKENS), raw["vocab_size"])
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def exchange(weights, one, other):
    return weights | {one: weights[other], other: weights[one]}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, dp=2, expert_parallel=True)], ids=str)
@pytest.mark.parametrize("mistake", ["gate and up", "k and v", "experts", "layers", "q and k norm"])
def test_two_tensors_exchanged_show_in_the_log_probs(tmp_path, mistake, layout):
    raw = tiny_config()
    bits = scaled_weights(raw, seed=5)
    weights = as_torch(bits)
    expected = transformers_log_probs(write_checkpoint(tmp_path, raw, bits))
    layer = "model.layers.1"
    experts = [f"{layer}.mlp.experts.{e}" for e in range(8)]
    wrong = dict(weights)
    if mistake == "gate and up":
        for prefix in experts:
            wrong = exchange(wrong, f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
    elif mistake == "k and v":
        wrong = exchange(wrong, f"{layer}.self_attn.k_proj.weight", f"{layer}.self_attn.v_proj.weight")
    elif mistake == "experts":
        for e, prefix in enumerate(experts):
            wrong[f"{prefix}.down_proj.weight"] = weights[f"{experts[(e + 1) % 8]}.down_proj.weight"]
    elif mistake == "layers":
        wrong = exchange(wrong, "model.layers.0.self_attn.o_proj.weight", f"{layer}.self_attn.o_proj.weight")
    else:
        wrong = exchange(wrong, f"{layer}.self_attn.q_norm.weight", f"{layer}.self_attn.k_norm.weight")
    assert (log_probs(raw, wrong, layout)[0] - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, pp=2)], ids=str)
def test_the_padding_of_the_vocabulary_takes_no_part(model, layout):
    raw, weights, expected = model

    def spoil(worker):
        for name, parameter in worker.named_parameters():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                true = max(0, raw["vocab_size"] - worker.place.vocabulary(worker.config).start)
                parameter[true:] = torch.nan

    for found in log_probs(raw, weights, layout, spoil):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def greedy(directory, count):
    """Greedy decoding by transformers' forward alone."""
    model, sequence, scores = transformers_model(directory), list(TOKENS), []
    for _ in range(count):
        with torch.no_grad():
            last = torch.log_softmax(model(torch.tensor([sequence])).logits[0, -1], dim=-1)
        sequence.append(int(last.argmax()))
        scores.append(float(last.max()))
    return sequence[len(TOKENS) :], scores


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=2, pp=2, dp=2, expert_parallel=True)], ids=str)
def test_greedy_decoding_follows_transformers_on_every_worker(tmp_path, layout):
    raw = tiny_config()
    bits = scaled_weights(raw, seed=9)
    tokens, scores = greedy(write_checkpoint(tmp_path, raw, bits), 6)
    done = on_every_worker(raw, as_torch(bits), layout, lambda model, comm: model.generate(TOKENS, 6, comm))
    assert len(set(done)) == 1
    assert list(done[0].token_ids) == tokens
    np.testing.assert_allclose(done[0].log_probs, scores, rtol=0, atol=TOLERANCE)


def test_four_real_processes_over_gloo_equal_transformers_at_every_layout_of_four(tmp_path):
    # One set of processes for all layouts: starting them takes longer than anything they do.
    layouts = [Layout(tp=2, dp=2, expert_parallel=True), Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=2, dp=2)]
    raw = tiny_config(mlp_only_layers=[0], tie_word_embeddings=True)
    write_checkpoint(tmp_path, raw, scaled_weights(raw, seed=5), shards=2)
    expected = transformers_log_probs(tmp_path).numpy()
    tokens, scores = greedy(tmp_path, 3)
    task = {"workers": 4, "layouts": [to_builtins(layout) for layout in layouts], "token_ids": TOKENS, "new": 3}
    (tmp_path / "task.json").write_text(json.dumps(task))
    script = Path(__file__).with_name("model_gloo_worker.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    workers = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)], env=environment) for rank in range(4)
    ]
    try:
        assert [worker.wait(timeout=120) for worker in workers] == [0] * 4
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for number, layout in enumerate(layouts):
        for rank in range(4):
            if layout.place(rank).is_last_stage:
                found = np.load(tmp_path / f"log_probs.{number}.{rank}.npy")
                np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
            ids, log = json.loads((tmp_path / f"done.{number}.{rank}.json").read_text())
            assert ids == tokens
            np.testing.assert_allclose(log, scores, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_saved_by_transformers_has_the_names_listed_and_loads(tmp_path, tied):
    torch.manual_seed(3)
    raw = tiny_config(tie_word_embeddings=tied, attention_bias=True, mlp_only_layers=[1])
    theirs = Qwen3MoeForCausalLM(Qwen3MoeForCausalLM.config_class.from_dict(raw)).eval()
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in iterate_checkpoint(tmp_path)}
    listed = checkpoint_names(config)
    assert saved == dict(zip(listed.names, listed.shapes, strict=True))
    ours = ReferenceModel(config, Layout().place(0))
    assert ours.load_weights(iterate_checkpoint(tmp_path)) == set(dict(ours.named_parameters()))
    with torch.no_grad():
        expected = torch.log_softmax(theirs(torch.tensor([TOKENS])).logits[0], dim=-1)
    torch.testing.assert_close(ours(torch.tensor(TOKENS), SingleComm()), expected, rtol=0, atol=TOLERANCE)


def test_half_precision_stays_near_single_precision_at_every_layout():
    raw = tiny_config()
    weights = as_torch(scaled_weights(raw, seed=5))
    wide = log_probs(raw, weights, Layout())[0]
    for layout in (Layout(), Layout(tp=2, pp=2)):
        narrow = log_probs(raw | {"dtype": "bfloat16"}, weights, layout)[0]
        assert narrow.dtype == torch.float32
        # Most tokens: where two experts are nearly tied, rounding picks another one.
        assert (narrow - wide).abs().median() < 0.1


@pytest.mark.parametrize(
    ("tokens", "said"), [([], "0 tokens"), ([1] * 129, "129 tokens"), ([100], "100 to 100"), ([5, -1], "-1 to 5")]
)
def test_a_sequence_that_cannot_be_computed_is_refused(tokens, said):
    ours = ReferenceModel(parse_config(tiny_config()), Layout().place(0))
    with pytest.raises(LimitError, match=said):
        ours(torch.tensor(tokens, dtype=torch.int64), SingleComm())


def test_more_tokens_than_positions_are_refused_before_the_first():
    ours = ReferenceModel(parse_config(tiny_config()), Layout().place(0))
    with pytest.raises(LimitError, match="120 prompt tokens and 9 new"):
        ours.generate([1] * 120, 9, SingleComm())
    assert len(ours.generate([1] * 126, 2, SingleComm()).token_ids) == 2
