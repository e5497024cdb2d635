"""``check="digest"`` with several trainer ranks: replicas that differ are refused on every rank before anything is
written, whichever way they would have gone; without it nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import rankcast
from checkpoints import bits_of, tiny_config
from direct.origins import Named, laid_out, put
from direct.ranks import Ranks, ranks
from fleets_inprocess import Fleet, WatchedClient
from oracle import unique_weights
from rankcast import Declared, DeclaredSource, ModuleSource
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout
from rankcast.rollout.installer import LoaderInstaller
from rankcast.trainer import digests, replicas, staging

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=64, num_experts=4, vocab_size=300)
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
SHAPES = {name: bits.shape for name, bits in unique_weights(CONFIG, 0).items()}
LARGE, SMALL, EXPERT = "lm_head.weight", "model.norm.weight", "model.layers.0.mlp.experts.3.down_proj.weight"
SIZE = 3


def modules(count: int = SIZE, kind: str = "separate") -> list[Named]:
    return [Named(laid_out(kind, SHAPES, torch.float32)) for _ in range(count)]


def become(held: list[Named], step: int) -> Any:
    weights = unique_weights(CONFIG, step)
    for module in held:
        own = dict(module.named_parameters())
        for name, bits in weights.items():
            put(own[name], bits)
    return weights


def whole(rank: int, module: Named) -> Any:
    return ModuleSource(module)


def declared(rank: int, module: Named) -> Any:
    return DeclaredSource([Declared(name, tuple(p.shape), p) for name, p in module.named_parameters()])


def boxes(rank: int, module: Named) -> Any:
    """Rank 0 has all; each of the others has the upper half of every tensor and nothing else."""
    found = []
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        stop = shape[0] if rank == 0 else shape[0] // 2
        box = [(0, stop), *((0, size) for size in shape[1:])]
        found.append(Declared(name, shape, parameter[:stop], box))
    return DeclaredSource(found)


def stream(rank: int, module: Named) -> Any:
    return lambda: iter([(name, p.detach()) for name, p in module.named_parameters()])


def spoil(module: Named, name: str) -> None:
    """One bit of the first element."""
    parameter = module.get_parameter(name).detach()
    parameter[(slice(0, 1),) * parameter.dim()].view(torch.int32).bitwise_xor_(1)


def refused_everywhere(trainer: Ranks, version: str) -> list[rankcast.RankcastError]:
    def push(rank: int) -> rankcast.RankcastError:
        with pytest.raises(rankcast.RankcastError) as failure:
            trainer.syncs[rank].push(version)
        return failure.value

    errors: list[rankcast.RankcastError] = trainer.all(push)
    return errors


CASES = [
    pytest.param("direct", whole, "separate", id="direct"),
    pytest.param("direct", boxes, "separate", id="boxes"),
    pytest.param("auto", whole, "one storage", id="auto"),
    pytest.param("ranklocal", whole, "separate", id="ranklocal"),
    pytest.param("ranklocal", whole, "transposed", id="ranklocal transposed"),
    pytest.param("ranklocal", declared, "strided", id="ranklocal declared"),
    pytest.param("broadcast", whole, "separate", id="broadcast"),
]


@pytest.mark.parametrize(("odd", "name"), [(0, LARGE), (1, SMALL), (2, EXPERT)])
@pytest.mark.parametrize(("mode", "source", "kind"), CASES)
def test_a_replica_that_differs_is_refused_on_every_rank_naming_tensor_ranks_and_digests(
    mode: str, source: Callable[[int, Named], Any], kind: str, odd: int, name: str
) -> None:
    held = modules(kind=kind)
    old = become(held, 1)
    with Fleet(CONFIG, LAYOUT) as fleet:
        client = WatchedClient(fleet.receivers)
        sources = [source(rank, module) for rank, module in enumerate(held)]
        with ranks(client, sources, mode=mode, bucket_bytes=2**16, check="digest") as trainer:
            trainer.push("1")
            before = fleet.bits()
            new = become(held, 2)
            spoil(held[odd], name)
            client.log.clear()
            for error in refused_everywhere(trainer, "2"):
                assert type(error) is rankcast.DigestError
                assert error.tensor == name
                said = str(error)
                assert name in said
                assert f"on trainer rank {odd}" in said
                others = [str(rank) for rank in range(SIZE) if rank != odd]
                assert f"on trainer ranks {', '.join(others)}" in said
                found = [word for word in said.replace(".", " ").split() if len(word) == 16 and int(word, 16)]
                assert len(set(found)) == 2
            assert ("engine", "install") not in client.log
            assert fleet.changed(before) == []
            assert fleet.differences(old) == []
            assert (fleet.servable, fleet.versions) == ([True] * LAYOUT.workers, {"1"})
            spoil(held[odd], name)
            trainer.push("3")
            assert fleet.differences(new) == []


class Computing(LoaderInstaller):
    """Its loader computes with one tensor, which is staged for that; all others go direct."""

    def __init__(self, model: ReferenceModel) -> None:
        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
            return model.load_weights((name, tensor + 0 if name == SMALL else tensor) for name, tensor in weights)

        super().__init__(model, load)


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_in_auto_what_is_staged_is_compared_as_well_as_what_goes_direct(name: str) -> None:
    held = modules()
    old = become(held, 1)
    with Fleet(CONFIG, LAYOUT, installer=lambda rank, model: Computing(model)) as fleet:
        client = WatchedClient(fleet.receivers)
        with ranks(client, [ModuleSource(m) for m in held], check="digest") as trainer:
            report = trainer.push("1")[0]
            assert report.direct_tensors == report.tensors - 1
            become(held, 2)
            spoil(held[1], name)
            client.log.clear()
            errors = refused_everywhere(trainer, "2")
            assert {(type(error), error.tensor) for error in errors} == {(rankcast.DigestError, name)}
            assert ("engine", "install") not in client.log
        assert fleet.differences(old) == []


def test_the_ranks_that_differ_are_told_from_those_that_agree_and_all_tensors_are_counted() -> None:
    held = modules(4)
    become(held, 1)
    for rank in (1, 3):
        spoil(held[rank], LARGE)
        spoil(held[rank], SMALL)
    with Fleet(CONFIG, LAYOUT) as fleet:
        with ranks(fleet.receivers, [ModuleSource(m) for m in held], mode="direct", check="digest") as trainer:
            for error in refused_everywhere(trainer, "1"):
                assert "on trainer ranks 0, 2 and" in str(error)
                assert "on trainer ranks 1, 3 (2 tensors differ so)" in str(error)
        assert fleet.servable == [True] * LAYOUT.workers


def test_of_boxes_that_overlap_the_part_is_named_that_both_ranks_hold() -> None:
    held = modules()
    become(held, 1)
    rows, columns = SHAPES[LARGE]
    spoil(held[2], LARGE)
    with Fleet(CONFIG, LAYOUT) as fleet:
        sources = [boxes(rank, module) for rank, module in enumerate(held)]
        with ranks(fleet.receivers, sources, mode="direct", check="digest") as trainer:
            for error in refused_everywhere(trainer, "1"):
                assert f"[0:{rows // 2}, 0:{columns}] of {LARGE} float32" in str(error)
            become(held, 1)
            # What only one rank holds has nothing to differ from.
            held[0].get_parameter(LARGE).data[-1] += 1
            held[1].get_parameter(LARGE).data[-1] += 2
            trainer.push("2")


def test_replicas_that_a_function_yields_are_compared_in_the_round_that_they_come_with() -> None:
    held = modules()
    weights = become(held, 1)
    first = next(iter(SHAPES))
    with Fleet(CONFIG, LAYOUT) as fleet:
        client = WatchedClient(fleet.receivers)
        sources = [stream(rank, module) for rank, module in enumerate(held)]
        with ranks(client, sources, bucket_bytes=2**13, check="digest") as trainer:
            assert trainer.push("1")[0].rounds > 2
            assert fleet.differences(weights) == []
            spoil(held[1], first)
            client.log.clear()
            errors = refused_everywhere(trainer, "2")
            assert {(type(error), error.tensor) for error in errors} == {(rankcast.DigestError, first)}
            assert ("engine", "install") not in client.log
            assert fleet.differences(weights) == []
            spoil(held[1], first)
            spoil(held[2], LARGE)
            errors = refused_everywhere(trainer, "3")
            assert {(type(error), error.tensor) for error in errors} == {(rankcast.DigestError, LARGE)}
            assert "3" not in fleet.versions
            spoil(held[2], LARGE)
            trainer.push("4")
            assert fleet.differences(weights) == []


def test_a_module_and_a_function_that_hold_the_same_tensors_are_compared_with_each_other() -> None:
    held = modules(2)
    become(held, 1)
    with Fleet(CONFIG, LAYOUT) as fleet:
        sources = [whole(0, held[0]), stream(1, held[1])]
        with ranks(fleet.receivers, sources, mode="ranklocal", check="digest") as trainer:
            trainer.push("1")
            spoil(held[1], EXPERT)
            assert {error.tensor for error in refused_everywhere(trainer, "2")} == {EXPERT}


@pytest.mark.parametrize("mode", ["direct", "ranklocal"])
def test_without_digests_nobody_compares_and_nothing_is_read_for_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: Any, **__: Any) -> int:
        raise AssertionError("digested")

    for module in (digests, staging):
        monkeypatch.setattr(module, "digest", unexpected)
    monkeypatch.setattr(replicas.Replicas, "compare", unexpected)
    held = modules(2)
    become(held, 1)
    spoil(held[1], SMALL)
    with Fleet(CONFIG, LAYOUT) as fleet:
        with ranks(fleet.receivers, [ModuleSource(m) for m in held], mode=mode) as trainer:
            trainer.push("1")
        assert fleet.versions == {"1"}


def test_a_tensor_that_takes_other_ranks_to_be_whole_is_no_replica() -> None:
    held = modules(2)
    weights = become(held, 1)
    for module in held[1:]:
        spoil(module, SMALL)
    others = {**weights, SMALL: bits_of(held[1].get_parameter(SMALL).detach())}

    class Gathering(rankcast.WeightSource):
        """Says of every tensor that the other ranks have to help."""

        def __init__(self, module: Named) -> None:
            self._inner = ModuleSource(module)

        def manifest(self) -> Any:
            return self._inner.manifest()

        def read(self) -> Iterator[rankcast.Weight]:
            for weight in self._inner.read():
                yield rankcast.Weight(weight.meta, weight.fill, gather=lambda: None)

    with Fleet(CONFIG, LAYOUT) as fleet:
        with ranks(fleet.receivers, [Gathering(m) for m in held], check="digest") as trainer:
            trainer.push("1")
        # One of them was sent, and nobody was asked whether they are equal: rank 0's or the others', to all workers.
        assert (fleet.differences(weights) == []) != (fleet.differences(others) == [])
        assert fleet.versions == {"1"}


class Checking(ModuleSource):
    """Looks at what it hands over, and finds it ``wrong``."""

    wrong = False

    def read(self) -> Iterator[rankcast.Weight]:
        if self.wrong:
            raise rankcast.DigestError("my own checksum says no")
        yield from super().read()


def test_a_digest_error_of_one_ranks_source_reaches_the_other_ranks_like_any_other_error() -> None:
    held = modules(2)
    checking = Checking(held[1])
    with Fleet(CONFIG, LAYOUT) as fleet:
        with ranks(fleet.receivers, [ModuleSource(held[0]), checking], mode="ranklocal") as trainer:
            checking.wrong = True
            other, own = refused_everywhere(trainer, "1")
            assert "my own checksum says no" in str(own)
            assert isinstance(other, rankcast.TrainerError)
            assert "trainer rank 1" in str(other)
            assert "my own checksum says no" in str(other)


def test_after_a_rank_ended_before_it_heard_what_to_digest_the_next_push_is_a_first_try() -> None:
    held = modules(2)
    with Fleet(CONFIG, LAYOUT) as fleet:
        with ranks(fleet.receivers, [ModuleSource(m) for m in held], mode="direct", check="digest") as trainer:
            become(held, 1)
            checking = trainer.syncs[1]._checking
            assert checking is not None
            with mock.patch.object(checking, "take_shards", side_effect=rankcast.SourceError("interrupted")):
                for error in refused_everywhere(trainer, "1"):
                    assert "interrupted" in str(error)
            for step in (2, 3):
                weights = become(held, step)
                trainer.push(str(step))
                assert fleet.differences(weights) == []
