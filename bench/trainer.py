"""One trainer rank of the bench, as a process that does as it is told, one line of JSON a call.

It knows what it holds of the model, and a sync. It must not know what is compared with what.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from case import fill, held_by

import rankcast
from line_ranks import claim_stdout, serve
from rankcast.transports.shm import create_segment
from rankcast_oracle import checkpoint_shapes


class BenchRank:
    """What the rank can be asked for."""

    def __init__(self, rank: int, config: dict[str, Any]) -> None:
        self._rank = rank
        shapes = checkpoint_shapes(config)
        self._model = nn.Module()
        self._held: dict[str, nn.Parameter] = {}
        # Every parameter has a storage of its own, as a trainer's do.
        for name in held_by(list(shapes), config, rank):
            *path, last = name.split(".")
            module = self._model
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]  # type: ignore[assignment]  # never None: just made
            self._held[name] = nn.Parameter(torch.zeros(shapes[name], dtype=torch.bfloat16), requires_grad=False)
            module.register_parameter(last, self._held[name])
        self._sync: Any = None

    def become(self, step: int) -> None:
        for name, parameter in self._held.items():
            fill(parameter.data, name, step)

    def lend(self, size: int) -> dict[str, Any]:
        """A segment of ``size`` bytes of anything, for a worker to copy from."""
        import msgspec

        self._segment = create_segment(size)
        self._segment.memory.view(torch.int64)[:] = torch.arange(size // 8)
        return dict(msgspec.to_builtins(self._segment.handle))

    def connect(self, url: str, mode: str) -> float:
        began = time.perf_counter()
        target = url if self._rank == 0 else "http://127.0.0.1:9"
        self._sync = rankcast.connect(target, self._model, mode=mode, timeout=300)
        return time.perf_counter() - began

    def push(self, version: str) -> dict[str, Any]:
        """Push; seconds of the whole call, and the report."""
        import msgspec

        began = time.perf_counter()
        report = self._sync.push(version)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "report": msgspec.to_builtins(report)}

    def close(self) -> None:
        self._sync.close()
        self._sync = None


def main() -> None:
    replies = claim_stdout()
    store, config, rank, size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    serve(BenchRank(rank, config), replies)
    os._exit(0)  # torch's process group waits at exit for ranks that are dead


if __name__ == "__main__":
    main()
