"""Experts that move between two pushes, at equal shapes: no shape, dtype or stride tells, only the engine's word."""

from __future__ import annotations

import msgspec
import pytest
import torch

import rankcast
from checkpoints import bits_of, tiny_config
from direct.origins import Named, laid_out, put
from fleets_inprocess import Fleet, WatchedClient, Weights
from oracle import compare, unique_weights, worker_parameters
from rankcast import PushError
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=16, num_experts=4)
LAYOUT = Layout(tp=2, dp=1, expert_parallel=True)
SHAPES = {name: bits.shape for name, bits in unique_weights(CONFIG, 0).items()}


def exchange_experts(model: ReferenceModel) -> None:
    """Give the two experts of worker 1 each other's slots."""
    parts = model._parts
    model._parts = {
        name: msgspec.structs.replace(part, target=parts[exchanged(name)].target) for name, part in parts.items()
    }


def exchanged(name: str) -> str:
    """The name of the other expert's tensor, of those that worker 1 holds."""
    for one, other in ((".2.", ".3."), (".3.", ".2.")):
        if f".experts{one}" in name:
            return name.replace(f".experts{one}", f".experts{other}")
    return name


def differences(fleet: Fleet, weights: Weights, *, moved: bool) -> list[str]:
    """How the two workers differ from the oracle, which has the experts of worker 1 in each other's place if ``moved``.

    The oracle knows nothing of experts that move: what it is given has them exchanged.
    """
    lines = []
    for rank, model in enumerate(fleet.models):
        given = {exchanged(name): bits for name, bits in weights.items()} if moved and rank == 1 else weights
        held = {name: bits_of(parameter) for name, parameter in model.named_parameters()}
        lines += compare(worker_parameters(given, CONFIG, LAYOUT, rank), held)
    return lines


def become(module: Named, step: int) -> Weights:
    weights = unique_weights(CONFIG, step)
    own = dict(module.named_parameters())
    for name, bits in weights.items():
        put(own[name], bits)
    return weights


@pytest.mark.parametrize("mode", ["direct", "ranklocal"])
def test_a_push_after_experts_moved_is_exact_because_the_worker_is_met_and_traced_again(mode: str) -> None:
    module = Named(laid_out("one storage", SHAPES, torch.float32))
    with Fleet(CONFIG, LAYOUT) as fleet:
        client = WatchedClient(fleet.receivers)
        with rankcast.connect(client, module, mode=mode, timeout=60) as sync:
            weights = become(module, 1)
            sync.push("1")
            assert differences(fleet, weights, moved=False) == []
            exchange_experts(fleet.models[1])
            weights = become(module, 2)
            sync.push("2")
            assert differences(fleet, weights, moved=True) == []
            inits = [call for call, _ in client.payloads if call == "init"]
            assert len(inits) == 2
            # And is known from then on.
            weights = become(module, 3)
            sync.push("3")
            assert differences(fleet, weights, moved=True) == []
            assert len([call for call, _ in client.payloads if call == "init"]) == 2


def test_experts_that_move_while_a_push_begins_are_refused_by_name_and_the_next_push_is_exact() -> None:
    module = Named(laid_out("one storage", SHAPES, torch.float32))
    with Fleet(CONFIG, LAYOUT) as fleet:
        client = WatchedClient(fleet.receivers)
        with rankcast.connect(client, module, mode="direct", timeout=60) as sync:
            become(module, 1)
            sync.push("1")
            before = fleet.bits()
            client.before["prepare"] = lambda: exchange_experts(fleet.models[1])
            become(module, 2)
            with pytest.raises(
                PushError, match=r"the placement of the experts was .* and is .*: push again"
            ) as refusal:
                sync.push("2")
            assert "worker 1 of 2" in str(refusal.value)
            assert fleet.changed(before) == []
            assert fleet.servable == [True, True]
            client.before.clear()
            weights = become(module, 3)
            sync.push("3")
            assert differences(fleet, weights, moved=True) == []
