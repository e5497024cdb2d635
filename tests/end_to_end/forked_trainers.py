"""Trainer ranks as a nursery forks them: all that a rank needs is loaded here, once.

It knows how a forked process becomes a rank. It must not know what the rank can be asked for.
"""

from __future__ import annotations

import torch
import torch.distributed

import rankcast.control.report_channel
import rankcast.trainer.connect  # noqa: F401
from end_to_end import seen, sharded, watched  # noqa: F401
from end_to_end.trainers import be_rank
from forked_ranks import told

torch.set_num_threads(1)


def main(descriptor: int) -> None:
    """Be the rank that was forked; does not return."""
    rank, size = map(int, told(descriptor))
    be_rank(rank, size)
