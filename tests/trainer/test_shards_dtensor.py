"""DTensors on real meshes: all ranks' shards together are the whole tensors, bit for bit, and so is what they gather.

It knows which cases there are and what is right; it must not know how a rank makes one (`shard_ranks`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankcast.manifest import Manifest
from rankcast.trainer.sources import RankShards
from rankcast.trainer.sources.dtensor import _boxes, _taken
from trainer.shard_ranks import Ranks, expected, layouts
from trainer.shard_reading import assembled, bits


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, lasting_processes: set[int]) -> Iterator[Callable[[int], Ranks]]:
    """The ranks of a size, started when they are first asked for."""
    every: dict[int, Ranks] = {}

    def start(size: int) -> Ranks:
        if size not in every:
            every[size] = Ranks(size, tmp_path_factory.mktemp("ranks"))
            lasting_processes.update(process.pid for process in every[size].processes)
        return every[size]

    yield start
    for ranks in every.values():
        ranks.stop()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, started: Callable[[int], Ranks]) -> Ranks:
    return started(request.param)


def written(ranks: Ranks, case: str) -> list[tuple[Manifest, RankShards, dict[str, bytes]]]:
    kind = tuple[Manifest, RankShards, dict[str, bytes]]
    return [
        msgspec.msgpack.decode((ranks.folder / f"{case}.{rank}").read_bytes(), type=kind) for rank in range(ranks.size)
    ]


def check(ranks: Ranks, case: str, full: dict[str, np.ndarray]) -> list[RankShards]:
    """Every rank's manifest and gathered tensors are the whole ones, and so are all shards together."""
    every = written(ranks, case)
    for manifest, _, read in every:
        assert dict(zip(manifest.names, manifest.shapes, strict=True)) == {n: a.shape for n, a in full.items()}
        assert list(read) == list(manifest.names)
        assert read == {name: array.tobytes() for name, array in full.items()}
    found = assembled((manifest, rows) for manifest, rows, _ in every)
    assert found.keys() == full.keys()
    for name, array in full.items():
        assert np.array_equal(found[name], array), name
    return [rows for _, rows, _ in every]


BOTH = pytest.mark.parametrize("ranks", [2, 4], indirect=True)
PLAIN = ["rows", "columns", "replicas"]
GRIDS = [
    "replicated rows",
    "rows of replicas",
    "rows and columns",
    "columns and rows",
    "rows twice",
    "rows strided",
    "strided by three",
    "columns strided",
]


def test_the_cases_are_all_there_are() -> None:
    assert list(layouts(4)) == PLAIN + GRIDS


ALL = [(2, "rows"), (2, "columns"), *((4, case) for case in PLAIN + GRIDS)]


@pytest.mark.parametrize(
    ("ranks", "case"),
    [*ALL, *((size, f"packed {case}") for size, case in ALL)],
    indirect=["ranks"],
)
def test_all_shards_together_are_the_whole_tensors(ranks: Ranks, case: str) -> None:
    answers = ranks.run(case)
    full = {name: bits(tensor) for name, tensor in expected(case).items()}
    shards = check(ranks, case, full)
    assert all(not answer["staged"] for answer in answers)
    # What every rank holds whole can be looked at before a push; what must be gathered cannot.
    assert all(answer["stable"] == (case.removeprefix("packed ") == "replicas") for answer in answers)
    if case == "rows":
        elements = sum(int(np.prod(size)) for rows in shards for size in rows.sizes)
        assert elements == sum(array.size for array in full.values())


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, "fully_shard"),
        (2, "fully_shard by columns"),
        (4, "fully_shard"),
        (4, "fully_shard with replicas"),
        (4, "fully_shard over tp"),
    ],
    indirect=["ranks"],
)
def test_fully_shard_exports_what_each_rank_holds(ranks: Ranks, case: str) -> None:
    ranks.run(case)
    check(ranks, case, {name: array.view(np.uint32) for name, array in np.load(ranks.folder / f"{case}.npz").items()})


@BOTH
def test_a_rank_outside_a_mesh_holds_nothing_of_it(ranks: Ranks) -> None:
    ranks.run("half")
    every = written(ranks, "half")
    full = {name: bits(tensor) for name, tensor in expected("half").items()}
    for rank, (manifest, rows, _) in enumerate(every):
        assert (set(manifest.names) == {"own"}) == (rank >= ranks.size // 2)
        assert (len(rows) == 1) == (rank >= ranks.size // 2)
    found = assembled((manifest, rows) for manifest, rows, _ in every)
    assert all(np.array_equal(found[name], array) for name, array in full.items())


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_training_goes_on_over_exported_shards_and_shows_in_them(ranks: Ranks) -> None:
    for answer in ranks.run("trained"):
        assert answer["same"]
        assert answer["moved"] == 1
        assert answer["renewed"] == 0
        assert answer["versions"] == 2
    full = {name: array.view(np.uint32) for name, array in np.load(ranks.folder / "trained.npz").items()}
    check(ranks, "trained", full)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_what_fully_shard_has_gathered_is_refused_with_the_cure(ranks: Ranks) -> None:
    for answer in ranks.run("gathered"):
        assert "reshard()" in answer["said"]
        assert answer["after"]


def chunked(indices: list[int], split: int, count: int, rank: int) -> list[int]:
    """What torch.chunk gives, by torch.chunk."""

    def chunk(values: torch.Tensor, into: int) -> list[torch.Tensor]:
        pieces = list(torch.chunk(values, into)) if len(values) else []
        return pieces + [values[:0]] * (into - len(pieces))

    outer = chunk(torch.tensor(indices, dtype=torch.int64), split)
    return torch.cat([chunk(piece, count)[rank] for piece in outer]).tolist()


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), max_size=3),
)
def test_runs_are_what_chunking_gives_in_any_nesting(total: int, steps: list[tuple[int, int, int]]) -> None:
    indices, runs = list(range(total)), [(0, total)]
    for split, count, rank in steps:
        indices = chunked(indices, split, count, rank % count)
        runs = _taken(runs, split, count, rank % count)
    assert [at for start, size in runs for at in range(start, start + size)] == indices
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs))
    whole = np.arange(total * 3).reshape(total, 3)
    local = whole[indices]
    for box, there in _boxes([runs, [(0, 3)]]):
        ours = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        theirs = tuple(slice(o, o + n) for o, n in zip(there.offsets, there.sizes, strict=True))
        assert np.array_equal(whole[ours], local[theirs])
