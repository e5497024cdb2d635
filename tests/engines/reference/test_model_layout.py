"""Who stands where in an engine and which layers, experts, heads and rows are whose."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from checkpoints import tiny_config
from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.layout import Layout, check_layout, padded_vocabulary, stage_layer_counts
from rankcast.engines.reference.parts import checkpoint_names, worker_parts
from rankcast.errors import UnsupportedError


def test_ranks_count_tp_fastest_then_pp_then_dp():
    layout = Layout(tp=2, pp=3, dp=2)
    seen = [(p.dp_index, p.pp_index, p.tp_index) for p in map(layout.place, range(layout.workers))]
    assert seen == [(d, p, t) for d in range(2) for p in range(3) for t in range(2)]


def test_the_expert_group_is_dp_times_tp_of_one_stage():
    layout = Layout(tp=2, pp=2, dp=2, expert_parallel=True)
    places = [layout.place(rank) for rank in range(8)]
    assert [p.ep_rank for p in places] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert {p.ep_size for p in places} == {4}
    apart = Layout(tp=2, pp=2, dp=2).place(7)
    assert (apart.ep_rank, apart.ep_size) == (0, 1)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_layout_is_refused(rank):
    with pytest.raises(UnsupportedError, match=str(rank)):
        Layout(tp=2, dp=2).place(rank)


@pytest.mark.parametrize(
    ("layers", "pp", "counts"),
    [
        (4, 2, (2, 2)),
        (5, 2, (3, 2)),
        (7, 3, (2, 3, 2)),
        (8, 3, (3, 3, 2)),
        (10, 4, (2, 3, 3, 2)),
        (11, 4, (3, 3, 3, 2)),
    ],
)
def test_left_over_layers_go_backwards_from_the_last_stage_but_one(layers, pp, counts):
    assert stage_layer_counts(layers, pp) == counts


def test_the_first_expert_ranks_hold_one_more():
    config = parse_config(tiny_config(num_experts=10))
    layout = Layout(tp=2, dp=2, expert_parallel=True)
    assert [layout.place(r).experts(config) for r in range(4)] == [range(3), range(3, 6), range(6, 8), range(8, 10)]


def test_kv_heads_are_repeated_on_neighbours_when_tp_exceeds_them():
    config = parse_config(tiny_config())
    layout = Layout(tp=4)
    assert [list(layout.place(r).key_value_heads(config)) for r in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(100, 1, 128), (128, 2, 128), (1, 4, 64), (65, 3, 129), (151936, 8, 151936)]
)
def test_vocabulary_is_padded_to_64_and_then_to_tp(vocab, tp, padded):
    assert padded_vocabulary(parse_config(tiny_config(vocab_size=vocab)), Layout(tp=tp)) == padded


@pytest.mark.parametrize(
    ("config", "layout", "said"),
    [
        ({}, Layout(tp=3), "num_attention_heads = 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, Layout(tp=6), "num_key_value_heads = 4"),
        ({"moe_intermediate_size": 15}, Layout(tp=2), "moe_intermediate_size = 15"),
        (
            {"intermediate_size": 47, "mlp_only_layers": [0]},
            Layout(tp=2, expert_parallel=True),
            "intermediate_size = 47",
        ),
        ({}, Layout(pp=4), "num_hidden_layers = 3"),
    ],
)
def test_a_layout_that_would_cut_the_model_wrongly_is_refused_with_both_numbers(config, layout, said):
    with pytest.raises(UnsupportedError, match=said) as caught:
        check_layout(parse_config(tiny_config(**config)), layout)
    assert "=" in str(caught.value).split(said)[0]


def test_odd_sizes_that_the_layout_does_not_cut_are_accepted():
    check_layout(parse_config(tiny_config(moe_intermediate_size=15)), Layout(tp=2, expert_parallel=True))
    check_layout(parse_config(tiny_config(intermediate_size=47)), Layout(tp=2))


@settings(max_examples=30)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 3),
    dp=st.integers(1, 2),
    expert_parallel=st.booleans(),
    tied=st.booleans(),
    bias=st.booleans(),
    experts=st.integers(4, 9),
    dense=st.lists(st.integers(0, 2), max_size=3),
    vocab=st.integers(1, 200),
)
def test_every_worker_touches_the_tensors_that_the_oracle_says(
    tp, pp, dp, expert_parallel, tied, bias, experts, dense, vocab
):
    raw = tiny_config(
        tie_word_embeddings=tied,
        attention_bias=bias,
        num_experts=experts,
        mlp_only_layers=dense,
        vocab_size=vocab,
    )
    config, layout = parse_config(raw), Layout(tp, pp, dp, expert_parallel)
    names = checkpoint_names(config)
    assert dict(zip(names.names, names.shapes, strict=True)) == oracle.checkpoint_shapes(raw)
    for rank in range(layout.workers):
        held = worker_parts(config, layout.place(rank))
        # A rank whose vocabulary rows are all padding has a part of no elements, to keep those rows at zero.
        taken = {name for name, part in held.parts.items() if part.source.volume}
        assert taken == oracle.touched(raw, layout, rank)
        assert all(held.parts[name].padding is not None for name in held.parts.keys() - taken)
        assert set(held.parts).isdisjoint(held.elsewhere)
        for name, part in held.parts.items():
            assert part.source.inside(held.shapes[name])
            assert part.target.inside(held.parameters[part.parameter])
            assert part.target.sizes[-len(part.source.sizes) :] == part.source.sizes


def test_config_layout_and_parts_load_no_torch():
    code = "import sys, rankcast.engines.reference.parts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
