"""One worker of real four-process engines: ``python model_gloo_worker.py RANK DIRECTORY``.

Loads the checkpoint in DIRECTORY at each of the layouts in DIRECTORY/task.json in turn, and leaves its results there.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rankcast.engines.reference.checkpoint import iterate_checkpoint
from rankcast.engines.reference.comm import GroupComm
from rankcast.engines.reference.config import read_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import Layout


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    task = json.loads((directory / "task.json").read_text())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'rendezvous'}",
        rank=rank,
        world_size=task["workers"],
        timeout=timedelta(seconds=60),
    )
    for number, layout in enumerate(task["layouts"]):
        model = ReferenceModel(read_config(directory), Layout(**layout).place(rank))
        model.load_weights(iterate_checkpoint(directory))
        comm = GroupComm(model.place, timeout=60)
        log_probs = model(torch.tensor(task["token_ids"]), comm)
        if log_probs is not None:
            np.save(directory / f"log_probs.{number}.{rank}.npy", log_probs.numpy())
        done = model.generate(task["token_ids"], task["new"], comm)
        (directory / f"done.{number}.{rank}.json").write_text(json.dumps([done.token_ids, done.log_probs]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
