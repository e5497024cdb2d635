"""One worker of the bench's fleet, as a process: a receiver over a model, and the copies that a push is compared with.

It knows its model, and one pipe with calls on it. It must not know who times what. Run as a program, with the pipe's
descriptor, a rank and a configuration: every message on the pipe is one call, answered by one message.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from case import LAYOUT, digest, fill

from rankcast import Receiver, Worker
from rankcast.engines.reference.config import parse_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.process import this_process
from rankcast.rollout.installer import LoaderInstaller
from rankcast.rollout.program import CopyProgram
from rankcast.transports.opening import open_any
from rankcast.wire.handles import Handle
from rankcast_oracle import checkpoint_shapes, touched


class Watched(LoaderInstaller):
    """Remembers the last copy program that it ran."""

    program: CopyProgram | None = None

    def copy(self, program: CopyProgram) -> None:
        self.program = program
        super().copy(program)


class BenchWorker:
    """What the worker can be asked for; each method takes and returns plain data."""

    def __init__(self, rank: int, engine: str, config: dict[str, Any]) -> None:
        self._config = config
        place = LAYOUT.place(rank)
        self._model = ReferenceModel(parse_config(config), place)
        self._arena = self._into_one_arena()
        worker = Worker(
            engine=engine,
            rank=rank,
            workers=LAYOUT.workers,
            dp=place.dp_index,
            pp=place.pp_index,
            tp=place.tp_index,
            ep=place.ep_rank,
            process=this_process(),
        )
        self._installer = Watched(self._model)
        self._receiver = Receiver(self._model, worker=worker, installer=self._installer)
        self._source: torch.Tensor | None = None
        self._views: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def _into_one_arena(self) -> torch.Tensor:
        """All parameters in one allocation, so that one contiguous copy over them can be timed without another."""
        own = list(self._model.parameters())
        arena = torch.zeros(sum(parameter.numel() for parameter in own), dtype=self._model.dtype)
        for parameter, place in zip(own, arena.split([parameter.numel() for parameter in own]), strict=True):
            parameter.data = place.view(parameter.shape)
        return arena

    def call(self, name: str, argument: Any) -> list[str]:
        """A call of the engine's; the faults, if any."""
        return [fault.message for fault in self._receiver.handle(name, argument).faults]

    def size(self) -> int:
        return self._arena.nbytes

    def expected(self, step: int) -> str:
        """The digest of what this worker's own loader makes of the whole tensors of ``step``."""
        shapes, names = checkpoint_shapes(self._config), touched(self._config, LAYOUT, self._receiver.worker.rank)
        for name in sorted(names):
            whole = torch.empty(shapes[name], dtype=self._model.dtype)
            fill(whole, name, step)
            self._model.load_weights([(name, whole)])
        return self.digest()

    def digest(self) -> str:
        return digest(dict(self._model.named_parameters()))

    def scrub(self) -> None:
        """Leave nothing of what was there."""
        self._arena.view(torch.int16).fill_(0x5A5A)

    def open_source(self, handle: dict[str, Any]) -> None:
        """Map a segment of as many bytes as all parameters have, to copy from."""
        self._opened = open_any(msgspec.convert(handle, Handle))
        self._source = self._opened.tensor("bfloat16", (self._arena.numel(),), 0)

    def copy_contiguous(self) -> None:
        assert self._source is not None
        self._arena.copy_(self._source)

    def take_views(self) -> int:
        """The boxes of the copy program that ran last, as plain pairs of views; returns how many."""
        assert self._installer.program is not None
        pairs = self._installer.program.pairs(dict(self._model.named_parameters()))
        into, out_of = zip(*pairs, strict=True)
        self._views = list(into), list(out_of)
        return len(pairs)

    def copy_views(self) -> None:
        assert self._views is not None
        torch._foreach_copy_(*self._views)

    def drop_views(self) -> None:
        self._views = self._installer.program = None


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    worker = BenchWorker(int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    torch.set_num_threads(1)
    pipe.send_bytes(b"null")
    while True:
        try:
            name, *arguments = msgspec.json.decode(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer = {"done": getattr(worker, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        pipe.send_bytes(msgspec.json.encode(answer))
    threading.Thread(target=os._exit, args=(0,)).start()


if __name__ == "__main__":
    main()
