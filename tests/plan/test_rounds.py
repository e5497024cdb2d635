"""Rounds: who stages what, when and where; each property that the push leans on, over random holders and sizes.

It knows the promises of `rankcast.plan.rounds`; it must not know tensors or processes.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcast.plan.rounds import ALIGNMENT, Rounds, assign_owners, cut_rounds

Case = tuple[list[list[int]], list[int], list[bool], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Holders in one hidden common order (not the numbers' own), sizes around the bucket's, some tensors unstaged."""
    count = draw(st.integers(0, 30))
    ranks = draw(st.integers(1, 4))
    bucket = draw(st.sampled_from([1, 63, 64, 65, 200, 1000]))
    some = st.sampled_from([0, 1, 2, 63, 64, 65, bucket - 1, bucket, bucket + 1, 3 * bucket])
    sizes = [draw(some) for _ in range(count)]
    staged = [draw(st.integers(0, 4)) > 0 for _ in range(count)]
    order = draw(st.permutations(range(count)))
    held: list[list[int]] = [[] for _ in range(ranks)]
    for tensor in order:
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(tensor)
    return held, sizes, staged, bucket


def cut(case: Case) -> tuple[Rounds, list[int]]:
    held, sizes, staged, bucket = case
    owners = assign_owners(held, sizes)
    return cut_rounds(held, owners, sizes, staged, bucket), owners


@given(cases())
def test_an_owner_holds_what_it_owns_and_the_choice_is_deterministic(case: Case) -> None:
    held, sizes, _, _ = case
    owners = assign_owners(held, sizes)
    assert all(tensor in held[owner] for tensor, owner in enumerate(owners))
    assert owners == assign_owners([tuple(tensors) for tensors in held], tuple(sizes))


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 6))
def test_replicated_tensors_are_owned_evenly(sizes: list[int], ranks: int) -> None:
    owners = assign_owners([range(len(sizes))] * ranks, sizes)
    owned = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(owned) - min(owned) <= max(sizes, default=0)


@given(cases())
def test_a_bucket_holds_no_more_than_it_may_and_nothing_overlaps(case: Case) -> None:
    held, sizes, staged, bucket = case
    rounds, owners = cut(case)
    for rank in range(len(held)):
        assert len(rounds.buckets[rank]) == rounds.count
        for number in range(rounds.count):
            inside = [
                t for t in held[rank] if owners[t] == rank and rounds.rounds[t] == number and staged[t] and sizes[t]
            ]
            spans = sorted((rounds.offsets[t], rounds.offsets[t] + sizes[t]) for t in inside)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert all(start % ALIGNMENT == 0 for start, _ in spans)
            assert rounds.buckets[rank][number] == (spans[-1][1] if spans else 0)
            assert rounds.buckets[rank][number] <= bucket or len(spans) == 1


@given(cases())
def test_what_is_not_staged_takes_no_bytes(case: Case) -> None:
    held, sizes, staged, bucket = case
    owners = assign_owners(held, sizes)
    rounds = cut_rounds(held, owners, sizes, [False] * len(sizes), bucket)
    assert rounds.count == (1 if sizes else 0)
    assert all(bytes_ == 0 for row in rounds.buckets for bytes_ in row)
    mixed = cut_rounds(held, owners, sizes, staged, bucket)
    assert all(mixed.offsets[t] == 0 for t in range(len(sizes)) if not staged[t])


@given(cases())
def test_rounds_never_decrease_along_any_ranks_order(case: Case) -> None:
    rounds, _ = cut(case)
    for tensors in case[0]:
        along = [rounds.rounds[t] for t in tensors]
        assert along == sorted(along)


@given(cases(), st.integers(0, 2**32))
def test_ranks_in_lock_step_reach_the_end_with_two_buffers(case: Case, seed: int) -> None:
    """A rank goes past a tensor when all its holders are at it; it stages round k once round k-2 is acknowledged."""
    held, _, _, _ = case
    rounds, _ = cut(case)
    steps = [0] * len(held)
    chance = random.Random(seed)

    def at(rank: int) -> int | None:
        return held[rank][steps[rank]] if steps[rank] < len(held[rank]) else None

    holders = {t: [rank for rank, tensors in enumerate(held) if t in tensors] for tensors in held for t in tensors}
    acknowledged = 0
    while any(at(rank) is not None for rank in range(len(held))):
        # A round is acknowledged once no rank has one of its tensors, or an earlier one, before it.
        staging = [rounds.rounds[t] for rank in range(len(held)) if (t := at(rank)) is not None]
        acknowledged = max(acknowledged, min(staging))
        free = [
            t
            for rank in range(len(held))
            if (t := at(rank)) is not None
            and all(at(other) == t for other in holders[t])
            and rounds.rounds[t] < acknowledged + 2
        ]
        assert free, f"every rank waits: {[at(rank) for rank in range(len(held))]}"
        for rank in holders[chance.choice(free)]:
            steps[rank] += 1


