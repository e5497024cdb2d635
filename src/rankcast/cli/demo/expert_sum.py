"""The two ends of an expert-parallel layer: what is copied to every trainer rank, and what is summed over them.

This module knows gradients: a value that every rank uses has the sum of the ranks' gradients, and a sum over ranks
hands its own gradient to every term. It must not know what is computed in between, nor how ranks reach each other: a
``Reduce`` sums a tensor over them in place. Both ends run a collective, so every rank must go through both, with the
same shapes, whether or not a token was routed to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Sums a dense tensor over all trainer ranks, in place.
Reduce = Callable[[torch.Tensor], None]


def alone(tensor: torch.Tensor) -> None:
    """The ``Reduce`` of a trainer of one rank."""


def copied_to_ranks(reduce: Reduce, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensors`` as they are; backward, their gradients summed over the ranks, all in one collective."""
    copies: tuple[torch.Tensor, ...] = _CopiedToRanks.apply(reduce, *tensors)  # type: ignore[no-untyped-call]  # torch
    return copies


def summed_over_ranks(reduce: Reduce, partial: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' ``partial``, equal on all of them; backward, the gradient as it is."""
    total: torch.Tensor = _SummedOverRanks.apply(reduce, partial)  # type: ignore[no-untyped-call]  # torch's own
    return total


class _CopiedToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduce: Reduce, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.reduce = reduce
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        ctx.reduce(flat)
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        return None, *(piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True))


class _SummedOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduce: Reduce, partial: torch.Tensor) -> torch.Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradients[0]
