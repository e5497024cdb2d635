"""Sessions of other clients: bare entries, which carry neither header nor MAC and have no prepare before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from by_hand import ByHand, codes
from checkpoints import as_torch, tiny_config
from fleets_inprocess import Fleet
from oracle import unique_weights
from rankcast import (
    AuthenticationError,
    InstallError,
    LeaseError,
    LocationError,
    ManifestError,
    PayloadError,
    RankcastError,
    Receiver,
    StateError,
    UnsupportedError,
)
from rankcast.control.inprocess import InProcessClient
from rankcast.engines.reference.layout import Layout
from rankcast.process import ProcessIdentity, this_process
from rankcast.rollout.installer import LoaderInstaller
from rankcast.wire.bodies import Owner

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=16, num_experts=2)
OLD, NEW = (unique_weights(CONFIG, step) for step in (1, 2))


class Bare:
    """A fleet with old weights, somebody who drives it with bare entries, and new weights to send."""

    def __init__(self) -> None:
        self.fleet = Fleet(CONFIG, Layout(tp=2))
        self.fleet.load(OLD)
        self.engine = InProcessClient(self.fleet.receivers)
        self.by_hand = ByHand(self.fleet.receivers, as_torch(NEW))

    def push(self) -> None:
        """All new weights, in two entries."""
        names = list(NEW)
        self.engine.init_weight_transfer_engine({})
        self.engine.start_weight_update()
        self.engine.update_weights(self.by_hand.bare(names[:7]))
        self.engine.update_weights(self.by_hand.bare(names[7:]))
        self.engine.finish_weight_update()
        assert self.fleet.differences(NEW) == []
        assert self.fleet.servable == [True, True]

    def refused(self, kind: type[RankcastError], words: str, act: Callable[[], None]) -> None:
        """``act`` must be refused on every worker with nothing written; then a whole push must go well."""
        before = self.fleet.bits()
        with pytest.raises(RankcastError) as refusal:
            act()
        assert words in str(refusal.value)
        assert isinstance(refusal.value.__cause__, kind)
        assert self.fleet.changed(before) == []
        assert self.fleet.differences(OLD) == []
        assert self.fleet.servable == [True, True]
        self.push()


@pytest.fixture
def bare() -> Iterator[Bare]:
    made = Bare()
    yield made
    made.by_hand.segment.close()
    made.fleet.close()


def test_bare_entries_bring_every_worker_to_the_new_weights(bare: Bare) -> None:
    bare.push()


def last(entry: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**entry, name: [*entry[name][:-1], value]}


FAULTS: dict[str, tuple[type[RankcastError], str, Callable[[dict[str, Any]], Any]]] = {
    "an unknown name": (ManifestError, "nobody", lambda e: last(e, "names", "nobody")),
    "a wrong shape": (ManifestError, "[3, 5]", lambda e: last(e, "shapes", [3, 5])),
    "a wrong dtype": (ManifestError, "is int32 at the trainer", lambda e: last(e, "dtype_names", "int32")),
    "an unknown dtype": (ManifestError, "unknown dtype", lambda e: last(e, "dtype_names", "float12")),
    "a name twice": (ManifestError, "given twice", lambda e: last(e, "names", e["names"][0])),
    "uneven columns": (PayloadError, "one of each for every tensor", lambda e: {**e, "shapes": []}),
    "a location outside": (LocationError, "lie at bytes", lambda e: last(e, "locations", [0, 2**40])),
    "a location before": (LocationError, "offset -8", lambda e: last(e, "locations", [0, -8])),
    "a location between": (LocationError, "no multiple", lambda e: last(e, "locations", [0, 2])),
    "a segment that is not there": (LocationError, "lies in segment 1", lambda e: last(e, "locations", [1, 0])),
    "a segment before the first": (LocationError, "lies in segment -1", lambda e: last(e, "locations", [-1, 0])),
    "no segment": (LocationError, "0 handles", lambda e: {**e, "segments": []}),
    "a field that is not known": (PayloadError, "malformed", lambda e: {**e, "ipc_handles": []}),
    "a pickle": (PayloadError, "malformed", lambda e: {**e, "segments": ["gASV"]}),
    "a list of the wrong length": (PayloadError, "3 entries but this engine has 2", lambda e: [e] * 3),
    "a list over a collective": (
        UnsupportedError,
        "mode='broadcast'",
        lambda e: [{**e, "transport": "collective"}] * 2,
    ),
    "a list of something else": (PayloadError, "not a dict", lambda e: [None, None]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bare_entry_is_refused_by_name_before_its_first_byte(fault: str, bare: Bare) -> None:
    kind, words, change = FAULTS[fault]

    def act() -> None:
        bare.engine.start_weight_update()
        bare.engine.update_weights(change(bare.by_hand.bare()))

    bare.refused(kind, words, act)


def test_an_update_before_start_is_refused(bare: Bare) -> None:
    bare.refused(StateError, "start first", lambda: bare.engine.update_weights(bare.by_hand.bare()))


def test_starting_twice_is_refused(bare: Bare) -> None:
    def act() -> None:
        bare.engine.start_weight_update()
        bare.engine.start_weight_update()

    bare.refused(StateError, "a session is started already", act)


def test_finishing_without_start_is_refused(bare: Bare) -> None:
    bare.refused(StateError, "no session is open", lambda: bare.engine.finish_weight_update())


def test_a_tensor_given_in_two_entries_is_refused_and_the_weights_are_then_incomplete(bare: Bare) -> None:
    names = list(NEW)
    bare.engine.start_weight_update()
    bare.engine.update_weights(bare.by_hand.bare(names[:2]))
    with pytest.raises(RankcastError, match="given twice"):
        bare.engine.update_weights(bare.by_hand.bare(names[1:3]))
    bare.engine.abort()
    assert bare.fleet.servable == [False, False]
    bare.push()


def test_a_partial_update_is_never_served(bare: Bare) -> None:
    bare.engine.start_weight_update()
    bare.engine.update_weights(bare.by_hand.bare(list(NEW)[:3]))
    assert bare.fleet.servable == [False, False]
    with pytest.raises(RankcastError, match="does not fill every parameter"):
        bare.engine.finish_weight_update()
    assert bare.fleet.servable == [False, False]
    with pytest.raises(StateError, match="incomplete"):
        bare.fleet.receivers[0].update_weight_version("half")
    bare.push()


def test_an_abort_before_the_first_write_keeps_the_old_weights(bare: Bare) -> None:
    bare.engine.start_weight_update()
    bare.engine.abort()
    assert bare.fleet.differences(OLD) == []
    assert bare.fleet.servable == [True, True]
    bare.push()


@pytest.mark.parametrize("call", ["start_weight_update", "abort_weight_update"])
def test_unsigned_calls_are_refused_while_a_secret_is_set(call: str) -> None:
    receiver = Receiver(torch.nn.Linear(2, 2), secret="secret")
    with pytest.raises(AuthenticationError):
        getattr(receiver, call)()
    with pytest.raises(AuthenticationError):
        receiver.init_weight_transfer_engine({"body": "{}"})
    with pytest.raises(RankcastError):
        receiver.update_weights({"names": []})
    assert receiver.servable
    receiver.close()


def test_a_loader_that_fails_leaves_the_worker_unusable_until_a_whole_update() -> None:
    model = torch.nn.Linear(2, 2)
    fail = [True]

    def load(weights: Any) -> None:
        own = dict(model.named_parameters())
        for name, tensor in weights:
            if fail[0] and not tensor.is_meta and name == "bias":
                raise KeyError(name)
            own[name].data.copy_(tensor)

    receiver = Receiver(model, load_weights=load)
    new = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    with ByHand([receiver], new) as by_hand:
        receiver.start_weight_update()
        with pytest.raises(InstallError, match="KeyError"):
            receiver.update_weights(by_hand.bare())
        assert not receiver.servable
        assert receiver.state == "unusable"
        with pytest.raises(StateError):
            receiver.update_weights(by_hand.bare())
        with pytest.raises(StateError):
            receiver.finish_weight_update()
        fail[0] = False
        receiver.start_weight_update()
        receiver.update_weights(by_hand.bare())
        receiver.finish_weight_update("repaired")
        assert receiver.servable
        assert receiver.weight_version == "repaired"
        assert model.bias.tolist() == [1.0, 1.0]
    receiver.close()


class Fused(torch.nn.Module):
    """A model of one fused parameter, or of two that may be tied; each kind of loader looks at its call as a whole."""

    def __init__(self, **rows: int) -> None:
        super().__init__()
        for name, count in rows.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full((count, 3), -1.0)))

    def part(self, name: str) -> torch.Tensor:
        return self.get_parameter("qkv").data[2 * "qkv".index(name) :][:2]

    def ties(self, weights: Any) -> None:
        came = dict(weights)
        for name, tensor in came.items():
            self.get_parameter(name).data.copy_(tensor)
        if "head" not in came and "embed" in came:
            self.get_parameter("head").data.copy_(came["embed"])

    def clears(self, weights: Any) -> None:
        self.get_parameter("qkv").data.zero_()
        for name, tensor in weights:
            self.part(name).copy_(tensor)

    def waits(self, weights: Any) -> None:
        came = dict(weights)
        if "q" in came:
            self.part("q").copy_(came["q"])
        if {"k", "v"} <= set(came):
            self.part("k").copy_(came["k"])
            self.part("v").copy_(came["v"])


def tensors(names: Any) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), float(number + 1)) for number, name in enumerate(names)}


TOGETHER: dict[str, Any] = {
    "ties": ({"embed": 2, "head": 2}, ("embed", "head"), "head: .* is copied to twice in one session, from embed and"),
    "clears": ({"qkv": 6}, ("q", "k", "v"), "qkv: .* is filled with 0 after q came there in the same session"),
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_a_message_that_writes_over_an_earlier_one_is_refused_before_it_is_written(kind: str) -> None:
    rows, names, words = TOGETHER[kind]
    model = Fused(**rows)
    receiver = Receiver(model, load_weights=getattr(model, kind))
    with ByHand([receiver], tensors(names)) as by_hand:
        receiver.start_weight_update()
        receiver.update_weights(by_hand.bare(names[:1]))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ManifestError, match=rf"{words}.* in one update call"):
            receiver.update_weights(by_hand.bare(names[1:]))
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        receiver.abort_weight_update()
        assert not receiver.servable
        receiver.start_weight_update()
        receiver.update_weights(by_hand.bare())
        receiver.finish_weight_update("together")
        assert receiver.servable
        held = torch.cat([parameter.detach() for parameter in model.parameters()])
        assert torch.equal(held, torch.cat(list(tensors(names).values())))
    receiver.close()


def test_a_message_two_tensors_of_which_go_to_one_place_is_refused_before_it_is_written() -> None:
    model = Fused(embed=2)

    def load(weights: Any) -> None:
        for _, tensor in weights:
            model.get_parameter("embed").data.copy_(tensor)

    receiver = Receiver(model, load_weights=load)
    with ByHand([receiver], tensors(("a", "b"))) as by_hand:
        receiver.start_weight_update()
        with pytest.raises(ManifestError, match=r"embed: .* is copied to twice in one session, from a and from b"):
            receiver.update_weights(by_hand.bare())
        receiver.abort_weight_update()
        assert (receiver.servable, receiver.state) == (True, "idle")
        assert model.get_parameter("embed").unique().tolist() == [-1.0]
    receiver.close()


def test_a_loader_that_waited_for_a_partner_in_another_message_is_named_at_finish_and_nothing_is_served() -> None:
    model = Fused(qkv=6)
    receiver = Receiver(model, installer=LoaderInstaller(model, model.waits, may_ignore=lambda name: name in "kv"))
    with ByHand([receiver], tensors("qkv")) as by_hand:
        receiver.start_weight_update()
        receiver.update_weights(by_hand.bare("qk"))
        receiver.update_weights(by_hand.bare("v"))
        with pytest.raises(
            ManifestError, match=r"does not do with k in message 0 .* fill qkv\): .* in one update call"
        ):
            receiver.finish_weight_update("apart")
        assert (receiver.servable, receiver.state, receiver.weight_version) == (False, "unusable", "")
        receiver.start_weight_update()
        receiver.update_weights(by_hand.bare("q"))
        receiver.update_weights(by_hand.bare("kv"))
        receiver.finish_weight_update("together")
        assert receiver.servable
        assert torch.equal(model.get_parameter("qkv").detach(), torch.cat(list(tensors("qkv").values())))
    receiver.close()


def test_a_loader_that_puts_a_tensor_elsewhere_once_all_come_at_once_is_named_at_finish() -> None:
    model = Fused(qkv=6)
    made: list[int] = []

    def load(weights: Any) -> None:
        for name, tensor in weights:
            made.append(len(made))
            # Until it has seen four tensors, two traces and two installs, it takes k for v and v for k.
            model.part(name if len(made) > 4 or name == "q" else {"k": "v", "v": "k"}[name]).copy_(tensor)

    receiver = Receiver(model, load_weights=load)
    with ByHand([receiver], tensors("qkv")) as by_hand:
        receiver.start_weight_update()
        receiver.update_weights(by_hand.bare("k"))
        receiver.update_weights(by_hand.bare("v"))
        receiver.update_weights(by_hand.bare("q"))
        with pytest.raises(ManifestError, match=r"does not do with k in message 0 what it does when all tensors come"):
            receiver.finish_weight_update("swapped")
        assert (receiver.servable, receiver.state) == (False, "unusable")
    receiver.close()


def test_while_a_trainer_holds_the_fleet_a_bare_init_is_refused_naming_it(bare: Bare) -> None:
    bare.by_hand.open()
    with pytest.raises(RankcastError, match="the trainer made by hand holds this fleet") as refusal:
        bare.engine.init_weight_transfer_engine({})
    assert isinstance(refusal.value.__cause__, LeaseError)
    assert codes(bare.by_hand.prepare()) == [(), ()]
    for sequence in (1, 2):
        assert codes(bare.by_hand.install(sequence)) == [(), ()]
    assert codes(bare.by_hand.finish()) == [(), ()]
    assert codes(bare.by_hand.release()) == [(), ()]
    assert bare.fleet.differences(NEW) == []
    bare.push()


@pytest.mark.parametrize("started", [False, True])
def test_a_dead_trainers_lease_does_not_stand_in_the_way_of_a_bare_client(started: bool, bare: Bare) -> None:
    here = this_process()
    dead = ProcessIdentity(here.host, here.namespace, here.pid, here.start_time - 1)
    bare.by_hand.owner = Owner("d" * 32, dead, "a trainer that died")
    assert codes([*bare.by_hand.init(), *bare.by_hand.claim()]) == [()] * 4
    if started:
        assert codes(bare.by_hand.start()) == [(), ()]
    bare.push()
