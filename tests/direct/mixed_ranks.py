"""Trainer ranks as real processes over a mesh, that push into a model of rank 0's own of which few tensors go staged.

It knows how such a trainer is made, and counts its gathers; it must not know what is right. Run as a program it is one
rank, which writes down what it counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
PUSHES = 2
EXPERTS, ROWS, COLUMNS = 4, 64, 96
#: The loader computes with these, so that they are staged; all else goes direct.
COMPUTED = ("p1", "0.mlp.experts.2.up_proj.weight", "p4")


def weights(step: int) -> dict[str, torch.Tensor]:
    """What the trainer holds after ``step``: experts packed in one tensor, between plain ones."""
    torch.manual_seed(step)
    return {
        "p0": torch.randn(128, 160),
        "p1": torch.randn(128, 160),
        "0.mlp.experts.gate_up_proj": torch.randn(EXPERTS, 2 * ROWS, COLUMNS),
        "p3": torch.randn(7, 5),
        "p4": torch.randn(3, 50),
    }


def checkpoint(step: int) -> dict[str, torch.Tensor]:
    """The same under a checkpoint's names."""
    found = weights(step)
    packed = found.pop("0.mlp.experts.gate_up_proj")
    for expert in range(EXPERTS):
        found[f"0.mlp.experts.{expert}.gate_proj.weight"] = packed[expert, :ROWS]
        found[f"0.mlp.experts.{expert}.up_proj.weight"] = packed[expert, ROWS:]
    return found


def run(folder: Path) -> list[dict[str, Any]]:
    """What each rank counted."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE)
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=180)[1].decode() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * RANKS, said
    return [json.loads((folder / f"counted.{rank}").read_text()) for rank in range(RANKS)]


def _main(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import rankcast
    from direct.origins import Named
    from rankcast.rollout.installer import LoaderInstaller
    from rankcast.trainer.sources import module as sources

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    trained = Named(
        {name: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) for name, full in weights(0).items()}
    )
    served = Named({name: torch.zeros_like(full) for name, full in checkpoint(0).items()})
    own = dict(served.named_parameters())

    def load(given: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            own[name].data.copy_(tensor.clone() if name in COMPUTED else tensor)

    gathered: list[int] = []
    right = sources.full_tensor

    def counting(tensor: torch.Tensor) -> torch.Tensor:
        gathered[-1] += 1
        return right(tensor)

    sources.full_tensor = counting
    target = rankcast.Receiver(served, installer=LoaderInstaller(served, load)) if rank == 0 else None
    equal, reports = [], []
    with rankcast.connect(target, rankcast.ModuleSource(trained, experts="qwen3_moe"), timeout=60) as sync:
        for step in range(1, 1 + PUSHES):
            for name, parameter in trained.named_parameters():
                local = distribute_tensor(weights(step)[name], mesh, [Shard(0)], src_data_rank=None).to_local()
                with torch.no_grad():
                    parameter.to_local().copy_(local)
            gathered.append(0)
            reports.append(sync.push(str(step)))
            equal.append(all(torch.equal(own[name], full) for name, full in checkpoint(step).items()))
    counted = {
        "gathered": gathered,
        "direct": [report.direct_tensors for report in reports],
        "tensors": [report.tensors for report in reports],
        "equal": equal,
    }
    (folder / f"counted.{rank}").write_text(json.dumps(counted))
    dist.barrier()


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
