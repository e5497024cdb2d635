"""What the reader of the page's script for ``torchrun`` brings: a module that fits the pages' engine, sharded by FSDP2.

It knows the engine's checkpoint. It must not know the script.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import fully_shard

from checkpoints import scaled_weights, tiny_config
from docs.surroundings import train_step
from fleets_inprocess import Trained

__all__ = ["build_model", "train_step"]


def build_model() -> nn.Module:
    config = tiny_config()
    model = Trained(scaled_weights(config, seed=2), str(config["dtype"]))
    fully_shard(model)
    return model
