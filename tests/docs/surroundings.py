"""What an example of the pages is run in: real values for its placeholders, and what the reader is to bring.

It knows the placeholders that the pages use; it must not know any page, nor how an engine is started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

#: What pages write for an engine's address and for a checkpoint's path.
URL, CHECKPOINT = "http://127.0.0.1:8000", "CHECKPOINT"

#: The command line, run as a user does.
RANKCAST = [sys.executable, "-m", "rankcast"]


@dataclass(frozen=True)
class Surroundings:
    """The placeholders' values, and a trainer's module that fits the engine."""

    url: str
    checkpoint: Path
    model: Callable[[], nn.Module]

    def fill(self, text: str) -> str:
        """``text`` with real values in place of the placeholders."""
        return text.replace(URL, self.url).replace(CHECKPOINT, str(self.checkpoint))


def train_step(model: nn.Module) -> None:
    """Give the model other weights than before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
