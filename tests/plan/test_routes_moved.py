"""Plans of shards that moved: what a fresh plan would be, without a fresh plan's work, and none where boxes changed."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_routes import Case, cases
from plan_by_hand import held_whole, shards_of, wanting_all, whole_tensors
from rankcast.plan import routes
from rankcast.plan.columns import Shards
from rankcast.plan.routes import Plan, make_plan


def elsewhere(shards: Shards, seed: int) -> Shards:
    """The same boxes, some of them in other segments, at other offsets, with other strides, in another order."""
    random = np.random.default_rng(seed)
    some = random.random(len(shards)) < 0.5
    moved = dataclasses.replace(
        shards,
        segment=np.where(some, random.integers(0, 5, len(shards)), shards.segment).astype(np.int32),
        offset=np.where(some, shards.offset + 8 * random.integers(0, 99, len(shards)), shards.offset),
        strides=np.where(some[:, None], shards.strides * 3, shards.strides),
    )
    return moved.take(random.permutation(len(shards)))


def carried(plan: Plan, shards: Shards) -> Plan:
    """``plan`` over ``shards``, with what only a fresh plan needs made to fail."""
    forbidden = mock.Mock(side_effect=AssertionError("worked out again"))
    with mock.patch.multiple(routes, cross=forbidden, choose_replicas=forbidden):
        moved = plan.moved(shards)
    assert moved is not None
    return moved


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 999), st.booleans())
def test_a_plan_whose_shards_moved_is_what_a_fresh_one_would_be(case: Case, seed: int, asked: bool) -> None:
    plan, shards = case.plan(), elsewhere(case.shards, seed)
    if asked:
        plan.to_json()  # what was worked out before must not be kept where it changes
    fresh = make_plan(case.manifest, shards, case.fleet)
    moved = carried(plan, shards)
    assert moved.hash == fresh.hash
    assert moved.to_json() == fresh.to_json()
    assert moved.casts == fresh.casts
    for worker in range(len(case.fleet)):
        assert moved.for_worker(worker).hash == fresh.for_worker(worker).hash


HELD = [{"tensor": 0, "rank": rank, "starts": (2 * rank,), "sizes": (2,), "dtype": "int16"} for rank in range(2)]


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2},
        {"starts": (1,), "sizes": (3,)},
        {"host": 1},
        {"tensor": 1},
    ],
    ids=["another rank", "another box", "another host", "another tensor"],
)
def test_other_boxes_or_holders_need_a_plan_of_their_own(change: dict[str, object]) -> None:
    manifest = whole_tensors([(4,), (4,)])
    whole = {"tensor": 1, "rank": 0, "starts": (0,), "sizes": (4,), "dtype": "int16"}
    plan = make_plan(manifest, shards_of([*HELD, whole], 1), wanting_all(manifest, 2))
    assert plan.moved(shards_of([*HELD, whole], 1)) is not None
    assert plan.moved(shards_of([HELD[0], {**HELD[1], **change}, whole], 1)) is None
    assert plan.moved(shards_of([*HELD], 1)) is None


def test_another_dtype_needs_a_plan_of_its_own() -> None:
    manifest = whole_tensors([(4,)])
    plan = make_plan(manifest, held_whole(manifest, [[0]]), wanting_all(manifest, 1))
    assert plan.moved(held_whole(whole_tensors([(4,)], "int32"), [[0]])) is None


def test_who_reads_a_shard_is_known_by_its_row() -> None:
    manifest = whole_tensors([(4,), (2,)])
    both = wanting_all(manifest, 1)
    (trace,) = both.traces
    fleet = dataclasses.replace(
        both,
        traces=(trace, trace.take(trace.tensor == 1)),
        trace_of_worker=np.array([0, 1], np.int32),
        host_of_worker=np.array([0, 0], np.int32),
    )
    plan = make_plan(manifest, held_whole(manifest, [[0], [0]]), fleet)
    first = plan.pieces.shards.tensor == 0
    assert [plan.reads(worker, first) for worker in (0, 1)] == [True, False]
    assert [plan.reads(worker, ~first) for worker in (0, 1)] == [True, True]
    assert [plan.reads(worker, first & ~first) for worker in (0, 1)] == [False, False]
