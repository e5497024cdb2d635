"""Trainer ranks as real processes that connect and push as a test tells them, one call at a time.

It knows what such a rank can be asked for; it must not know what a push ought to do. Run as a program it is one rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleets import environment
from forked_ranks import Forked
from line_ranks import ANSWER_SECONDS, LineRanks, claim_stdout, serve
from rankcast.engines.reference.nursery import Nursery


class Trainers(LineRanks):
    """``size`` trainer ranks in one gloo process group; close with ``stop``.

    They are children of ``nursery``, or without one programs of their own, run by the command ``within``.
    """

    def __init__(
        self,
        size: int,
        folder: Path,
        config: dict[str, Any],
        *,
        nursery: Nursery | None = None,
        within: Sequence[str] = (),
    ) -> None:
        own = {"TRAINER_STORE": str(folder / "store"), "TRAINER_CONFIG": json.dumps(config)}
        self._nursery = nursery
        super().__init__([*within, sys.executable, __file__], size, {**environment(), **own})

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        if self._nursery is None:
            return super()._start(command, environment)
        return Forked(self._nursery, command[-2:], environment)

    def one(self, rank: int, call: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """One rank makes ``call``; its answer."""
        self.ask(rank, call, *arguments)
        return self.answer(rank, seconds)

    def ended(self, rank: int, seconds: float = ANSWER_SECONDS) -> int:
        """Wait until ``rank`` has died; its exit status."""
        return self.processes[rank].wait(seconds)


@contextlib.contextmanager
def trainers(size: int, folder: Path, config: dict[str, Any], **options: Any) -> Iterator[Trainers]:
    folder.mkdir(parents=True, exist_ok=True)
    with Trainers(size, folder, config, **options) as made:
        yield made


class _Rank:
    """What a rank can be asked for."""

    def __init__(self, rank: int, size: int, config: dict[str, Any]) -> None:
        self.rank, self.size, self.config = rank, size, config
        self.sync: Any = None
        self.clients: list[Any] = []

    def connect(self, urls: list[str], source: str, which: list[Any], options: dict[str, Any]) -> str:
        """Join the fleet with a ``source`` (see ``sharded``) of the weights ``which``; says the kind of segments."""
        import rankcast
        from end_to_end.sharded import Faulty, held_names, sharded_source, weights_of
        from end_to_end.watched import Watched

        weights = weights_of(self.config, which)
        names = held_names(self.config, list(weights), self.rank, self.size)
        inner, self._become = sharded_source(source, {name: weights[name] for name in names}, self.rank, self.size)
        self._names = names
        self.source = Faulty(inner)
        options = {"timeout": 60, "bucket_bytes": 16384, **options}
        # Only rank 0's target counts: the others say none that could be met.
        self.clients = [Watched(url, timeout=options["timeout"]) for url in urls] if self.rank == 0 else []
        self.sync = rankcast.connect(self.clients or "http://127.0.0.1:9", self.source, **options)
        return str(self.sync._exports.kind)

    def push(self, version: str, which: list[Any]) -> dict[str, Any]:
        """Take the weights ``which`` and push them; the report."""
        import msgspec

        from end_to_end.sharded import weights_of

        weights = weights_of(self.config, which)
        self._become({name: weights[name] for name in self._names})
        report = self.sync.push(version)
        return dict(msgspec.to_builtins(report))

    def overlapped(self) -> list[int]:
        """A round that is staged while the one before it is installed, and where in a pass its first tensor comes."""
        exports = self.sync._exports
        places = [exports.rounds.rounds[exports.rest.index[name]] for name in self.source.manifest().names]
        turn = next(turn for turn in places if turn and not exports.fills_again(turn))
        return [turn, places.index(turn)]

    def miscount(self) -> None:
        """Be one push ahead of the other ranks, as a rank is that pushed while the others did not."""
        self.sync._exports.announce("only here")

    def pushes(self, count: int) -> dict[str, int]:
        """Push ``count`` times; what this process uses then."""
        for number in range(count):
            self.push(str(number), ["unique", number % 3])
        return self.usage()

    def arm(self, number: int, tensor: int, do: str) -> None:
        """The source is to ``do`` something at a tensor of a pass, see ``Faulty``."""
        self.source.arm(number, tensor, do)

    def arm_call(self, when: str, kind: str, do: str, nth: int = 0) -> None:
        """Rank 0 is to ``do`` something ``when`` (before, after) it makes its nth next call of ``kind``."""
        from end_to_end.sharded import misfortune

        self.clients[0].at(when, kind, lambda: misfortune(do), nth)

    def sent(self) -> list[list[list[Any]]]:
        """For each engine what was sent since the last time: kind, bytes, and of entries the bodies by rank."""
        from end_to_end.watched import bodies

        said = []
        for client in self.clients:
            own = ("prepare", "install", "abort")
            said.append([[s.kind, s.nbytes, bodies(s.body) if s.kind in own else None] for s in client.sent])
            client.sent.clear()
        return said

    def forbid_pickle(self) -> None:
        """From now on whoever pickles anything here, or unpickles, raises."""
        import multiprocessing.reduction
        import pickle

        import torch

        def forbidden(*arguments: Any, **named: Any) -> Any:
            raise AssertionError("something was pickled")

        for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler", "_Pickler", "_Unpickler"):
            setattr(pickle, name, forbidden)
        multiprocessing.reduction.ForkingPickler.dumps = forbidden  # type: ignore[method-assign]
        multiprocessing.reduction.ForkingPickler.loads = forbidden  # type: ignore[assignment]
        torch.save = torch.load = forbidden  # type: ignore[assignment]
        for name in [name for name in dir(torch.distributed) if "object" in name and not name.startswith("_")]:
            setattr(torch.distributed, name, forbidden)

    def usage(self) -> dict[str, int]:
        """Descriptors, threads, shared segments (open and mapped) and resident bytes of this process."""
        from end_to_end.seen import usage

        return usage(os.getpid())

    def close(self) -> None:
        self.sync.close()
        self.sync = None


def be_rank(rank: int, size: int) -> None:
    """Be one rank; does not return."""
    import torch.distributed as dist

    from rankcast.errors import RankcastError

    replies = claim_stdout()
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{os.environ['TRAINER_STORE']}", rank=rank, world_size=size)
    own = _Rank(rank, size, json.loads(os.environ["TRAINER_CONFIG"]))
    serve(own, replies, (RankcastError, RuntimeError))
    os._exit(0)  # torch's process group waits at exit for ranks that are dead


if __name__ == "__main__":
    be_rank(int(sys.argv[1]), int(sys.argv[2]))
