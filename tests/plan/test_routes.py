"""Plans of random shards and destinations: what the routes copy is what slicing the full tensors gives, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plan_by_hand import (
    box_of,
    carry_out,
    destinations_by_hand,
    filled,
    held_whole,
    numpy_dtype,
    padded,
    shards_of,
    view,
    wanting_all,
    whole_tensors,
)
from rankcast.errors import ManifestError, UnsupportedError
from rankcast.manifest import Manifest
from rankcast.plan.columns import Destinations, Fleet, Shards, dimensions, dtype_codes
from rankcast.plan.routes import Plan, make_plan

Spans = list[tuple[int, int]]
DTYPES = st.sampled_from(["int16", "int32", "int64"])


class Case(NamedTuple):
    manifest: Manifest
    shards: Shards
    fleet: Fleet
    parameters: list[list[int]]  # by trace, elements of each parameter

    def plan(self) -> Plan:
        return make_plan(self.manifest, self.shards, self.fleet)

    def tensors(self) -> dict[int, Any]:
        """Full tensors in which no two elements are equal."""
        full, at = {}, 1
        for index, (shape, dtype) in enumerate(zip(self.manifest.shapes, self.manifest.dtypes, strict=True)):
            size = math.prod(shape)
            full[index] = np.arange(at, at + size).astype(dtype).reshape(shape)
            at += size
        return full


@st.composite
def spans(draw: st.DrawFn, size: int) -> Spans:
    """A dimension cut at random places, now and then with empty parts."""
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
    return list(itertools.pairwise([0, *cuts, size]))


@st.composite
def strided(draw: st.DrawFn, sizes: list[int]) -> tuple[list[int], int]:
    """Strides of a view of ``sizes`` whose dimensions lie in any order, with gaps; and how many elements it spans."""
    strides, step = [0] * len(sizes), 1
    for d in draw(st.permutations(range(len(sizes)))):
        strides[d] = step
        step = step * max(sizes[d], 1) + draw(st.integers(0, 1))
    return strides, step


@st.composite
def holdings(draw: st.DrawFn, index: int, shape: tuple[int, ...], dtype: str, ranks: int) -> list[dict[str, Any]]:
    """Shards that together hold all of a tensor, some on several ranks; sometimes odd boxes beside."""
    rows = []
    grid = itertools.product(*[draw(spans(size)) for size in shape])
    boxes = [([a for a, _ in box], [b - a for a, b in box]) for box in grid]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        boxes.append(([a for a, _ in ends], [b - a for a, b in ends]))
    for starts, sizes in boxes:
        for rank in sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=3))):
            strides, span = draw(strided(sizes))
            row = {"tensor": index, "rank": rank, "starts": starts, "sizes": sizes, "strides": strides, "span": span}
            rows.append({**row, "dtype": dtype, "segment": draw(st.integers(0, 1))})
    return rows


@st.composite
def traces(draw: st.DrawFn, manifest: Manifest) -> tuple[Destinations, list[int]]:
    """Destinations with boxes of random tensors, each in a place of its own in one of two parameters."""
    rows, filled_to, dtypes = [], [0, 0], draw(st.tuples(DTYPES, DTYPES))
    for _ in range(draw(st.integers(0, 5)) if len(manifest) else 0):
        index = draw(st.integers(0, len(manifest) - 1))
        ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in manifest.shapes[index]]
        sizes = [b - a for a, b in ends]
        strides, span = draw(strided(sizes))
        parameter = draw(st.integers(0, 1))
        row = {"tensor": index, "parameter": parameter, "starts": [a for a, _ in ends], "sizes": sizes}
        rows.append({**row, "offset": filled_to[parameter], "strides": strides, "dtype": dtypes[parameter]})
        filled_to[parameter] += span + draw(st.integers(0, 2))
    return destinations_by_hand(rows, dimensions(manifest)), filled_to


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    shapes = [tuple(draw(st.lists(st.integers(0, 5), max_size=3))) for _ in range(count)]
    manifest = Manifest(tuple(f"t{i}" for i in range(count)), tuple(draw(DTYPES) for _ in shapes), tuple(shapes))
    rows = [
        row
        for index, (shape, dtype) in enumerate(zip(shapes, manifest.dtypes, strict=True))
        for row in draw(holdings(index, shape, dtype, ranks))
    ]
    hosts = [draw(st.integers(0, 2)) for _ in range(ranks)]
    ends: dict[tuple[int, int], int] = {}
    for row in rows:
        key = (row["rank"], row["segment"])
        row["host"], row["offset"] = hosts[row["rank"]], -(-ends.get(key, 0) // 8) * 8
        ends[key] = row["offset"] + row["span"] * np.dtype(row["dtype"]).itemsize
    made = [draw(traces(manifest)) for _ in range(draw(st.integers(1, 3)))]
    of_worker = draw(st.lists(st.integers(0, len(made) - 1), max_size=4))
    on = np.array([draw(st.integers(0, 3)) for _ in of_worker], dtype=np.int32)
    fleet = Fleet(tuple(trace for trace, _ in made), np.array(of_worker, dtype=np.int32), on)
    return Case(manifest, shards_of(rows, dimensions(manifest)), fleet, [sizes for _, sizes in made])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_carrying_out_the_routes_equals_slicing_and_writes_every_element_once(case: Case) -> None:
    plan, tensors = case.plan(), case.tensors()
    segments = filled(case.shards, tensors)
    for worker, number in enumerate(case.fleet.trace_of_worker.tolist()):
        trace = case.fleet.traces[number]
        dtypes = {int(p): numpy_dtype(int(d)) for p, d in zip(trace.parameter, trace.dtype, strict=True)}
        held, expected = (
            [np.zeros(size, dtype=dtypes.get(p, np.int16)) for p, size in enumerate(case.parameters[number])]
            for _ in range(2)
        )
        times = [np.zeros(array.shape, dtype=np.int64) for array in expected]
        for row in range(len(trace)):
            if (trace.sizes[row] == 0).any():
                continue
            parameter, offset = int(trace.parameter[row]), int(trace.offset[row])
            form = (trace.sizes[row].tolist(), trace.strides[row].tolist())
            for array, value in (
                (expected[parameter], box_of(tensors[int(trace.tensor[row])], trace.starts[row], trace.sizes[row])),
                (times[parameter], 1),
            ):
                view(array.view(np.uint8)[offset * array.itemsize :], array.dtype, *form)[...] = value
        written = carry_out(plan.for_worker(worker), segments, held)
        assert [array.tobytes() for array in held] == [array.tobytes() for array in expected]
        assert [array.tolist() for array in written] == [array.tolist() for array in times]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_what_ranks_send_is_what_workers_read_and_what_the_rows_say(case: Case) -> None:
    plan = case.plan()
    sent = np.zeros(len(plan.sender_bytes), dtype=np.int64)
    for worker in range(len(case.fleet)):
        rows = plan.for_worker(worker)
        sizes = rows.targets.sizes.prod(axis=1) * [numpy_dtype(int(code)).itemsize for code in rows.origins.dtype]
        assert int(sizes.sum()) == plan.worker_bytes[worker]
        assert len(rows) == plan.routes_of(worker)
        np.add.at(sent, rows.origins.rank, sizes.astype(np.int64))
    assert sent.tolist() == plan.sender_bytes.tolist()
    assert plan.routes == sum(plan.routes_of(worker) for worker in range(len(case.fleet)))
    assert plan.to_json()["bytes"] == int(sent.sum())


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_shards(case: Case, random: Any) -> None:
    order = list(range(len(case.shards)))
    random.shuffle(order)
    again = make_plan(case.manifest, case.shards.take(np.array(order, dtype=np.int64)), case.fleet)
    assert again.hash == case.plan().hash


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_a_worker_computes_the_hash_of_its_rows_and_any_other_value_changes_it(case: Case, data: st.DataObject) -> None:
    plan = case.plan()
    workers = [worker for worker in range(len(case.fleet)) if plan.routes_of(worker)]
    assume(workers)
    rows = plan.for_worker(data.draw(st.sampled_from(workers)))
    halves = {}
    for name in ("targets", "origins"):
        half = getattr(rows, name)
        copies = {f.name: np.asfortranarray(getattr(half, f.name)) for f in dataclasses.fields(half)}
        halves[name] = dataclasses.replace(half, **copies)
    assert dataclasses.replace(rows, **halves).hash == rows.hash
    name = data.draw(st.sampled_from(["targets", "origins"]))
    field = data.draw(st.sampled_from([f.name for f in dataclasses.fields(halves[name])]))
    column = getattr(halves[name], field).copy()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in column.shape)
    column[place] += 1
    changed = dataclasses.replace(rows, **{name: dataclasses.replace(halves[name], **{field: column})})
    assert changed.hash != rows.hash


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_the_hash_changes_with_anything_that_is_planned(case: Case, data: st.DataObject) -> None:
    plan = case.plan()
    workers = [worker for worker in range(len(case.fleet)) if plan.routes_of(worker)]
    assume(workers)
    worker = data.draw(st.sampled_from(workers))
    used = plan.for_worker(worker).origins
    row = data.draw(st.integers(0, len(used.rank) - 1))
    moved = np.where(
        (case.shards.rank == used.rank[row]) & (case.shards.segment == used.segment[row]), case.shards.offset + 8, 0
    )
    shards = dataclasses.replace(case.shards, offset=np.maximum(case.shards.offset, moved))
    assert make_plan(case.manifest, shards, case.fleet).hash != plan.hash
    names = (*case.manifest.names[:-1], "another")
    renamed = Manifest(names, case.manifest.dtypes, case.manifest.shapes)
    assert make_plan(renamed, case.shards, case.fleet).hash != plan.hash
    more = dataclasses.replace(
        case.fleet,
        trace_of_worker=np.append(case.fleet.trace_of_worker, case.fleet.trace_of_worker[worker]),
        host_of_worker=np.append(case.fleet.host_of_worker, case.fleet.host_of_worker[worker]),
    )
    assert make_plan(case.manifest, case.shards, more).hash != plan.hash


@settings(max_examples=80, deadline=None)
@given(cases(), st.data())
def test_a_shard_that_is_missing_everywhere_is_named_before_anything_moves(case: Case, data: st.DataObject) -> None:
    plan = case.plan()
    assume(len(plan.crossings.piece))
    crossing = data.draw(st.integers(0, len(plan.crossings.piece) - 1))
    piece = plan.crossings.piece[crossing]
    tensor, begin = plan.pieces.tensor[piece], plan.pieces.starts[piece]
    end = begin + plan.pieces.sizes[piece]
    meets = (case.shards.starts < end).all(1) & (case.shards.starts + case.shards.sizes > begin).all(1)
    kept = case.shards.take(~(meets & (case.shards.tensor == tensor)))
    with pytest.raises(ManifestError, match=rf"{case.manifest.names[tensor]}\b") as caught:
        make_plan(case.manifest, kept, case.fleet)
    assert caught.value.tensor == case.manifest.names[tensor]


def test_every_missing_tensor_is_counted_and_the_first_ten_are_named() -> None:
    manifest = whole_tensors([(2, 3)] * 30)
    shards = held_whole(manifest, [[0]] * 15 + [[]] * 15)
    with pytest.raises(ManifestError) as caught:
        make_plan(manifest, shards, wanting_all(manifest, 2))
    said = caught.value.message
    assert all(f"t{i}," in said or f"t{i} and" in said for i in range(15, 25))
    assert "t25" not in said
    assert "(15 in all)" in said
    assert "worker 0 wants [0:2, 0:3] of t15 int16[2, 3], 6 elements, and the shards hold 0" in said


def test_boxes_that_fit_together_without_being_a_grid_are_taken_as_they_are() -> None:
    manifest = whole_tensors([(3, 3)])
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    rows = [
        {"tensor": 0, "rank": i, "starts": starts, "sizes": sizes, "dtype": "int16"}
        for i, (starts, sizes) in enumerate(boxes)
    ]
    plan = make_plan(manifest, shards_of(rows, 2), wanting_all(manifest, 1))
    assert sorted(plan.for_worker(0).origins.rank.tolist()) == [0, 1, 2, 3, 4]


def test_a_box_of_part_of_them_finds_every_piece_it_meets_where_no_dimension_has_them_in_order() -> None:
    boxes = [((0, 0), (3, 1)), ((0, 1), (1, 2)), ((1, 1), (2, 2))]  # by start: ends 3, 1, 3
    rows = [
        {"tensor": 0, "rank": i, "starts": starts, "sizes": sizes, "dtype": "int16"}
        for i, (starts, sizes) in enumerate(boxes)
    ]
    row = {"tensor": 0, "parameter": 0, "starts": (2, 0), "sizes": (1, 3), "offset": 0, "strides": (3, 1)}
    last = destinations_by_hand([{**row, "dtype": "int16"}], 2)
    fleet = Fleet((last,), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32))
    plan = make_plan(whole_tensors([(3, 3)]), shards_of(rows, 2), fleet)
    assert sorted(plan.for_worker(0).origins.rank.tolist()) == [0, 2]


def test_a_tensor_whose_shards_overlap_in_too_many_ways_is_refused_by_name() -> None:
    manifest = whole_tensors([(9000,)])
    rows = [{"tensor": 0, "rank": 0, "starts": (i,), "sizes": (2,), "dtype": "int16"} for i in range(8000)]
    with pytest.raises(UnsupportedError, match="t0 overlap") as caught:
        make_plan(manifest, shards_of(rows, 1), wanting_all(manifest, 1))
    assert caught.value.tensor == "t0"


def test_a_tensor_that_would_be_cut_into_too_many_pieces_is_refused_by_name() -> None:
    manifest = whole_tensors([(300, 300)])
    strips = [((i, 0), (1, 300)) for i in range(300)] + [((0, i), (300, 1)) for i in range(300)]
    rows = [{"tensor": 0, "rank": 0, "starts": starts, "sizes": sizes, "dtype": "int16"} for starts, sizes in strips]
    with pytest.raises(UnsupportedError, match="the limit is 65,536"):
        make_plan(manifest, shards_of(rows, 2), wanting_all(manifest, 1))


def test_shards_that_contradict_the_manifest_are_refused_by_name() -> None:
    manifest = whole_tensors([(4, 2), (4, 2)])
    fleet = wanting_all(manifest, 1)
    good = {"tensor": 0, "rank": 0, "starts": (0, 0), "sizes": (4, 2), "dtype": "int16"}
    outside = {**good, "tensor": 1, "rank": 5, "starts": (2, 0), "sizes": (3, 2)}
    with pytest.raises(ManifestError, match=r"rank 5 .* \[2:5, 0:2\] of t1"):
        make_plan(manifest, shards_of([good, outside], 2), fleet)
    with pytest.raises(ManifestError, match=r"t0 is int16 on trainer rank 0 but int32 on trainer rank 1"):
        make_plan(manifest, shards_of([good, {**good, "rank": 1, "dtype": "int32"}], 2), fleet)
    with pytest.raises(ManifestError, match="shard is of tensor 2, the manifest has 2"):
        make_plan(manifest, shards_of([{**good, "tensor": 2}], 2), fleet)


def test_a_destination_outside_its_tensor_is_refused_by_name() -> None:
    manifest = whole_tensors([(4,)])
    fleet = wanting_all(whole_tensors([(5,)]), 1)
    with pytest.raises(ManifestError, match="outside of t0"):
        make_plan(manifest, held_whole(manifest, [[0]]), fleet)


def test_columns_of_the_wrong_form_are_refused_when_they_are_made() -> None:
    shards = held_whole(whole_tensors([(4,)]), [[0]])
    with pytest.raises(ValueError, match=r"Shards.offset is int32\[1\]"):
        dataclasses.replace(shards, offset=shards.offset.astype(np.int32))
    with pytest.raises(ValueError, match=r"Shards.strides is int64\[1, 2\]"):
        dataclasses.replace(shards, strides=np.zeros((1, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="not one of the 0"):
        Fleet((), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32))


def test_a_scalar_is_one_element_and_an_empty_tensor_has_no_route() -> None:
    manifest = whole_tensors([(), (0, 3)])
    plan = make_plan(manifest, held_whole(manifest, [[1], [0]]), wanting_all(manifest, 2))
    assert plan.routes == 2
    assert plan.for_worker(1).targets.sizes.tolist() == [[1, 1]]
    assert plan.sender_bytes.tolist() == [0, 4]


def test_a_fleet_without_workers_has_a_plan_without_routes() -> None:
    manifest = whole_tensors([(4,)])
    nobody = Fleet((), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
    plan = make_plan(manifest, held_whole(manifest, [[0]]), nobody)
    assert (plan.routes, plan.worker_bytes.tolist(), plan.sender_bytes.tolist()) == (0, [], [0])
    assert plan.hash


def test_explain_says_who_holds_a_tensor_and_who_reads_what_from_whom() -> None:
    manifest = whole_tensors([(4, 2), (6,)])
    rows = [
        {"tensor": 0, "rank": rank, "starts": (2 * (rank % 2), 0), "sizes": (2, 2), "dtype": "int16"}
        for rank in range(4)
    ]
    plan = make_plan(manifest, shards_of(rows, 2), dataclasses.replace(wanting_all(whole_tensors([(4, 2)]), 2)))
    said = plan.explain("t0")
    assert "t0 int16[4, 2]: held in 2 pieces" in said
    assert "[0:2, 0:2] int16 on trainer ranks 0, 2" in said
    assert said.count("worker ") == 4
    assert "no worker wants it and no trainer rank holds it" in plan.explain("t1")
    assert plan.hash in plan.explain()
    with pytest.raises(ManifestError, match="t9 is no tensor of this plan"):
        plan.explain("t9")
    assert padded((1,), 2, 0) == [1, 0]
    assert dtype_codes(["int16"]).dtype == np.int16


def test_explain_names_the_parameter_of_each_workers_own_trace() -> None:
    manifest = whole_tensors([(4, 2), (6,)])
    one = wanting_all(manifest, 1)
    (trace,) = one.traces
    fleet = Fleet(
        (trace, trace), np.array([1, 0], np.int32), np.array([0, 0], np.int32), (("a.x", "a.y"), ("b.x", "b.y"))
    )
    plan = make_plan(manifest, held_whole(manifest, [[0], [1]]), fleet)
    assert "worker 0 reads [0:6] from trainer rank 1 into b.y" in plan.explain("t1")
    assert "worker 1 reads [0:4, 0:2] from trainer rank 0 into a.x" in plan.explain("t0")
    assert "parameter" not in plan.explain("t1")
    unnamed = dataclasses.replace(fleet, parameters=())
    assert make_plan(manifest, held_whole(manifest, [[0], [1]]), unnamed).hash == plan.hash
    with pytest.raises(ValueError, match="2 traces have 1 lists"):
        dataclasses.replace(fleet, parameters=(("a.x",),))
