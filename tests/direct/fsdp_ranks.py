"""The ranks of ``fsdp_trainer`` as processes, called all at once, and what they gathered as a checkpoint.

It knows the pipe between a test and a rank. It must not know engines, nor what a push is expected to do.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fleets import environment
from oracle import checkpoint_shapes

RANKS = 2
ANSWER_SECONDS = 180.0


class FsdpTrainer:
    """The ranks; every call is made by all of them at once."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        own = {"GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(Path(__file__).with_name("fsdp_trainer.py"))]
        self.folder = folder
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank), str(RANKS), str(folder), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment(), **own},
            )
            for rank in range(RANKS)
        ]

    def all(self, call: str, *arguments: Any) -> list[Any]:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([call, *arguments]) + "\n")
            rank.stdin.flush()
        answers = []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            ready = select.select([rank.stdout], [], [], ANSWER_SECONDS)[0]
            assert ready, f"trainer rank {number} has not answered {call} within {ANSWER_SECONDS} s"
            answers.append(json.loads(rank.stdout.readline() or '{"error": "it died"}'))
        assert not [said["error"] for said in answers if "error" in said], answers
        return [said["done"] for said in answers]

    def stop(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()


@contextmanager
def started_trainer(config: dict[str, Any], folder: Path) -> Iterator[FsdpTrainer]:
    """Ranks that train a model of ``config`` and leave their files in ``folder``; ended at the end."""
    trainer = FsdpTrainer(config, folder)
    try:
        yield trainer
    finally:
        trainer.stop()


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