@given(cases())
def test_no_round_is_without_a_reason(case: Case) -> None:
    """Each tensor's round is the least: one that any holder's tensors before it have, or the bucket was full there."""
    held, sizes, staged, bucket = case
    rounds, owners = cut(case)
    position = [{t: i for i, t in enumerate(tensors)} for tensors in held]
    for tensor in range(len(sizes)):
        before = [tensors[: position[r][tensor]] for r, tensors in enumerate(held) if tensor in position[r]]
        least = max((rounds.rounds[t] for tensors in before for t in tensors), default=0)
        if rounds.rounds[tensor] == least:
            continue
        assert rounds.rounds[tensor] == least + 1
        owner = owners[tensor]
        mine = held[owner][: position[owner][tensor]]
        full = [t for t in mine if owners[t] == owner and rounds.rounds[t] == least and staged[t] and sizes[t]]
        end = max(rounds.offsets[t] + sizes[t] for t in full)
        assert -(-end // ALIGNMENT) * ALIGNMENT + sizes[tensor] > bucket


def test_a_qwen3_30b_a3b_of_eight_ranks_takes_at_most_22_rounds() -> None:
    mib = 2**20
    sizes: list[int] = []
    held: list[list[int]] = [[] for _ in range(8)]

    def give(ranks: range, *bytes_: int) -> None:
        for size in bytes_:
            for rank in ranks:
                held[rank].append(len(sizes))
            sizes.append(size)

    vocabulary = 151936 * 2048 * 2
    give(range(8), vocabulary)
    for _ in range(48):
        give(range(8), 16 * mib, 2 * mib, 2 * mib, 16 * mib, 256, 256, 128 * 2048 * 2, 4096, 4096)
        for expert in range(128):
            give(range(expert // 16, expert // 16 + 1), *[768 * 2048 * 2] * 3)
    give(range(8), 4096, vocabulary)
    owners = assign_owners(held, sizes)
    rounds = cut_rounds(held, owners, sizes, [True] * len(sizes), 512 * mib)
    assert sum(sizes) / 8 / (512 * mib) <= rounds.count <= 22
    assert max(max(row) for row in rounds.buckets) == vocabulary


def test_a_tensor_larger_than_the_bucket_is_alone_in_its_owners_bucket() -> None:
    sizes = [64, 1000, 64, 64]
    rounds = cut_rounds([[0, 1, 2, 3]], [0] * 4, sizes, [True] * 4, 128)
    assert rounds == Rounds(3, (0, 1, 2, 2), (0, 0, 0, 64), ((64, 1000, 128),))


def test_another_ranks_bucket_is_open_beside_an_oversized_tensor() -> None:
    rounds = cut_rounds([[0, 2], [0, 1]], [0, 1, 0], [1000, 64, 64], [True] * 3, 128)
    assert rounds == Rounds(2, (0, 0, 1), (0, 0, 0), ((1000, 64), (64, 0)))


def test_contradicting_orders_are_refused_naming_tensors_and_ranks() -> None:
    with pytest.raises(ValueError) as caught:
        cut_rounds([[0, 1, 2], [3, 2, 1]], [0, 0, 0, 1], [1] * 4, [True] * 4, 64, names=["a", "b", "c", "d"])
    assert "trainer rank 0 yields b before c" in str(caught.value)
    assert "trainer rank 1 yields c before b" in str(caught.value)


def test_a_circle_over_three_ranks_is_refused_naming_each_step() -> None:
    with pytest.raises(ValueError) as caught:
        cut_rounds([[0, 1], [1, 2], [2, 0]], [0, 0, 1], [1] * 3, [True] * 3, 64)
    for line in (
        "0 yields tensor 0 before tensor 1",
        "1 yields tensor 1 before tensor 2",
        "2 yields tensor 2 before tensor 0",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("held", "owners", "sizes", "bucket", "said"),
    [
        ([[0]], [0], [1, 1], 64, "no trainer rank holds"),
        ([[0], [0, 0]], [0], [1], 64, "trainer rank 1 holds tensor 0 twice"),
        ([[0, 5]], [0], [1], 64, "tensor 5"),
        ([[0], []], [1], [1], 64, "trainer rank 1 is to own tensor 0"),
        ([[0]], [0, 0], [1], 64, "2 owners"),
        ([[0]], [0], [1], 0, "0 bytes"),
        ([[0]], [0], [-1], 64, "-1 bytes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    held: list[list[int]], owners: list[int], sizes: list[int], bucket: int, said: str
) -> None:
    with pytest.raises(ValueError) as caught:
        cut_rounds(held, owners, sizes, [True] * len(sizes), bucket)
    assert said in str(caught.value)


def test_nothing_at_all_takes_no_round() -> None:
    assert assign_owners([[], []], []) == []
    assert cut_rounds([[], []], [], [], [], 64) == Rounds(0, (), (), ((), ()))
