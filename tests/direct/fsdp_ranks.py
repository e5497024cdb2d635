"""The ranks of ``fsdp_trainer`` as processes, called all at once, and what they gathered as a checkpoint.

It knows how they are started. It must not know engines, nor what a push is expected to do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fleets import environment
from line_ranks import ObedientRanks
from oracle import checkpoint_shapes

RANKS = 2


class FsdpTrainer(ObedientRanks):
    """Ranks that train a model of ``config`` and leave their files in ``folder``; a context that ends them."""

    seconds = 180.0

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        program = str(Path(__file__).with_name("fsdp_trainer.py"))
        super().__init__([sys.executable, program, str(folder), json.dumps(config)], RANKS, environment())


def checkpoint_of(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The checkpoint's tensors, from a module's: an expert's gate lies above its up, and its down lies alone."""
    packed = np.load(path)
    found: dict[str, Any] = {}
    for name in checkpoint_shapes(config):
        if ".experts." not in name:
            found[name] = packed[name]
            continue
        layer, expert, kind = name.split(".")[2], int(name.split(".")[5]), name.split(".")[6]
        prefix = f"model.layers.{layer}.mlp.experts"
        rows = config["moe_intermediate_size"]
        if kind == "down_proj":
            found[name] = packed[f"{prefix}.down_proj"][expert]
        else:
            start = 0 if kind == "gate_proj" else rows
            found[name] = packed[f"{prefix}.gate_up_proj"][expert, start : start + rows]
    return {name: np.ascontiguousarray(bits) for name, bits in found.items()}
