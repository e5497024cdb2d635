"""The demo's trainer ranks as threads of one process: the same code, another way to add tensors up.

It knows how ranks are run side by side and joined. It must not know what a test asks of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

WAIT_SECONDS = 60.0

T = TypeVar("T")


def on_ranks(ranks: int, work: Callable[[int, Callable[[torch.Tensor], None]], T]) -> list[T]:
    """``work(rank, reduce)`` on ``ranks`` threads at once; their results by rank.

    A rank that raises, or does not come to a sum that another waits for, breaks the sum for all.
    """
    barrier = threading.Barrier(ranks, timeout=WAIT_SECONDS)
    terms: list[torch.Tensor | None] = [None] * ranks

    def run(rank: int) -> T:
        def reduce(tensor: torch.Tensor) -> None:
            terms[rank] = tensor.clone()
            barrier.wait()
            total = sum(term for term in terms if term is not None)
            assert {term.shape for term in terms if term is not None} == {tensor.shape}
            barrier.wait()
            tensor.copy_(total)

        try:
            return work(rank, reduce)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
