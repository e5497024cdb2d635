"""Weights for a server under test: a bare payload over shared memory, and what transformers says of a checkpoint.

It knows the seed's form of an entry; it must not know servers or what a test expects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM

from rankcast.transports.shm import create_segment

Bits = np.ndarray[Any, Any]


@contextlib.contextmanager
def bare_payload(weights: Mapping[str, Bits], dtype: str = "float32") -> Iterator[dict[str, Any]]:
    """One bare entry that names every tensor, whose bytes lie in a segment that lives as long as the context."""
    locations, end = [], 0
    for bits in weights.values():
        locations.append([0, end])
        end += -(-bits.nbytes // 64) * 64
    with create_segment(end) as segment:
        for (_, start), bits in zip(locations, weights.values(), strict=True):
            segment.memory[start : start + bits.nbytes] = torch.from_numpy(bits.reshape(-1).view(np.uint8).copy())
        yield {
            "names": list(weights),
            "dtype_names": [dtype] * len(weights),
            "shapes": [list(bits.shape) for bits in weights.values()],
            "segments": [msgspec.to_builtins(segment.handle)],
            "locations": locations,
        }


def transformers_log_probs(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """Log-probs [T, vocab] of the next token after each of ``token_ids``, by transformers' own model."""
    model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), dim=-1)
