"""Who reads which of several equal shards: near ones first, and every holder about equally much."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plan_by_hand import held_whole, wanting_all, whole_tensors
from rankcast.plan.routes import make_plan


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=80),
    st.integers(2, 7),
    st.integers(1, 9),
    st.booleans(),
)
def test_equal_replicas_send_equally_much_but_for_5_percent_or_one_read(
    sizes: list[int], replicas: int, workers: int, forced: bool
) -> None:
    manifest = whole_tensors([(size,) for size in sizes])
    shards = held_whole(manifest, [list(range(replicas))] * len(sizes))
    if forced:
        # One rank more, with a tensor of its own, sends what nobody else can; the others are not to be held to it.
        manifest = whole_tensors([*((size,) for size in sizes), (10_000,)])
        shards = held_whole(manifest, [*[list(range(replicas))] * len(sizes), [replicas]])
    sent = make_plan(manifest, shards, wanting_all(manifest, workers)).sender_bytes[:replicas]
    assert int(sent.sum()) == 2 * sum(sizes) * workers
    assert sent.max() - sent.min() <= max(0.05 * sent.mean(), 2 * max(sizes))


def test_many_small_reads_are_within_5_percent_even_when_one_tensor_is_large() -> None:
    manifest = whole_tensors([(40_000,), *[(1_000 + 7 * i,) for i in range(120)]])
    shards = held_whole(manifest, [[0, 1, 2, 3]] * 121)
    sent = make_plan(manifest, shards, wanting_all(manifest, 1)).sender_bytes
    assert sent.max() <= 1.05 * sent.min()


def test_a_rank_that_already_sends_what_only_it_holds_is_spared_where_another_can_send() -> None:
    manifest = whole_tensors([(500,), *[(10,)] * 50])
    shards = held_whole(manifest, [[0], *[[0, 1]] * 50])
    assert make_plan(manifest, shards, wanting_all(manifest, 1)).sender_bytes.tolist() == [1000, 1000]


def test_a_worker_reads_on_its_own_host_where_it_can() -> None:
    manifest = whole_tensors([(8,), (8,), (8,)])
    shards = held_whole(manifest, [[0, 1, 2, 3], [0, 1], [3]], hosts=[0, 0, 1, 1])
    plan = make_plan(manifest, shards, wanting_all(manifest, 3, hosts=[0, 1, 7]))
    ranks = [plan.for_worker(worker).origins.rank.tolist() for worker in range(3)]
    assert ranks[0][0] in (0, 1)
    assert ranks[1][0] in (2, 3)
    assert [each[2] for each in ranks] == [3, 3, 3]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_replicas_on_one_host_share_that_hosts_readers(hosts: int, each: int, workers: int) -> None:
    manifest = whole_tensors([(64,)] * 60)
    ranks = list(range(hosts * each))
    shards = held_whole(manifest, [ranks] * 60, hosts=[rank // each for rank in ranks])
    fleet = wanting_all(manifest, hosts * workers, hosts=[w // workers for w in range(hosts * workers)])
    plan = make_plan(manifest, shards, fleet)
    for worker in range(len(fleet)):
        assert set((plan.for_worker(worker).origins.rank // each).tolist()) == {worker // workers}
    assert plan.sender_bytes.max() <= 1.05 * plan.sender_bytes.min()
