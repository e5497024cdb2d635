"""What changes between two pushes, or while one runs: storages that move, writes, parameters that are replaced, files.

Whatever happened is either taken up by the next push or refused by name; no worker ever serves a mix without a word.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch

import rankcast
from checkpoints import tiny_config, write_checkpoint
from direct.origins import Named, laid_out, put
from direct.ranks import ranks
from fleets_inprocess import Fleet, WatchedClient, opened
from oracle import unique_weights
from rankcast import PushError
from rankcast.control.inprocess import InProcessClient
from rankcast.engines.reference.layout import Layout
from rankcast.trainer.sources import ModuleSource

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=16, num_experts=4)
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
SHAPES = {name: bits.shape for name, bits in unique_weights(CONFIG, 0).items()}
#: Large enough to be shared on its own, and small enough to be packed.
LARGE = "model.embed_tokens.weight"
SMALL = "model.norm.weight"


def trained(kind: str = "one storage") -> Named:
    return Named(laid_out(kind, SHAPES, torch.float32))


def become(module: Named, step: int) -> Any:
    weights = unique_weights(CONFIG, step)
    own = dict(module.named_parameters())
    for name, bits in weights.items():
        put(own[name], bits)
    return weights


def elsewhere(tensor: torch.Tensor, room: int = 2**16) -> torch.Tensor:
    """The same values at another address, in a storage of at least ``room`` elements."""
    return torch.empty(max(room, tensor.numel())).as_strided(tensor.shape, tensor.contiguous().stride()).copy_(tensor)


class Pushing:
    """One fleet, one module, a direct sync over a client that counts what a prepare carries."""

    def __init__(self, kind: str = "one storage", **options: Any) -> None:
        self.fleet = Fleet(CONFIG, LAYOUT)
        self.client = WatchedClient(self.fleet.receivers)
        self.module = trained(kind)
        self.step = 0
        self.sync = rankcast.connect(self.client, self.module, **{"mode": "direct", "timeout": 60, **options})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync.close()
        self.fleet.close()

    def push(self) -> rankcast.PushReport:
        """Push other weights, which every worker must hold then."""
        self.step += 1
        weights = become(self.module, self.step)
        report = self.sync.push(str(self.step))
        assert self.fleet.differences(weights) == []
        assert self.fleet.versions == {str(self.step)}
        return report

    def sent_whole(self) -> bool:
        """Whether the last push had to say programs and handles again."""
        (*_, last) = [payload for call, payload in self.client.payloads if call == "prepare"]
        (whole,) = {opened(entry)["program"] is not None for entry in last["entries"].values()}
        return whole


@pytest.mark.parametrize("kind", ["one storage", "separate"])
def test_a_second_push_says_nothing_again_and_a_storage_that_moved_makes_the_third_do_so(kind: str) -> None:
    with Pushing(kind) as pushing:
        pushing.push()
        assert pushing.sent_whole()
        hash_before = pushing.sync.plan.hash if pushing.sync.plan else ""
        pushing.push()
        assert not pushing.sent_whole()
        parameter = pushing.module.get_parameter(LARGE)
        parameter.data = elsewhere(parameter.data)
        pushing.push()
        assert pushing.sent_whole()
        assert parameter.is_shared()
        pushing.push()
        assert not pushing.sent_whole()
        assert pushing.sync.plan is not None
        assert pushing.sync.plan.hash != hash_before


def test_the_plan_of_a_sync_explains_into_which_parameter_a_tensor_goes() -> None:
    with Pushing() as pushing:
        assert pushing.sync.plan is not None
        said = pushing.sync.plan.explain("model.layers.0.self_attn.k_proj.weight")
        assert said.count("into model.layers.0.self_attn.qkv_proj.weight") == LAYOUT.workers


def test_every_storage_may_move_at_every_push() -> None:
    with Pushing("transposed") as pushing:
        for room in (2**16, 1, 2**14, 2**16):  # of one element: small ones are packed from then on
            for parameter in pushing.module.parameters():
                parameter.data = elsewhere(parameter.data, room)
            pushing.push()


def test_the_optimizer_goes_on_over_what_moved_into_shared_memory() -> None:
    trainer = torch.nn.Linear(300, 200)
    reference = torch.nn.Linear(300, 200)
    reference.load_state_dict(trainer.state_dict())
    served = torch.nn.Linear(300, 200)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (trainer, reference)]
    with rankcast.connect(rankcast.Receiver(served), trainer, mode="direct", timeout=60) as sync:
        for step in range(5):
            for model, optimizer in zip((trainer, reference), optimizers, strict=True):
                batch = torch.randn(8, 300, generator=torch.Generator().manual_seed(step))
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            sync.push(str(step))
            for name, tensor in reference.state_dict().items():
                assert torch.equal(tensor.view(torch.int32), served.state_dict()[name].view(torch.int32))


@pytest.mark.parametrize("call", ["prepare", "install", "install answered"])
@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_a_write_during_a_push_is_caught_and_the_next_push_repairs(call: str, name: str) -> None:
    with Pushing() as pushing:
        first = pushing.push()
        parameter = pushing.module.get_parameter(name)

        def write() -> None:
            pushing.client.before.clear()
            with torch.no_grad():
                parameter.add_(1)

        if call == "install answered":
            update = pushing.client.update_weights

            def update_then_write(payload: Any) -> None:
                update(payload)
                if pushing.client.log[-1] == ("engine", "install answered"):
                    write()

            pushing.client.update_weights = update_then_write  # type: ignore[method-assign]
        else:
            pushing.client.before[call] = write
        become(pushing.module, 7)
        with pytest.raises(PushError, match=r"changed its weights, or the files .* being read") as failure:
            pushing.sync.push("seven")
        # Before the first byte is read nobody has lost anything yet.
        spared = call == "prepare"
        assert ("unusable" in str(failure.value)) == (not spared)
        assert pushing.fleet.servable == [spared] * LAYOUT.workers
        assert "seven" not in pushing.fleet.versions
        assert pushing.client.paused == (not spared)
        if call == "install answered":
            pushing.client.update_weights = update  # type: ignore[method-assign]
        report = pushing.push()
        assert pushing.fleet.servable == [True] * LAYOUT.workers
        assert not pushing.client.paused
        assert report.worker_calls == first.worker_calls


def test_a_write_while_the_other_ranks_are_waited_for_is_caught_although_small_tensors_were_packed_before() -> None:
    with Pushing() as pushing:
        pushing.push()
        group = pushing.sync._group
        exchange = group.exchange

        def exchange_then_write(data: bytes, what: str) -> list[bytes]:
            said = exchange(data, what)
            if what == "where shards lie":
                with torch.no_grad():
                    for name in (LARGE, SMALL):
                        pushing.module.get_parameter(name).add_(1)
            return said

        before = pushing.fleet.bits()
        group.exchange = exchange_then_write  # type: ignore[method-assign]
        with pytest.raises(PushError, match="changed its weights"):
            pushing.sync.push("two")
        assert pushing.fleet.changed(before) == []
        group.exchange = exchange  # type: ignore[method-assign]
        pushing.push()


@pytest.mark.parametrize("lying", ["staged", "shared"])
@pytest.mark.parametrize("mode", ["ranklocal", "broadcast"])
def test_a_write_after_the_first_install_is_caught_in_every_mode(mode: str, lying: str) -> None:
    trained, served = (torch.nn.Sequential(*(torch.nn.Linear(300, 200, bias=False) for _ in "12")) for _ in "12")
    if lying == "shared":
        trained.share_memory()
    receiver = rankcast.Receiver(served)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.fill_(1)

    class Writing(InProcessClient):
        writes = True

        def update_weights(self, payload: Any) -> None:
            super().update_weights(payload)
            if self.writes and receiver.state in ("installing", "installed"):
                with torch.no_grad():
                    trained[1].weight.fill_(2)

    client = Writing([receiver])
    with rankcast.connect(client, trained, mode=mode, bucket_bytes=240_000, timeout=20) as sync:
        with pytest.raises(PushError, match="changed its weights"):
            sync.push("1")
        assert not receiver.servable
        client.writes = False
        sync.push("2")
        assert [parameter.detach().unique().tolist() for parameter in served.parameters()] == [[1.0], [2.0]]


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_a_write_is_named_where_torch_counts_it_apart(name: str) -> None:
    with Pushing("separate") as pushing:

        def write() -> None:
            with torch.no_grad():
                pushing.module.get_parameter(name).add_(1)

        pushing.client.before["prepare"] = write
        with pytest.raises(PushError, match="changed its weights") as failure:
            pushing.sync.push("1")
        assert f"being read: {name} (1 in all)" in str(failure.value)
        assert failure.value.tensor == name


def test_a_write_on_any_trainer_rank_ends_the_push_on_all() -> None:
    modules = [trained() for _ in range(3)]
    with Fleet(CONFIG, LAYOUT) as fleet:
        client = WatchedClient(fleet.receivers)
        with ranks(client, [ModuleSource(module) for module in modules], mode="direct") as trainer:
            for module in modules:
                weights = become(module, 1)
            trainer.push("1")
            assert fleet.differences(weights) == []

            def write() -> None:
                with torch.no_grad():
                    modules[2].get_parameter(SMALL).zero_()

            client.before["install"] = write
            failed: list[str] = []

            def push(rank: int) -> None:
                with pytest.raises(rankcast.RankcastError) as failure:
                    trainer.syncs[rank].push("2")
                failed.append(str(failure.value))

            trainer.all(push)
            assert len(failed) == 3
            assert all("trainer rank 2" in said and "changed its weights" in said for said in failed)
            assert fleet.servable == [False] * LAYOUT.workers
            client.before.clear()
            for module in modules:
                weights = become(module, 3)
            trainer.push("3")
            assert fleet.differences(weights) == []


#: The modules of which the changes of form below take something.
OWNERS = ("lm_head", "model", "model.norm")


def replace_storage(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


def replace_parameter_object(model: torch.nn.Module, name: str) -> None:
    *path, last = name.split(".")
    owner = model.get_submodule(".".join(path))
    owner.register_parameter(last, torch.nn.Parameter(owner.get_parameter(last).detach().clone(), requires_grad=False))


@pytest.mark.parametrize("kind", ["one storage", "separate"])
def test_a_trainers_parameter_or_module_that_was_replaced_is_taken_up_by_the_next_push(kind: str) -> None:
    with Pushing(kind) as pushing:
        pushing.push()
        for name, _ in list(pushing.module.named_parameters())[::2]:
            replace_parameter_object(pushing.module, name)
        pushing.push()
        layers = pushing.module.get_submodule("model.layers")
        layers.add_module("0", copy.deepcopy(layers.get_submodule("0")))
        pushing.push()
        tensors = {name: parameter.detach().clone() for name, parameter in pushing.module.named_parameters()}
        for name, child in Named(tensors).named_children():
            pushing.module.add_module(name, child)
        pushing.push()
        pushing.push()
        assert not pushing.sent_whole()


def test_a_workers_parameter_whose_storage_was_replaced_is_found_again() -> None:
    with Pushing() as pushing:
        pushing.push()
        for rank, model in enumerate(pushing.fleet.models):
            for name, parameter in list(model.named_parameters())[rank::2]:
                if rank % 2:
                    replace_storage(parameter)
                else:
                    replace_parameter_object(model, name)
        pushing.push()
        assert not pushing.sent_whole()
        pushing.push()


def another_dtype(model: torch.nn.Module) -> None:
    norm = model.get_parameter(SMALL)
    norm.data = norm.data.to(torch.float64)


def another_shape(model: torch.nn.Module) -> None:
    owner = model.get_submodule("lm_head")
    owner.register_parameter("weight", torch.nn.Parameter(torch.zeros(32, 32), requires_grad=False))


def other_strides(model: torch.nn.Module) -> None:
    head = model.get_parameter("lm_head.weight")
    head.data = head.data.t().contiguous().t()


def gone(model: torch.nn.Module) -> None:
    del model.get_submodule("model.norm").weight


def one_more(model: torch.nn.Module) -> None:
    model.get_submodule("model").register_parameter("added", torch.nn.Parameter(torch.zeros(3), requires_grad=False))


FORMS: dict[str, tuple[Callable[[torch.nn.Module], None], str]] = {
    "dtype": (another_dtype, r"model\.norm\.weight is now float64\[16\], and was float32\[16\]"),
    "shape": (another_shape, r"lm_head\.weight is now float32\[32, 32\], and was float32\[64, 16\]"),
    "strides": (other_strides, r"lm_head\.weight now has the strides \[1, 64\], and had \[16, 1\]"),
    "gone": (gone, r"model\.norm\.weight is gone, and was float32\[16\]"),
    "new": (one_more, r"not there when the loader was traced would be left as they are: model\.added"),
}


@pytest.mark.parametrize("mode", ["direct", "ranklocal"])
@pytest.mark.parametrize("form", FORMS)
def test_a_workers_parameter_of_another_form_is_refused_by_name_before_anything_is_written(
    form: str, mode: str
) -> None:
    change, words = FORMS[form]
    with Pushing(mode=mode) as pushing:
        pushing.push()
        model = pushing.fleet.models[1]
        kept = {name: (model.get_submodule(name), dict(model.get_submodule(name)._parameters)) for name in OWNERS}
        data = {name: parameter.data for name, parameter in model.named_parameters()}
        change(model)
        before = pushing.fleet.bits()
        become(pushing.module, 5)
        with pytest.raises(PushError, match=words) as refusal:
            pushing.sync.push("five")
        assert "the loader" not in str(refusal.value).replace("the loader was traced", "")
        assert refusal.value.codes == ("manifest",)
        assert pushing.fleet.changed(before) == []
        assert pushing.fleet.servable == [True] * 4
        for owner, parameters in kept.values():
            owner._parameters.clear()
            owner._parameters.update(parameters)
        for name, tensor in data.items():
            model.get_parameter(name).data = tensor
        pushing.push()


def test_what_is_prepared_and_never_installed_leaves_no_mapping_behind() -> None:
    with Pushing() as pushing:
        pushing.push()
        pushing.sync.close()
        held = [line for line in Path("/proc/self/maps").read_text().splitlines() if " rw-p " in line]
        names = {line.split(maxsplit=5)[-1] for line in held}
        assert not [name for name in names if name.startswith("/memfd:rankcast")]


# -- files -------------------------------------------------------------------------------------------------------------


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 16)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "grown": (grow, "shrank or grew"),
    "truncated": (truncate, "shrank or grew"),
    "rewritten": (rewrite, "was rewritten"),
    "replaced": (replace, "was replaced|changed .* the files that they are in"),
    "gone": (Path.unlink, "is gone|changed .* the files that they are in"),
}


@pytest.mark.parametrize("when", ["connect", "prepare", "install"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_file_that_changes_is_refused_by_name(tmp_path: Path, change: str, when: str) -> None:
    act, words = CHANGES[change]
    first, second = unique_weights(CONFIG, 1), unique_weights(CONFIG, 2)
    write_checkpoint(tmp_path / "first", CONFIG, first)
    write_checkpoint(tmp_path / "second", CONFIG, second, shards=2)
    victim = tmp_path / "second" / "model-00002-of-00002.safetensors"
    with Fleet(CONFIG, LAYOUT) as fleet:
        client = WatchedClient(fleet.receivers)
        with rankcast.connect(client, tmp_path / "first", mode="direct", timeout=60) as sync:
            sync.push("first")
        before = fleet.bits()
        with rankcast.connect(client, tmp_path / "second", mode="direct", timeout=60) as sync:
            if when == "connect":
                act(victim)
            else:
                client.before[when] = lambda: act(victim) if victim.exists() else None
            with pytest.raises(PushError, match=words) as failure:
                sync.push("second")
            assert victim.name in str(failure.value) or "trainer rank 0 changed" in str(failure.value)
        client.before.clear()
        assert fleet.versions != {"second"}
        written = fleet.changed(before)
        if when != "install":
            assert written == []
            assert fleet.servable == [True] * LAYOUT.workers
        else:
            assert set(written) <= {rank for rank, servable in enumerate(fleet.servable) if not servable}
        write_checkpoint(tmp_path / "third", CONFIG, second, shards=2)
        with rankcast.connect(client, tmp_path / "third", mode="direct", timeout=60) as sync:
            sync.push("third")
        assert fleet.differences(second) == []
