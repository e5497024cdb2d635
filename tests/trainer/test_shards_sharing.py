"""Sharing in place: storages move once, everything over them goes on working, and what cannot move says why.

It knows storages, optimizers and limits; it must not know columns.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rankcast.errors import LimitError
from rankcast.trainer.sources import sharing
from rankcast.trainer.sources.sharing import share_in_place, told
from rankcast.transports.live import find_shared
from trainer.shard_reading import bits

SRC = Path(__file__).resolve().parents[2] / "src"


def in_shared_memory(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return find_shared(storage.data_ptr(), storage.nbytes()) is not None


def special(*shape: int) -> torch.Tensor:
    """Random bits, NaNs of every kind among them, and -0.0."""
    tensor = torch.randint(0, 256, (*shape, 4), dtype=torch.uint8).view(torch.float32).reshape(shape)
    tensor.view(-1)[0] = -0.0
    return tensor


def test_a_storage_moves_with_its_bits_and_every_alias_follows() -> None:
    parameter = nn.Parameter(special(300, 100))
    tied, view, before = parameter, parameter.detach()[7:, ::2], bits(parameter)
    told_by_view = bits(view)
    old = parameter.data_ptr()
    done = share_in_place([parameter, view])
    assert (done.moved, done.moved_bytes, done.already, done.reasons) == (1, 300 * 100 * 4, 0, {})
    assert parameter.data_ptr() != old
    assert in_shared_memory(parameter)
    assert np.array_equal(bits(parameter), before)
    assert np.array_equal(bits(view), told_by_view)
    with torch.no_grad():
        parameter[7, 0] = 42.0
    assert view[0, 0] == 42.0
    assert tied[7, 0] == 42.0


def test_it_moves_once() -> None:
    parameter = nn.Parameter(torch.rand(300, 100))
    share_in_place([parameter])
    where = parameter.data_ptr()
    done = share_in_place([parameter])
    assert (done.moved, done.already) == (0, 1)
    assert parameter.data_ptr() == where


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_an_optimizer_goes_on_exactly_as_if_nothing_had_moved(how: dict[str, bool]) -> None:
    def trained(share: bool) -> list[np.ndarray]:
        torch.manual_seed(3)
        embedding = nn.Embedding(200, 96)
        head = nn.Linear(96, 200, bias=False)
        head.weight = embedding.weight
        body = nn.Linear(96, 96)
        # Parameters as views of one flat buffer, as distributed optimizers keep them.
        flat = torch.cat([p.detach().flatten() for p in body.parameters()] + [torch.zeros(20000)])
        start = 0
        for parameter in body.parameters():
            parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        parameters = [embedding.weight, *body.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **how)
        for step in range(4):
            if share and step == 2:
                state = [value for held in optimizer.state.values() for value in held.values() if value.dim()]
                share_in_place([*parameters, flat, *state])
                assert all(in_shared_memory(tensor) for tensor in (embedding.weight, flat, body.bias))
            optimizer.zero_grad()
            head(body(embedding(torch.arange(50)))).square().mean().backward()
            optimizer.step()
        assert head.weight is embedding.weight
        assert torch.equal(flat[: body.weight.numel()].view_as(body.weight), body.weight)
        return [bits(parameter) for parameter in (*parameters, flat)]

    for plain, shared in zip(trained(False), trained(True), strict=True):
        assert np.array_equal(plain, shared)


def test_another_process_sees_what_is_written_after_the_move() -> None:
    parameter = nn.Parameter(torch.zeros(300, 100))
    share_in_place([parameter])
    found = find_shared(parameter.data_ptr(), parameter.nbytes)
    assert found is not None
    with torch.no_grad():
        parameter.fill_(3.0)
    code = f"import numpy; print(numpy.fromfile('/proc/{os.getpid()}/fd/{found.descriptor}', 'f4').sum())"
    assert subprocess.check_output([sys.executable, "-c", code], timeout=60).split() == [b"90000.0"]


def test_the_old_memory_is_given_back() -> None:
    def private() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed may be large enough to be used again
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if "kB" in line)
        return int(fields["RssAnon"].split()[0]) * 1024

    size = 64 * 2**20
    tensor = torch.ones(size, dtype=torch.uint8)
    before = private()
    share_in_place([tensor])
    assert before - private() > size * 0.9


def test_nothing_is_left_when_the_tensors_are_gone() -> None:
    gc.collect()  # what earlier tests left open must not be closed in between
    tensors = [torch.rand(300, 100) for _ in range(3)]
    descriptors = len(os.listdir("/proc/self/fd"))
    share_in_place(tensors)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 3
    del tensors
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_cannot_move_stays_and_says_why(tmp_path: Path) -> None:
    array = np.zeros(50_000, dtype=np.float32)
    (tmp_path / "raw.bin").write_bytes(bytes(200_000))
    lent = torch.rand(50_000)
    alias = lent.numpy()
    odd = {
        "lent": lent,
        "numpy": torch.from_numpy(array),
        "buffer": torch.frombuffer(bytearray(100_000), dtype=torch.uint8),
        "mapped": torch.from_file(str(tmp_path / "raw.bin"), shared=False, size=200_000, dtype=torch.uint8),
        "meta": torch.empty(50_000, device="meta"),
    }
    fine = torch.rand(50_000)
    done = share_in_place([*odd.values(), fine])
    assert done.moved == 1
    assert in_shared_memory(fine)
    reasons = {name: done.reasons[tensor.untyped_storage()._cdata] for name, tensor in odd.items()}
    assert all("clone()" in reasons[name] for name in ("lent", "numpy", "buffer", "mapped"))
    assert "meta" in reasons["meta"]
    odd["numpy"][0] = 5.0
    lent[0] = 5.0
    assert array[0] == alias[0] == 5.0
    assert told(reasons).count("clone()") == 2


def test_a_checkpoint_that_was_loaded_without_a_copy_moves_out_of_its_file(tmp_path: Path) -> None:
    saved = {"a": special(300, 100), "b": special(200, 100)}
    save_file(saved, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert not loaded["a"].untyped_storage().resizable()
    done = share_in_place(loaded.values())
    assert (done.moved, done.reasons) == (2, {})
    for name, tensor in saved.items():
        assert in_shared_memory(loaded[name])
        assert np.array_equal(bits(loaded[name]), bits(tensor))


def test_shared_memory_without_a_descriptor_is_named() -> None:
    code = """
    import torch
    torch.multiprocessing.set_sharing_strategy("file_system")
    from rankcast.trainer.sources.sharing import share_in_place
    before, after = torch.rand(50_000), torch.rand(50_000)
    before.share_memory_()
    done = share_in_place([before, after])
    print(done.moved, [reason for reason in done.reasons.values()])
    """
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], timeout=120, env=environment)
    assert said.decode().startswith("1 [")
    assert "file_descriptor" in said.decode()


def test_a_full_shared_memory_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "named_room", lambda: 500_000)
    tensors = [torch.rand(50_000) for _ in range(3)]
    where = [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(LimitError) as caught:
        share_in_place(tensors)
    assert all(part in str(caught.value) for part in ("600,000", "500,000", "--shm-size", "ranklocal"))
    assert [tensor.data_ptr() for tensor in tensors] == where
    share_in_place(tensors[:2])


def test_many_storages_raise_the_soft_limit_and_a_hard_one_refuses_before_anything_moves() -> None:
    code = """
    import resource, sys, torch
    from rankcast.errors import LimitError
    from rankcast.trainer.sources.sharing import share_in_place
    hard = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    tensors = [torch.full((20_000,), float(i)) for i in range(600)]
    where = [tensor.data_ptr() for tensor in tensors]
    try:
        done = share_in_place(tensors)
        print(done.moved, resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 600)
    except LimitError as refused:
        print("refused", [tensor.data_ptr() for tensor in tensors] == where, refused)
    assert all(tensor[-1] == i for i, tensor in enumerate(tensors))
    """
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}

    def under(hard: int) -> str:
        arguments = [sys.executable, "-c", textwrap.dedent(code), str(hard)]
        return subprocess.check_output(arguments, timeout=120, env=environment).decode()

    assert under(1024).split() == ["600", "True"]
    assert under(300).startswith("refused True")
    assert "ulimit -n" in under(300)
