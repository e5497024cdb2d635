"""What one trainer rank holds, and sources of it that gather as they go, or fail where they are told to.

It knows names and torch's collectives. It must not know processes, engines, or what a push does with a source.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoints import as_torch, scaled_weights
from end_to_end.seen import wait_until
from fleets_inprocess import Trained
from oracle import unique_weights
from rankcast import IterableSource, ModuleSource, Weight, WeightSource
from rankcast.manifest import Manifest

#: How long a call takes that is slow: much longer than other ranks may take to hear of a failure.
SLOW_SECONDS = 14.0
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def weights_of(config: dict[str, Any], which: list[Any]) -> dict[str, Any]:
    """A whole checkpoint's bits: ``["unique", step]`` or ``["scaled", seed]``."""
    kind, number = which
    return unique_weights(config, number) if kind == "unique" else scaled_weights(config, number)


def held_names(config: dict[str, Any], names: list[str], rank: int, size: int) -> list[str]:
    """Those of ``names`` that a rank holds: what is no expert's, and a stretch of the experts."""
    share, rest = divmod(config["num_experts"], size)
    first = rank * share + min(rank, rest)
    mine = range(first, first + share + (rank < rest))
    return [name for name in names if (found := _EXPERT.search(name)) is None or int(found[1]) in mine]


def sharded_source(kind: str, held: dict[str, Any], rank: int, size: int) -> tuple[WeightSource, Callable[[Any], None]]:
    """A source over ``held`` (bits by name), and the function with which it takes other values.

    ``module`` is a plain module, ``shared`` one whose parameters lie in one shared segment. ``gathered`` is a stream
    in which every rank keeps its part of what is no expert's, and all gather each such tensor when it is asked for.
    """
    if kind in ("module", "shared"):
        module = Trained(held, "float32")
        if kind == "shared":
            _share(module)
        return ModuleSource(module), module.become
    mine: dict[str, torch.Tensor] = {}

    def become(bits: Any) -> None:
        for name, tensor in as_torch(bits).items():
            mine[name] = tensor if _EXPERT.search(name) else _part(tensor, rank, size)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, bits in held.items():
            yield name, mine[name] if _EXPERT.search(name) else _gathered(mine[name], bits.shape, size)

    become(held)
    return IterableSource(stream), become


def _share(module: torch.nn.Module) -> None:
    own = list(module.parameters())
    arena = torch.empty(sum(parameter.numel() for parameter in own)).share_memory_()
    for parameter, place in zip(own, arena.split([parameter.numel() for parameter in own]), strict=True):
        place.view(torch.int32).copy_(parameter.data.reshape(-1).view(torch.int32))
        parameter.data = place.view(parameter.shape)


def _part(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's share of a tensor's elements, as bits; all shares are equally long."""
    share = -(-tensor.numel() // size)
    padded = torch.zeros(share * size, dtype=torch.int32)
    padded[: tensor.numel()] = tensor.reshape(-1).view(torch.int32)
    return padded[rank * share :][:share].clone()


def _gathered(part: torch.Tensor, shape: tuple[int, ...], size: int) -> torch.Tensor:
    parts = [torch.zeros_like(part) for _ in range(size)]
    if size > 1:
        dist.all_gather(parts, part)
    else:
        parts = [part]
    return torch.cat(parts)[: math.prod(shape)].view(torch.float32).view(shape)


class Faulty(WeightSource):
    """Another source, until it comes to the tensor of the pass at which it has been told to be unlucky."""

    def __init__(self, inner: WeightSource) -> None:
        self.stable = inner.stable
        self._inner = inner
        self._passes = 0
        self._fault: tuple[int, int, str] | None = None

    def arm(self, number: int, tensor: int, do: str) -> None:
        """Do ``do`` at ``tensor`` of the pass that comes after ``number`` others from now; then be whole again."""
        self._passes = 0
        self._fault = (number, tensor, do)

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def read(self) -> Iterator[Weight]:
        number, self._passes = self._passes, self._passes + 1
        with contextlib.closing(self._inner.read()) as weights:  # type: ignore[type-var]
            for at, weight in enumerate(weights):
                if self._fault is not None and self._fault[:2] == (number, at):
                    do, self._fault = self._fault[2], None
                    misfortune(do)
                yield weight


def misfortune(do: str) -> None:
    """``kill`` or ``stop`` this process at once, or ``raise``; or be ``slow``.

    ``slow PATH`` makes a file first, and ``raise PATH`` waits until it is there.
    """
    do, _, path = do.partition(" ")
    if do == "slow":
        if path:
            Path(path).touch()
        time.sleep(SLOW_SECONDS)
        return
    if do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if path:
        wait_until(Path(path).exists)
    raise RuntimeError("the source broke as it was told to")
