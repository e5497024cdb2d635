"""One trainer rank of the demo, in a process of its own: ``python -m rankcast.cli.demo.trainer RANK RANKS CHECKPOINT``.

This module knows training steps and when to push. It must not know the fleet's layout, nor judge whether a push was
right: it saves what it holds, and somebody else compares. What it uses of rankcast is what any trainer would use.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch._C._distributed_c10d import TCPStore

from rankcast.cli.demo import messages
from rankcast.cli.demo.expert_sum import alone
from rankcast.cli.demo.model import TrainedModel
from rankcast.engines.reference.config import read_config
from rankcast.errors import RankcastError
from rankcast.telemetry.progress import Progress
from rankcast.trainer.connect import connect
from rankcast.trainer.sources import ModuleSource
from rankcast.trainer.sync import Sync

#: Sequences and tokens of a batch.
BATCH, LENGTH = 8, 33
#: How many different tokens the text to be learned has, each always followed by the same other one.
CYCLE = 64
#: How long ranks wait for each other, in seconds.
WAIT_SECONDS = 60.0


class Trainer:
    """A model, its optimizer and the text it learns; equal calls on all ranks."""

    def __init__(
        self, checkpoint: Path, *, rank: int = 0, ranks: int = 1, reduce: Callable[[torch.Tensor], None]
    ) -> None:
        config = read_config(checkpoint)
        share, rest = divmod(config.num_experts, ranks)
        first = rank * share + min(rank, rest)
        self.model = TrainedModel(config, range(first, first + share + (rank < rest)), reduce)
        _load(self.model, checkpoint / "model.safetensors")
        # The decay moves every weight at every step, also those of an expert to which no token was routed: a tensor
        # that was not pushed cannot go unnoticed.
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self._random = torch.Generator().manual_seed(1)
        self._text = torch.randperm(config.vocab_size, generator=self._random)[:CYCLE]

    def step(self) -> float:
        """One optimizer step on a new batch, the same on every rank; returns the loss before it."""
        starts = torch.randint(CYCLE, (BATCH, 1), generator=self._random)
        batch = self._text[(starts + torch.arange(LENGTH)) % CYCLE]
        self._optimizer.zero_grad()
        loss = self.model.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self._optimizer.step()
        return loss.item()

    def probe(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Some of the text, and the model's log-probability of each of its tokens but the first."""
        tokens = self._text[:16]
        with torch.no_grad():
            scores = self.model(tokens[None, :-1])[0]
        found = scores.gather(1, tokens[1:, None])[:, 0]
        return tuple(tokens.tolist()), tuple(found.tolist())

    def save(self, folder: Path) -> None:
        """What this rank holds, as one safetensors file."""
        folder.mkdir(parents=True)
        held = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        save_file(held, folder / "model.safetensors")


def _load(model: TrainedModel, path: Path) -> None:
    with safe_open(path, framework="pt") as stored, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored.get_tensor(name))


class _Rank:
    """Does what it is told, command by command."""

    def __init__(self, rank: int, ranks: int, checkpoint: Path, tell: Callable[[messages.Event], None]) -> None:
        self._rank, self._ranks, self._checkpoint, self._tell = rank, ranks, checkpoint, tell
        self._store = self._listen() if rank == 0 else None
        self._trainer: Trainer | None = None
        self._sync: Sync | None = None

    def _listen(self) -> TCPStore:
        # Port 0: whoever picks a free port first and lets others listen on it later may find it taken.
        store = TCPStore("127.0.0.1", 0, self._ranks, is_master=True, timeout=_WAIT, wait_for_workers=False)
        self._tell(messages.Listening(port=store.port))
        return store

    def do(self, command: messages.Command) -> messages.Answer:
        """One command; whatever it raises ends this rank."""
        match command:
            case messages.Meet(port=port):
                store = self._store or TCPStore("127.0.0.1", port, self._ranks, is_master=False, timeout=_WAIT)
                dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._ranks, timeout=_WAIT)
                reduce = dist.all_reduce if self._ranks > 1 else alone
                self._trainer = Trainer(self._checkpoint, rank=self._rank, ranks=self._ranks, reduce=reduce)
            case messages.Connect():
                source = ModuleSource(self._loaded.model)
                self._sync = connect(
                    command.url,
                    source,
                    mode=command.mode,
                    bucket_bytes=command.bucket_bytes,
                    timeout=WAIT_SECONDS,
                    progress=self._moving,
                )
            case messages.Step():
                assert self._sync is not None, "connect comes first"
                loss = self._loaded.step()
                tokens, log_probs = self._loaded.probe()
                self._loaded.save(Path(command.folder) / f"rank{self._rank}")
                report = self._sync.push(weight_version=command.weight_version)
                return messages.Stepped(loss=loss, probe_tokens=tokens, log_probs=log_probs, report=report)
            case messages.Close():
                self.close()
        return messages.Done()

    @property
    def _loaded(self) -> Trainer:
        assert self._trainer is not None, "the ranks meet first"
        return self._trainer

    def _moving(self, progress: Progress) -> None:
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

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None


_WAIT = datetime.timedelta(seconds=WAIT_SECONDS)


def main(arguments: list[str]) -> None:
    """Answer the commands on standard input until they end."""
    # Only answers go to standard output, whatever a library may print.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    rank, ranks, checkpoint = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    trainer = _Rank(rank, ranks, checkpoint, lambda event: _write(answers.fileno(), messages.encode(event)))
    try:
        for line in sys.stdin.buffer:
            answer = trainer.do(messages.decode(line, messages.Command))
            _write(answers.fileno(), messages.encode(answer))
    except RankcastError as error:
        sys.exit(f"{type(error).__name__}: {error.message}")
    finally:
        trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main(sys.argv[1:])
