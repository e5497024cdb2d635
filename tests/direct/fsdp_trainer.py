"""Two ranks that train transformers' Qwen3-MoE under ``fully_shard`` and push each step; one process a rank.

It knows transformers, FSDP2 and how to watch collectives and segments. It must not know what a worker must hold. Run as
a program it is one rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from line_ranks import claim_stdout, serve

#: Libraries of operators that talk to other ranks.
_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional")


class Collectives(TorchDispatchMode):
    """Counts every operator that talks to other ranks, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVE:
            self.seen[str(func.name())] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def segments_made() -> Iterator[list[int]]:
    """The sizes of all shared memory that this process makes meanwhile, by the one call that makes any."""
    made: list[int] = []
    truncate, create = os.ftruncate, os.memfd_create

    def ftruncate(descriptor: int, size: int) -> None:
        made.append(size)
        truncate(descriptor, size)

    def memfd_create(*arguments: Any) -> int:
        made.append(0)
        return create(*arguments)

    os.ftruncate, os.memfd_create = ftruncate, memfd_create  # type: ignore[assignment]
    try:
        yield made
    finally:
        os.ftruncate, os.memfd_create = truncate, create


class Rank:
    """What a rank can be asked for."""

    def __init__(self, rank: int, config: dict[str, Any], folder: Path) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        self.rank, self.config, self.folder = rank, config, folder
        torch.manual_seed(0)
        self.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).float()
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-2)
        self.sync: Any = None

    def train(self, step: int) -> float:
        """One step of the optimizer on tokens of its own; the loss."""
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        tokens = torch.randint(self.config["vocab_size"], (2, 16), generator=generator)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def connect(self, url: str, mode: str) -> int:
        """Join the fleet; how many bytes of shared memory rankcast itself made for that, beside the parameters'."""
        import rankcast

        with segments_made() as made:
            target = url if self.rank == 0 else "http://127.0.0.1:9"
            self.sync = rankcast.connect(target, self.model, mode=mode, timeout=120)
        return sum(made)

    def push(self, version: str) -> dict[str, Any]:
        """Push; the report, which collectives there were and which shared memory was made meanwhile."""
        import msgspec

        with Collectives() as collectives, segments_made() as made:
            report = self.sync.push(version)
        return {"report": msgspec.to_builtins(report), "collectives": dict(collectives.seen), "made": made}

    def local(self) -> dict[str, Any]:
        """How this rank's local shards lie: bytes of large ones, how many of these are shared, and of small ones."""
        own = [parameter.to_local().untyped_storage() for parameter in self.model.parameters()]
        large = [storage for storage in own if storage.nbytes() >= 64 * 1024]
        small = sum(storage.nbytes() for storage in own) - sum(storage.nbytes() for storage in large)
        return {
            "large": sum(storage.nbytes() for storage in large),
            "shared": sum(storage.is_shared() for storage in large) / len(large),
            "small": small,
        }

    def save(self, name: str) -> dict[str, int]:
        """Gather everything, for verification only, into a file of raw bits; the collectives that this took."""
        with Collectives() as collectives:
            full = {path: parameter.full_tensor().detach() for path, parameter in self.model.named_parameters()}
        if self.rank == 0:
            np.savez(self.folder / name, **{path: tensor.numpy().view(np.uint32) for path, tensor in full.items()})
        return dict(collectives.seen)

    def close(self) -> None:
        self.sync.close()


def main() -> None:
    replies = claim_stdout()
    folder, config, rank, size = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    serve(Rank(rank, config, folder), replies)
    os._exit(0)  # torch's process group waits at exit for ranks that are dead


if __name__ == "__main__":
    main()
