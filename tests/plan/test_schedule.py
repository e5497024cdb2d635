"""Schedules cut from shared columns: each worker's own tensors, in the order of their rounds, all counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankcast.manifest import Manifest, nbytes
from rankcast.plan.schedule import Placed, cut_schedule

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "uint8"])


@st.composite
def placements(draw: st.DrawFn) -> tuple[Manifest, Placed, list[int]]:
    count = draw(st.integers(0, 12))
    installs = draw(st.integers(1, 5))
    numbers = st.lists(st.integers(0, installs - 1), min_size=count, max_size=count)
    manifest = Manifest(
        tuple(f"t{index}" for index in range(count)),
        tuple(draw(st.lists(DTYPES, min_size=count, max_size=count))),
        tuple(draw(st.lists(SHAPES, min_size=count, max_size=count))),
    )
    placed = Placed(
        rounds=tuple(draw(numbers)),
        segments=tuple(draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))),
        offsets=tuple(draw(st.lists(st.integers(0, 2**40), min_size=count, max_size=count))),
        installs=installs,
    )
    touched = [index for index in range(count) if draw(st.booleans())]
    return manifest, placed, draw(st.permutations(touched))


@given(placements())
def test_a_schedule_has_exactly_the_touched_tensors_each_where_it_lies(
    case: tuple[Manifest, Placed, list[int]],
) -> None:
    manifest, placed, touched = case
    cut = cut_schedule(manifest, placed, touched)
    schedule = cut.schedule
    assert sorted(schedule.names) == sorted(manifest.names[index] for index in touched)
    for at, name in enumerate(schedule.names):
        index = manifest.index[name]
        assert (schedule.dtypes[at], schedule.shapes[at]) == (manifest.dtypes[index], manifest.shapes[index])
        assert schedule.rounds[at] == placed.rounds[index]
        assert schedule.offsets[at] == placed.offsets[index]
        assert cut.segments[schedule.segments[at]] == placed.segments[index]
    assert sorted(set(cut.segments)) == list(cut.segments)
    assert set(cut.segments) == {placed.segments[index] for index in touched}


@given(placements())
def test_rounds_never_decrease_and_tensors_of_one_round_keep_their_order(
    case: tuple[Manifest, Placed, list[int]],
) -> None:
    manifest, placed, touched = case
    schedule = cut_schedule(manifest, placed, touched).schedule
    order = [(turn, manifest.index[name]) for turn, name in zip(schedule.rounds, schedule.names, strict=True)]
    assert order == sorted(order)


@given(placements())
def test_the_totals_are_those_of_the_tensors(case: tuple[Manifest, Placed, list[int]]) -> None:
    manifest, placed, touched = case
    cut = cut_schedule(manifest, placed, touched)
    sizes = {index: nbytes(manifest.dtypes[index], manifest.shapes[index]) for index in touched}
    assert (cut.tensors, cut.nbytes) == (len(touched), sum(sizes.values()))
    assert cut.calls == len({placed.rounds[index] for index in touched})
    assert len(cut.nbytes_by_round) == placed.installs
    for turn, total in enumerate(cut.nbytes_by_round):
        assert total == sum(size for index, size in sizes.items() if placed.rounds[index] == turn)


@given(placements(), st.integers(0, 11), st.integers(1, 99))
def test_equal_schedules_have_equal_hashes_and_others_have_not(
    case: tuple[Manifest, Placed, list[int]], where: int, by: int
) -> None:
    manifest, placed, touched = case
    cut = cut_schedule(manifest, placed, touched)
    assert cut_schedule(manifest, placed, sorted(touched)).hash == cut.hash
    if touched:
        index = touched[where % len(touched)]
        offsets = tuple(offset + by * (at == index) for at, offset in enumerate(placed.offsets))
        moved = Placed(placed.rounds, placed.segments, offsets, placed.installs)
        assert cut_schedule(manifest, moved, touched).hash != cut.hash
        assert cut_schedule(manifest, placed, [i for i in touched if i != index]).hash != cut.hash


def test_a_worker_that_touches_nothing_has_an_empty_schedule() -> None:
    manifest = Manifest(("a",), ("float32",), ((2,),))
    cut = cut_schedule(manifest, Placed((0,), (0,), (0,), 3), [])
    assert cut.schedule.names == ()
    assert (cut.segments, cut.tensors, cut.nbytes, cut.calls) == ((), 0, 0, 0)
    assert cut.nbytes_by_round == (0, 0, 0)


def test_a_session_without_installs_has_an_empty_schedule() -> None:
    cut = cut_schedule(Manifest((), (), ()), Placed((), (), (), 0), [])
    assert cut.nbytes_by_round == ()
    assert cut.calls == 0
