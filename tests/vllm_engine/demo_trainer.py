"""One trainer rank of ``make demo-vllm``: ``python -m vllm_engine.demo_trainer RANK RANKS CHECKPOINT MEETING``.

It knows training in mixed precision and when to push; ``MEETING`` is a file through which the ranks find each other.
It must not know vLLM or how it spreads a model, nor judge whether a push was right: it saves what it holds, and
somebody else compares.
"""

from __future__ import annotations

import copy
import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import rankcast
from rankcast.cli.demo import messages
from rankcast.cli.demo.trainer import Trainer

WAIT_SECONDS = 60.0


class MixedTrainer:
    """The demo's trainer in float32, and the bfloat16 weights that it serves, which stay at their addresses."""

    def __init__(self, checkpoint: Path, rank: int, ranks: int) -> None:
        self._masters = Trainer(checkpoint, rank=rank, ranks=ranks, reduce=dist.all_reduce)
        self.served = copy.deepcopy(self._masters.model).to(torch.bfloat16)

    def step(self) -> float:
        """One optimizer step; returns the loss before it."""
        loss = self._masters.step()
        with torch.no_grad():
            for rounded, master in zip(self.served.parameters(), self._masters.model.parameters(), strict=True):
                rounded.copy_(master)
        return loss

    def probe(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Some text, and the float32 model's log-probability of each of its tokens but the first; a collective."""
        return self._masters.probe()

    def save(self, folder: Path) -> None:
        """What this rank serves, as one safetensors file."""
        folder.mkdir(parents=True)
        held = {name: parameter.detach() for name, parameter in self.served.named_parameters()}
        save_file(held, folder / "model.safetensors")


class Rank:
    """Does what it is told, command by command; equal commands on all ranks."""

    def __init__(self, trainer: MixedTrainer, rank: int, tell: Callable[[messages.Event], None]) -> None:
        self._trainer, self._rank, self._tell = trainer, rank, tell
        self._sync: rankcast.Sync | None = None

    def do(self, command: messages.Command) -> messages.Answer:
        """One command; whatever it raises ends this rank."""
        match command:
            case messages.Connect():
                self._sync = rankcast.connect(
                    command.url,
                    self._trainer.served,
                    mode=command.mode,
                    bucket_bytes=command.bucket_bytes,
                    timeout=WAIT_SECONDS,
                    progress=self._moving,
                )
            case messages.Step():
                assert self._sync is not None, "connect comes first"
                loss = self._trainer.step()
                self._trainer.save(Path(command.folder) / f"rank{self._rank}")
                tokens, log_probs = self._trainer.probe()
                report = self._sync.push(weight_version=command.weight_version)
                return messages.Stepped(loss=loss, probe_tokens=tokens, log_probs=log_probs, report=report)
            case messages.Close():
                self.close()
            case _:
                raise ValueError(f"a trainer rank of this demo does not know {type(command).__name__}")
        return messages.Done()

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def _moving(self, progress: rankcast.Progress) -> None:
        self._tell(
            messages.Moving(
                weight_version=progress.weight_version,
                stage=progress.stage,
                round=progress.round,
                rounds=progress.rounds,
                done=progress.done,
                total=progress.total,
            )
        )


def main(arguments: list[str]) -> None:
    """Answer the commands on standard input until they end."""
    # Only answers go to standard output, whatever a library may print.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def tell(message: messages.Event) -> None:
        answers.write(messages.encode(message))
        answers.flush()

    rank, ranks, checkpoint, meeting = int(arguments[0]), int(arguments[1]), Path(arguments[2]), arguments[3]
    wait = datetime.timedelta(seconds=WAIT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=wait)
    told = Rank(MixedTrainer(checkpoint, rank, ranks), rank, tell)
    try:
        tell(messages.Done())
        for line in sys.stdin.buffer:
            tell(told.do(messages.decode(line, messages.Command)))
    except rankcast.RankcastError as error:
        sys.exit(f"{type(error).__name__}: {error.message}")
    finally:
        told.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
