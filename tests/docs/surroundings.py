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

from control.raw_server import CERTIFICATE

#: What pages write for an engine's address, for the same behind TLS, for who signed its certificate, and for a
#: checkpoint's path.
URL, SECURE_URL, AUTHORITY, CHECKPOINT = (
    "http://127.0.0.1:8000",
    "https://127.0.0.1:8443",
    "engine-ca.pem",
    "CHECKPOINT",
)

#: The command line, run as a user does.
RANKCAST = [sys.executable, "-m", "rankcast"]


@dataclass(frozen=True)
class Surroundings:
    """The placeholders' values, and a trainer's module that fits the engine."""

    url: str
    secure_url: str
    checkpoint: Path
    model: Callable[[], nn.Module]

    def fill(self, text: str) -> str:
        """``text`` with real values in place of the placeholders."""
        values = {
            URL: self.url,
            SECURE_URL: self.secure_url,
            AUTHORITY: str(CERTIFICATE),
            CHECKPOINT: str(self.checkpoint),
        }
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        return text


def train_step(model: nn.Module) -> None:
    """Give the model other weights than before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
