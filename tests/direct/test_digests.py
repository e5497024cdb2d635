"""``check="digest"``: a byte that is written on the way is found, and its tensor named; without one nothing is said.

The writes here are such that torch's version counters do not see them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankcast
from checkpoints import as_torch, tiny_config, write_checkpoint
from direct.models import models
from direct.origins import KINDS, Named, Origin, laid_out, put
from direct.ranks import ranks
from fleets_inprocess import Fleet, Stream, WatchedClient
from oracle import unique_weights
from rankcast import ModuleSource, PushError
from rankcast.engines.reference.layout import Layout
from rankcast.transports.digest import digest, packed, unpacked

CONFIG = tiny_config(num_hidden_layers=1, hidden_size=64, num_experts=4, vocab_size=300)
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
LARGE, SMALL, EXPERT = "lm_head.weight", "model.norm.weight", "model.layers.0.mlp.experts.3.down_proj.weight"


def trained() -> Named:
    shapes = {name: bits.shape for name, bits in unique_weights(CONFIG, 1).items()}
    made = Named(laid_out("separate", shapes, torch.float32))
    become(made, 1)
    return made


def become(made: Named, step: int) -> Any:
    weights = unique_weights(CONFIG, step)
    own = dict(made.named_parameters())
    for name, bits in weights.items():
        put(own[name], bits)
    return weights


def flip(tensor: torch.Tensor) -> None:
    """One bit of the last element, past every counter."""
    counter = tensor._version
    tensor.detach().view(-1).view(torch.uint8).numpy()[-1] ^= 1
    assert tensor._version == counter


@settings(max_examples=25)
@given(
    model=models(),
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(["direct", "auto", "ranklocal", "broadcast"]),
    bucket=st.sampled_from([4096, 2**20]),
)
def test_digests_agree_wherever_bytes_lie_and_however_they_go(
    model: tuple[dict[str, Any], Layout], kind: str, mode: str, bucket: int
) -> None:
    config, layout = model
    weights = unique_weights(config, 1)
    with tempfile.TemporaryDirectory() as folder, Fleet(config, layout) as fleet:
        origin = Origin(kind, config, Path(folder))
        if kind == "declared" and mode in ("ranklocal", "broadcast"):
            return  # boxes that are not whole can only go direct
        origin.become(weights, "one")
        with rankcast.connect(
            fleet.receivers, origin.source, mode=mode, bucket_bytes=bucket, check="digest", timeout=60
        ) as sync:
            for version in "12":
                sync.push(version)
                assert fleet.differences(weights) == []


class Pushing:
    """A fleet, a trainer whose pushes are checked by digests, and a client that lets a test write in between."""

    def __init__(self, mode: str) -> None:
        self.fleet = Fleet(CONFIG, LAYOUT)
        self.client = WatchedClient(self.fleet.receivers)
        self.module = trained()
        options: dict[str, Any] = {"mode": mode, "bucket_bytes": 2**16, "check": "digest", "timeout": 60}
        self.sync = rankcast.connect(self.client, self.module, **options)
        self.sync.push("1")

    def read_by_workers(self, name: str, install: int) -> torch.Tensor | None:
        """What workers read of a tensor with an install: the shard where it lies, its copy, or what was staged."""
        exports, direct = self.sync._exports, self.sync._direct
        if direct is None:
            assert exports.staging is not None
            index = exports.rest.index[name]
            return exports.staging.lying(index) if exports.rounds.rounds[index] == install else None
        parameter = self.module.get_parameter(name)
        assert direct._exported is not None
        copies = direct._exported._copies
        return next((copy for copy, own in copies if own.data_ptr() == parameter.data_ptr()), parameter)


@pytest.fixture(params=["direct", "ranklocal", "broadcast"])
def pushing(request: pytest.FixtureRequest) -> Iterator[Pushing]:
    made = Pushing(request.param)
    yield made
    made.sync.close()
    made.fleet.close()


@pytest.mark.parametrize("name", [LARGE, SMALL, EXPERT])
def test_a_bit_that_is_flipped_after_prepare_is_found_and_its_tensor_named_and_the_next_push_repairs(
    pushing: Pushing, name: str
) -> None:
    become(pushing.module, 2)
    installs: list[bool] = []

    def write(call: str, payload: Any) -> Any:
        if call == "install":
            read = pushing.read_by_workers(name, len(installs))
            installs.append(read is not None)
            if read is not None:
                flip(read)
        return payload

    pushing.client.change = write
    with pytest.raises(PushError) as failure:
        pushing.sync.push("2")
    assert sum(installs) == 1
    assert f"took other bytes of {name} (1 in all)" in str(failure.value)
    assert failure.value.codes == ("digest",)
    assert failure.value.tensor == name
    assert "unusable until the next full push" in str(failure.value)
    assert "2" not in pushing.fleet.versions
    pushing.client.change = None
    weights = become(pushing.module, 3)
    pushing.sync.push("3")
    assert pushing.fleet.differences(weights) == []
    assert pushing.fleet.servable == [True] * LAYOUT.workers


def test_each_trainer_rank_vouches_for_its_own_and_a_bit_that_another_one_flips_is_found() -> None:
    modules = [trained() for _ in range(2)]
    with Fleet(CONFIG, LAYOUT) as fleet:
        client = WatchedClient(fleet.receivers)
        with ranks(client, [ModuleSource(m) for m in modules], mode="direct", check="digest") as trainer:
            trainer.push("1")
            assert fleet.differences(unique_weights(CONFIG, 1)) == []
            plan = trainer.syncs[0].plan
            assert plan is not None
            assert (plan.sender_bytes > 0).all()

            def write() -> None:
                for parameter in modules[1].parameters():
                    if parameter.untyped_storage().nbytes() >= 64 * 1024:
                        flip(parameter)

            client.before["install"] = write
            failed: list[str] = []

            def push(rank: int) -> None:
                with pytest.raises(rankcast.RankcastError) as failure:
                    trainer.syncs[rank].push("2")
                failed.append(str(failure.value))

            trainer.all(push)
            assert len(failed) == 2
            assert all("took other bytes of" in said for said in failed)


def test_a_cast_is_digested_as_it_is_rounded_and_a_nan_is_a_nan() -> None:
    bits = unique_weights(tiny_config(num_hidden_layers=1), 1)["lm_head.weight"]
    tensors = laid_out("strided", {"weight": bits.shape}, torch.float32)
    put(tensors["weight"], bits)
    assert tensors["weight"].isnan().any()
    served = torch.nn.Linear(bits.shape[1], bits.shape[0], bias=False, dtype=torch.bfloat16)
    receiver = rankcast.Receiver(served)
    with rankcast.connect(receiver, Named(tensors), mode="direct", check="digest", timeout=60) as sync:
        assert sync.push("1").cast_tensors == 1


def test_a_file_that_is_written_through_a_mapping_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, unique_weights(CONFIG, 1))
    (path,) = tmp_path.glob("*.safetensors")
    with Fleet(CONFIG, LAYOUT) as fleet:
        client = WatchedClient(fleet.receivers)
        with rankcast.connect(client, tmp_path, mode="direct", check="digest", timeout=60) as sync:
            sync.push("1")
            mapped = np.memmap(path, mode="r+")

            def write() -> None:
                mapped[-1] ^= 1

            client.before["install"] = write
            # Whether the kernel has said the write in the file's times by then is its own affair.
            with pytest.raises(PushError, match=r"took other bytes of|is not the file that was exported|changed"):
                sync.push("2")


def test_a_stream_is_checked_round_by_round() -> None:
    weights = unique_weights(CONFIG, 1)
    stream = Stream(as_torch(weights))
    with Fleet(CONFIG, LAYOUT) as fleet:
        with rankcast.connect(fleet.receivers, stream, bucket_bytes=2**16, check="digest", timeout=60) as sync:
            assert sync.push("1").rounds > 2
        assert fleet.differences(weights) == []


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_digests_travel_as_they_are(digests: list[int]) -> None:
    assert unpacked(packed(digests)).tolist() == digests


@pytest.mark.parametrize("text", ["AAAA", "not base64!", "AAAAAAAAAAA"])
def test_what_is_no_list_of_digests_is_refused(text: str) -> None:
    with pytest.raises(rankcast.PayloadError, match="no list of digests"):
        unpacked(text)


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
)
def test_a_digest_knows_bits_and_no_strides(shape: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    plain = (torch.randn(shape, generator=generator) * 3).to(dtype)
    backwards = list(reversed(range(plain.dim())))
    turned = plain.permute(backwards).contiguous().permute(backwards)
    assert digest(turned) == digest(plain)
    if plain.numel():
        other = plain.clone()
        other.reshape(-1).view(torch.uint8)[0] ^= 1
        assert digest(other) != digest(plain)
