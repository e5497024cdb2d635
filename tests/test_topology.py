"""Who is who: ranks, and which entry of a list is whose, for every layout and also when a replica was re-created."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from rankcast.errors import EngineError, PayloadError
from rankcast.topology import Worker, check_engine, engine_rank, missing_ranks, new_engine_id
from rankcast.wire.payload import pick

GRIDS = list(itertools.product((1, 2, 3), (1, 2), (1, 2, 3, 4)))
ENGINE = "0123456789abcdef0123456789abcdef"


def fleet(dp: int, pp: int, tp: int, *, dense: bool = False) -> list[Worker]:
    """An engine's workers in order of rank, each identity made from what that worker's own configuration says.

    ``dense``: replicas were re-created as engines of their own, so that each one's data-parallel rank is 0.
    """
    return [
        Worker(
            engine=ENGINE,
            rank=engine_rank(dp_index=replica, world_size=pp * tp, rank=stage * tp + part),
            workers=dp * pp * tp,
            dp=0 if dense else replica,
            pp=stage,
            tp=part,
        )
        for replica, stage, part in itertools.product(range(dp), range(pp), range(tp))
    ]


@pytest.mark.parametrize("dense", [False, True], ids=["as-started", "re-created"])
@pytest.mark.parametrize(("dp", "pp", "tp"), GRIDS)
def test_a_list_gives_worker_i_entry_i(dp: int, pp: int, tp: int, dense: bool) -> None:
    workers = fleet(dp, pp, tp, dense=dense)
    assert [worker.rank for worker in workers] == list(range(dp * pp * tp))
    payload = msgspec.json.decode(msgspec.json.encode([{"names": [f"for {i}"]} for i in range(len(workers))]))
    assert [pick(payload, worker) for worker in workers] == [{"names": [f"for {i}"]} for i in range(len(workers))]
    check_engine(workers, where="here")


@pytest.mark.parametrize(("dp", "pp", "tp"), [grid for grid in GRIDS if grid[0] > 1])
def test_the_data_parallel_rank_of_re_created_replicas_would_pick_another_replicas_entries(
    dp: int, pp: int, tp: int
) -> None:
    workers = fleet(dp, pp, tp, dense=True)
    by_dp_rank = [engine_rank(dp_index=w.dp, world_size=pp * tp, rank=w.pp * tp + w.tp) for w in workers]
    assert len(set(by_dp_rank)) == pp * tp < len(workers)


@pytest.mark.parametrize(("dp", "pp", "tp"), GRIDS)
def test_a_dict_is_the_same_for_every_worker(dp: int, pp: int, tp: int) -> None:
    payload = {"names": ["a", "b"], "packed": True, "anything": {"of": ["vLLM's"]}}
    assert all(pick(payload, worker) == payload for worker in fleet(dp, pp, tp))


@pytest.mark.parametrize(("dp", "pp", "tp"), GRIDS)
def test_a_list_of_any_other_length_is_refused_with_both_numbers(dp: int, pp: int, tp: int) -> None:
    workers = fleet(dp, pp, tp)
    count = len(workers)
    for length in {0, 1, pp * tp, count - 1, count + 1, 2 * count} - {count}:
        for worker in workers:
            with pytest.raises(PayloadError, match=rf"{length} entries .* {count} workers"):
                pick([{"names": []}] * length, worker)


@pytest.mark.parametrize(("dp_index", "world_size", "rank"), [(-1, 2, 0), (0, 2, 2), (0, 2, -1), (0, 0, 0)])
def test_a_place_that_is_none_is_refused(dp_index: int, world_size: int, rank: int) -> None:
    with pytest.raises(ValueError, match="is not a worker's place"):
        engine_rank(dp_index=dp_index, world_size=world_size, rank=rank)


@pytest.mark.parametrize("rank", [-1, 4, 5])
def test_a_worker_outside_its_engine_cannot_be_made(rank: int) -> None:
    with pytest.raises(ValueError, match="is not one of the engine's 4 workers"):
        Worker(rank=rank, workers=4)


def test_two_workers_with_one_rank_are_an_error_that_names_the_rank() -> None:
    workers = [*fleet(1, 1, 4)[:3], fleet(1, 1, 4)[2]]
    with pytest.raises(EngineError, match=r"ranks \[2\] are claimed by more than one"):
        check_engine(workers, where="http://127.0.0.1:1")


def test_an_absent_worker_is_an_error_that_names_it() -> None:
    with pytest.raises(EngineError, match=r"3 of 4 workers reported; workers \[1\]"):
        check_engine([w for w in fleet(2, 1, 2) if w.rank != 1], where="http://127.0.0.1:1")
    with pytest.raises(EngineError, match="no worker of http"):
        check_engine([], where="http://127.0.0.1:1")
    assert missing_ranks([3, 1], 4) == [0, 2]


def test_workers_that_disagree_on_their_engine_are_an_error() -> None:
    with pytest.raises(EngineError, match="do not agree"):
        check_engine([Worker(engine="a", workers=2), Worker(engine="b", rank=1, workers=2)], where="here")
    with pytest.raises(EngineError, match="do not agree"):
        check_engine([Worker(engine="a", workers=2), Worker(engine="a", rank=1, workers=3)], where="here")


def test_engine_ids_are_128_random_bits() -> None:
    ids = {new_engine_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)
