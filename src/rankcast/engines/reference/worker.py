"""One worker process of the embedded fleet, from the socket that it is born with.

This module knows how a worker comes up, which command goes to the model and which to the receiver, and that it must not
outlive its server. It must not know HTTP, other workers' entries, or when a forward pass is due: the server says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rankcast.engines.reference import messages
from rankcast.engines.reference.channel import Channel, ChannelClosed
from rankcast.engines.reference.checkpoint import iterate_checkpoint
from rankcast.engines.reference.comm import Comm, GroupComm, SingleComm
from rankcast.engines.reference.config import read_config
from rankcast.engines.reference.decoder import ReferenceModel
from rankcast.engines.reference.layout import WorkerPlace
from rankcast.engines.reference.parts import worker_parts
from rankcast.errors import NotServableError, RankcastError, SourceError
from rankcast.manifest import listed
from rankcast.process import this_process
from rankcast.rollout.receiver import Receiver
from rankcast.topology import Worker, engine_rank
from rankcast.wire.reports import Fault


class WorkerProcess:
    """The state of one worker: its model, its receiver, and its side of the exchanges with other workers."""

    def __init__(self, setup: messages.Setup) -> None:
        self._setup = setup
        self._place = setup.layout.place(setup.rank)
        self.worker = identity(self._place, setup.engine)
        self._store: Any = None  # a store of torch's, which its stubs hide
        self._comm: Comm = SingleComm()

    def hello(self) -> messages.Hello:
        """Says who this is; worker 0 of several opens the store at which they meet."""
        workers = self._setup.layout.workers
        if workers == 1 or self._place.rank != 0:
            return messages.Hello(worker=self.worker)
        # A store that makes its own socket listens on every address of the machine.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = self._open_store(port, listener.detach())
        return messages.Hello(worker=self.worker, port=port)

    def join(self, command: messages.Join) -> messages.Ready:
        """Meets the others, loads the checkpoint and makes the receiver."""
        limit = timedelta(seconds=self._setup.exchange_seconds)
        config = read_config(self._setup.checkpoint)
        if command.port is not None:
            workers = self._setup.layout.workers
            store = self._store or self._open_store(command.port)
            dist.init_process_group("gloo", store=store, rank=self._place.rank, world_size=workers, timeout=limit)
            self._comm = GroupComm(self._place, timeout=self._setup.exchange_seconds)
        self._model = ReferenceModel(config, self._place)
        self._load(worker_parts(config, self._place).parts)
        self._receiver = Receiver(
            self._model, worker=self.worker, load_weights=self._model.load_weights, secret=self._setup.secret
        )
        return messages.Ready()

    def _open_store(self, port: int, listener: int | None = None) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it without saying so
            "127.0.0.1",
            port,
            self._setup.layout.workers,
            is_master=listener is not None,
            timeout=timedelta(seconds=self._setup.exchange_seconds),
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def _load(self, needed: Iterable[str]) -> None:
        seen: set[str] = set()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in iterate_checkpoint(self._setup.checkpoint):
                seen.add(name)
                yield name, tensor

        self._model.load_weights(weights())
        absent = [name for name in needed if name not in seen]
        if absent:
            raise SourceError(
                f"{self._setup.checkpoint} lacks tensors of {self.worker.label}: {listed(absent)}", tensor=absent[0]
            )

    def answer(self, command: messages.Command) -> messages.Reply:
        """Does one command. Raises what goes wrong, other than in a ``Call``, whose faults are in its report."""
        match command:
            case messages.Join():
                return self.join(command)
            case messages.Call():
                argument = msgspec.json.decode(command.argument)
                return messages.Answer(report=self._receiver.handle(command.call, argument))
            case messages.Step():
                return self._step(command)
            case messages.Checksum():
                return messages.Checksums(parameters=checksums(self._model))
            case messages.SetVersion():
                self._receiver.update_weight_version(command.weight_version)
                return messages.Done()
            case messages.Setup():
                raise RankcastError(f"{self.worker.label} was set up already")

    def _step(self, command: messages.Step) -> messages.Chosen:
        if not self._receiver.servable:
            # The server asks nobody while one worker is unfit; this is the last line of defence.
            raise NotServableError(f"{self.worker.label} is not servable (state {self._receiver.state})")
        tokens = torch.tensor(command.token_ids, dtype=torch.int64)
        scores = self._model(tokens, self._comm)
        if scores is None or self._place.tp_index != 0:
            return messages.Chosen()
        best = scores[-1].argmax()
        prompt = scores[:-1].gather(1, tokens[1:, None])[:, 0].tolist() if command.prompt_log_probs else ()
        return messages.Chosen(token=int(best), log_prob=float(scores[-1, best]), prompt_log_probs=tuple(prompt))


def identity(place: WorkerPlace, engine: str) -> Worker:
    """What the worker at ``place``, which is this process, says of itself."""
    layout = place.layout
    replica = layout.pp * layout.tp
    rank = engine_rank(dp_index=place.dp_index, world_size=replica, rank=place.pp_index * layout.tp + place.tp_index)
    return Worker(
        engine=engine,
        rank=rank,
        workers=layout.workers,
        dp=place.dp_index,
        pp=place.pp_index,
        tp=place.tp_index,
        ep=place.ep_rank,
        process=this_process(),
    )


def checksums(model: torch.nn.Module) -> dict[str, messages.ParameterChecksum]:
    """A checksum of every parameter, by name."""
    found: dict[str, messages.ParameterChecksum] = {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(flat.numpy().data).hexdigest()
        dtype = str(parameter.dtype).removeprefix("torch.")
        found[name] = messages.ParameterChecksum(digest, dtype, tuple(parameter.shape))
    return found


def serve(channel: Channel) -> None:
    """Answer commands until the server is gone."""
    setup = messages.decode(channel.receive(), messages.Setup)
    try:
        process = WorkerProcess(setup)
        channel.send(messages.encode(process.hello()))
    except Exception as fault:  # whatever it is, the server must hear of it
        channel.send(messages.encode(messages.Failed(fault=Fault.of(fault))))
        return
    while True:
        command = messages.decode(channel.receive(), messages.Command)
        try:
            reply = process.answer(command)
        except Exception as fault:  # one command, one reply, or every later one is out of step
            reply = messages.Failed(fault=Fault.of(fault))
        channel.send(messages.encode(reply))


def die_with(descriptor: int) -> None:
    """End this process at once when the peer of ``descriptor`` is gone, whatever it is doing then."""

    def watch() -> None:
        hangup = select.poll()
        hangup.register(descriptor, 0)  # a hangup is reported unasked; what there is to read is not ours to look at
        while not hangup.poll():
            pass
        os._exit(0)

    threading.Thread(target=watch, name="watch-server", daemon=True).start()


def main(descriptor: int) -> None:
    """Serve over ``descriptor`` until the server is gone; does not return."""
    # Ctrl-C at a terminal reaches every process of the fleet: the server's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    die_with(connection.fileno())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with contextlib.suppress(ChannelClosed):
        serve(Channel(connection))
    # Not by way of torch's destructors, which may wait for peers that are gone.
    os._exit(0)
