"""Trainer ranks as real processes that export DTensors, and what each case holds.

It knows meshes, and how to write down what a rank exports and reads; it must not know what is right. Run as a program
it is one rank, which answers to a case once its files are there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleets import environment
from line_ranks import LineRanks, claim_stdout, serve

#: Shapes that divide and that do not, with fewer rows than ranks, of 1 to 3 dimensions.
SHAPES = ((8, 6), (7, 5), (2, 9), (1, 3), (12,), (3,), (5, 4, 3))


def unique(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Float32 whose bits say which tensor and which element: NaNs of both signs and -0.0 are among them."""
    count = int(np.prod(shape))
    raw = torch.arange(count, dtype=torch.int64) * 7919 + number * 104729
    raw[::3] += 0x7F800000
    raw[1::3] += 0x80000000
    raw[0] = 0x80000000 if count else 0
    return (raw & 0xFFFFFFFF).to(torch.uint32).view(torch.float32).view(shape).clone()


def originals(prefix: str, shapes: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{number}": unique(number + 1, shape) for number, shape in enumerate(shapes)}


def layouts(size: int) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    """Mesh shape and placements of each case of plain DTensors, by name."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: dict[str, tuple[tuple[int, ...], list[Any]]] = {
        "rows": ((size,), [Shard(0)]),
        "columns": ((size,), [Shard(1)]),
        "replicas": ((size,), [Replicate()]),
    }
    if size == 4:
        found |= {
            "replicated rows": ((2, 2), [Replicate(), Shard(0)]),
            "rows of replicas": ((2, 2), [Shard(0), Replicate()]),
            "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
            "columns and rows": ((2, 2), [Shard(1), Shard(0)]),
            "rows twice": ((2, 2), [Shard(0), Shard(0)]),
            "rows strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
            "strided by three": ((2, 2), [_StridedShard(0, split_factor=3), Replicate()]),
            "columns strided": ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
        }
    return found


def expected(case: str) -> dict[str, torch.Tensor]:
    """What the whole tensors of a case of plain DTensors or of packed experts are."""
    if case.startswith("packed"):
        found = {}
        for layer, experts in enumerate((4, 5, 3)):
            gate_up, down = unique(2 * layer, (experts, 6, 5)), unique(2 * layer + 1, (experts, 5, 3))
            for expert in range(experts):
                name = f"{layer}.mlp.experts.{expert}"
                found[f"{name}.gate_proj.weight"] = gate_up[expert, :3]
                found[f"{name}.up_proj.weight"] = gate_up[expert, 3:]
                found[f"{name}.down_proj.weight"] = down[expert]
        return found
    deep = [shape for shape in SHAPES if len(shape) > 1]
    return originals("t", tuple(deep) if "columns" in case else SHAPES)


class Rank:
    """One rank's cases: each makes a module, exports it and writes down what a reader is to be given."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.kept: list[Any] = []

    def write(self, case: str, module: torch.nn.Module, **options: Any) -> dict[str, Any]:
        import msgspec

        from rankcast.trainer.sources import ModuleSource, export_shards

        source = ModuleSource(module, **options)
        export = export_shards(source)
        assert export is not None
        self.kept += [module, export]
        read = {}
        for weight in source.read():
            buffer = torch.full((weight.meta.nbytes,), 0xA5, dtype=torch.uint8)
            weight.write(buffer)
            read[weight.meta.name] = buffer.numpy().tobytes()
        (self.folder / f"{case}.{self.rank}").write_bytes(
            msgspec.msgpack.encode([source.manifest(), export.rows, read])
        )
        return {"stable": source.stable, "staged": export.rows.staged, "rows": len(export.rows)}

    def run(self, case: str) -> dict[str, Any]:
        named: dict[str, Callable[[], dict[str, Any]]] = {
            "half": self.half,
            "trained": self.trained,
            "gathered": self.gathered,
        }
        if case in named:
            return named[case]()
        if case.startswith("fully_shard"):
            return self.fully_shard(case)
        return self.distributed(case)

    def distributed(self, case: str) -> dict[str, Any]:
        """Tensors of every shape, or packed experts, over a mesh."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        packed = case.startswith("packed ")
        mesh_shape, placements = layouts(self.size)[case.removeprefix("packed ")]
        mesh = init_device_mesh("cpu", mesh_shape)
        module = torch.nn.Module()
        options = {}
        if packed:
            options["experts"] = "qwen3_moe"
            for layer, experts in enumerate((4, 5, 3)):
                holder = torch.nn.Module()
                holder.mlp = torch.nn.Module()
                holder.mlp.experts = torch.nn.Module()
                for at, (name, shape) in enumerate((("gate_up_proj", (6, 5)), ("down_proj", (5, 3)))):
                    full = unique(2 * layer + at, (experts, *shape))
                    held = distribute_tensor(full, mesh, placements, src_data_rank=None)
                    setattr(holder.mlp.experts, name, torch.nn.Parameter(held))
                module.add_module(str(layer), holder)
        else:
            for name, full in expected(case).items():
                # Cut by each rank for itself: scattering refuses strided placements that do not divide.
                module.register_buffer(name, distribute_tensor(full, mesh, placements, src_data_rank=None))
        return self.write(case, module, **options)

    def half(self) -> dict[str, Any]:
        """A mesh of half of the ranks; the others hold nothing of it, and a tensor of their own."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = DeviceMesh("cpu", list(range(self.size // 2)))
        module = torch.nn.Module()
        for name, full in expected("half").items():
            module.register_buffer(name, distribute_tensor(full, mesh, [Shard(0)]))
        module.register_buffer("own", unique(99, (4, 4)))
        return self.write("half", module)

    def model(self) -> torch.nn.Module:
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.Linear(300, 257), torch.nn.Linear(257, 2))

    def fully_shard(self, case: str) -> dict[str, Any]:
        """FSDP2 in the ways people use it: plain, by columns, with replicas, over tensor parallelism."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if case == "fully_shard over tp":
            # Even sizes: fully_shard refuses others in the dimension that tensor parallelism has cut.
            model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 12, bias=False))
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            self.fill(model, case)
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
            return self.write(case, model)
        model = self.model()
        self.fill(model, case)
        if case == "fully_shard with replicas":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (self.size,))
        # By columns only where they divide: fully_shard refuses uneven ones.
        columns = "columns" in case
        fully_shard(
            model,
            mesh=mesh,
            shard_placement_fn=(lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % self.size == 0 else None)
            if columns
            else None,
        )
        return self.write(case, model)

    def fill(self, model: torch.nn.Module, case: str) -> None:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(unique(number, tuple(parameter.shape)))
        if self.rank == 0:
            full = {name: tensor.view(torch.int32).numpy().copy() for name, tensor in model.state_dict().items()}
            np.savez(self.folder / f"{case}.npz", **full)

    def trained(self) -> dict[str, Any]:
        """Two equal models, trained alike; one is exported half-way, and goes on as if it were not."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from rankcast.trainer.sources import ModuleSource, export_shards

        mesh = init_device_mesh("cpu", (self.size,))
        models = [self.model() for _ in range(2)]
        optimizers = []
        for model in models:
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.05))
        export = None
        renewed = versions_moved = 0
        for step in range(4):
            if step == 2:
                source = ModuleSource(models[1])
                export = export_shards(source)
            before = source.versions() if export is not None else ()
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(step * 10 + self.rank)
                model(torch.rand(3, 10)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if export is not None:
                renewed += export.renew()
                versions_moved += source.versions() != before
        assert export is not None
        export.refresh()
        same = all(
            torch.equal(a.to_local(), b.to_local()) for a, b in zip(*(m.parameters() for m in models), strict=True)
        )
        answer = self.write("trained", models[1])
        full = {name: tensor.full_tensor().numpy().view(np.int32) for name, tensor in models[0].state_dict().items()}
        if self.rank == 0:
            np.savez(self.folder / "trained.npz", **full)
        return {**answer, "same": same, "renewed": renewed, "moved": export.sharing.moved, "versions": versions_moved}

    def gathered(self) -> dict[str, Any]:
        """After a forward pass without a backward one, fully_shard's root stays gathered."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from rankcast.errors import SourceError
        from rankcast.trainer.sources import ModuleSource

        model = fully_shard(self.model(), mesh=init_device_mesh("cpu", (self.size,)))
        source = ModuleSource(model)
        before = source.manifest()
        with torch.no_grad():
            model(torch.rand(2, 10))
        try:
            source.shards()
            said = ""
        except SourceError as refused:
            said = refused.message
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {"said": said, "after": len(source.shards()) > 0 and source.manifest() == before}


class Ranks(LineRanks):
    """``size`` ranks, which live until ``stop``; ``run`` lets all of them make a case and returns their answers."""

    def __init__(self, size: int, folder: Path) -> None:
        self.folder = folder
        super().__init__([sys.executable, __file__, str(folder)], size, environment())

    def run(self, case: str, seconds: float = 120.0) -> list[dict[str, Any]]:
        return self.all("run", case, seconds=seconds)


def _main(folder: Path, rank: int, size: int) -> None:
    import torch.distributed as dist

    replies = claim_stdout()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    serve(Rank(rank, size, folder), replies, ())


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
