"""Checkpoints for tests: small configs, weights that make a wrong tensor show, and directories in Hugging Face's form.

Weights are raw bits as the oracle's (``checkpoint name -> unsigned array``); names and shapes are the oracle's too,
never the library's. ``as_torch`` and ``bits_of`` are the only places where bits become torch tensors and back.
"""

from __future__ import annotations

from checkpoints.configs import tiny_config
from checkpoints.directories import write_checkpoint
from checkpoints.tensors import as_torch, bits_of
from checkpoints.weights import scaled_weights

__all__ = ["as_torch", "bits_of", "scaled_weights", "tiny_config", "write_checkpoint"]
