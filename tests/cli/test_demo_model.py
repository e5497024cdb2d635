"""The demo's trainer: sharded over ranks it must be the model that one rank would train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import bits_of, scaled_weights, tiny_config, write_checkpoint
from cli.demo_trainers import on_ranks
from oracle import checkpoint_shapes
from rankcast.cli.demo.expert_sum import Reduce, alone, copied_to_ranks, summed_over_ranks
from rankcast.cli.demo.trainer import Trainer

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("demo"), CONFIG, scaled_weights(CONFIG, seed=3))


def named(trainers: list[Trainer]) -> dict[str, torch.nn.Parameter]:
    return {name: value for trainer in trainers for name, value in trainer.model.named_parameters()}


def backward(trainer: Trainer, tokens: torch.Tensor) -> float:
    loss = trainer.model.loss(tokens)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_ranks_together_hold_the_checkpoint_and_only_experts_once(checkpoint: Path, ranks: int) -> None:
    trainers = [Trainer(checkpoint, rank=rank, ranks=ranks, reduce=alone) for rank in range(ranks)]
    shapes = checkpoint_shapes(CONFIG)
    assert {name: tuple(value.shape) for name, value in named(trainers).items()} == shapes
    for name in shapes:
        holders = sum(name in dict(trainer.model.named_parameters()) for trainer in trainers)
        assert holders == (1 if ".experts." in name else ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_those_of_one_rank(checkpoint: Path, ranks: int) -> None:
    tokens = torch.randint(CONFIG["vocab_size"], (3, 9), generator=torch.Generator().manual_seed(0))
    whole = Trainer(checkpoint, reduce=alone)
    expected_loss = backward(whole, tokens)

    def work(rank: int, reduce: Reduce) -> tuple[Trainer, float]:
        trainer = Trainer(checkpoint, rank=rank, ranks=ranks, reduce=reduce)
        return trainer, backward(trainer, tokens)

    found = on_ranks(ranks, work)
    for _, loss in found:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
    for trainer, _ in found:
        for name, parameter in trainer.model.named_parameters():
            expected = whole.model.get_parameter(name).grad
            assert expected is not None
            assert parameter.grad is not None
            torch.testing.assert_close(
                parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text
            )
    router = whole.model.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert router is not None
    assert router.abs().max() > 1e-4, "no gradient reaches the router: nothing of its sum was checked"


def test_what_every_rank_holds_stays_equal_bit_for_bit_over_steps(checkpoint: Path) -> None:
    def work(rank: int, reduce: Reduce) -> tuple[Trainer, list[float]]:
        trainer = Trainer(checkpoint, rank=rank, ranks=2, reduce=reduce)
        return trainer, [trainer.step() for _ in range(4)]

    (first, losses), (second, same) = on_ranks(2, work)
    assert losses == same
    assert losses[-1] < losses[0]
    others = dict(second.model.named_parameters())
    shared = [name for name, _ in first.model.named_parameters() if name in others]
    assert len(shared) == len([name for name in checkpoint_shapes(CONFIG) if ".experts." not in name])
    for name in shared:
        assert (bits_of(first.model.get_parameter(name)) == bits_of(others[name])).all(), name


def test_a_step_moves_every_tensor(checkpoint: Path) -> None:
    trainer = Trainer(checkpoint, reduce=alone)
    before = {name: bits_of(value) for name, value in trainer.model.named_parameters()}
    trainer.step()
    still = [name for name, value in trainer.model.named_parameters() if (bits_of(value) == before[name]).all()]
    assert still == []


def test_a_rank_whose_experts_get_no_token_still_takes_part_in_every_sum(tmp_path: Path) -> None:
    config = tiny_config(num_experts=4, num_experts_per_tok=1)
    checkpoint = write_checkpoint(tmp_path, config, scaled_weights(config))

    def work(rank: int, reduce: Reduce) -> dict[str, float]:
        trainer = Trainer(checkpoint, rank=rank, ranks=2, reduce=reduce)
        with torch.no_grad():
            for name, value in trainer.model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    value.zero_()  # equal scores: one and the same expert gets every token
        backward(trainer, torch.arange(8)[None])
        return {
            name: 0.0 if value.grad is None else value.grad.abs().max().item()
            for name, value in trainer.model.named_parameters()
            if ".experts." in name
        }

    largest = {name: found for gradients in on_ranks(2, work) for name, found in gradients.items()}
    assert len(largest) == 4 * 3 * config["num_hidden_layers"]
    assert len({name.split(".experts.")[1].split(".")[0] for name, found in largest.items() if found > 0}) == 1


def test_the_pair_of_sums_is_the_adjoint_of_itself() -> None:
    def work(rank: int, reduce: Reduce) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        used = torch.tensor([1.0, 2.0], requires_grad=True)
        unused = torch.tensor([3.0], requires_grad=True)
        one, _ = copied_to_ranks(reduce, used, unused)
        total = summed_over_ranks(reduce, one * (rank + 1))
        (total * torch.tensor([1.0, 10.0])).sum().backward()
        return total.detach(), used.grad, unused.grad

    for total, used, unused in on_ranks(2, work):
        assert total.tolist() == [3.0, 6.0]
        assert used.tolist() == [3.0, 30.0]
        assert unused.tolist() == [0.0]
