"""The worker processes of one fleet: how they are started, spoken to all at once, missed, and ended.

This module knows processes, channels and bounded waits. It must not know what the commands do, nor requests. Once one
worker is lost, or does not answer in time, the engine is over: its peers are ended too, since they hold a part of a
model that is no longer whole, and everything asked later is refused with the name of the worker that was lost.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from rankcast.engines.reference import messages
from rankcast.engines.reference.channel import Channel, ChannelClosed, checked
from rankcast.engines.reference.layout import Layout
from rankcast.engines.reference.nursery import Child, Nursery
from rankcast.errors import LimitError, NotServableError, RankcastError
from rankcast.topology import Worker, check_engine
from rankcast.wire.reports import error_of

#: How long the workers may take to start and load their checkpoint, in seconds.
START_SECONDS = 300.0
#: How long a worker may take to be gone once its channel is closed, before it is killed.
LEAVE_SECONDS = 1.0

R = TypeVar("R", bound=messages.Reply)


class WorkerProcesses:
    """Workers 0 to n-1 of one engine. One thread uses it, save for ``stop`` and ``wake``."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.lost: str | None = None
        self.identities: tuple[Worker, ...] = ()
        self._nursery: Nursery | None = None
        self._children: list[Child] = []
        self._channels: list[Channel] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._stopping = False

    # -- coming up ---------------------------------------------------------------------------------------------------

    def start(self, checkpoint: str, engine: str, secret: bytes | None, exchange_seconds: float) -> None:
        """Spawn the workers and wait until all have loaded the checkpoint.

        Raises the error with which a worker failed; then, as on every error, ``close`` is the caller's to call.
        """
        self._nursery = Nursery(_environment())
        for _ in range(self.layout.workers):
            self._spawn(self._nursery)
        setups = [
            messages.Setup(
                checkpoint=checkpoint,
                layout=self.layout,
                rank=rank,
                engine=engine,
                secret=secret,
                exchange_seconds=exchange_seconds,
            )
            for rank in range(self.layout.workers)
        ]
        hellos = self.exchange(setups, messages.Hello, seconds=START_SECONDS, together=False)
        self.identities = tuple(hello.worker for hello in hellos)
        check_engine(self.identities, where="the embedded fleet")
        join = messages.Join(port=hellos[0].port)
        self.exchange([join] * self.layout.workers, messages.Ready, seconds=START_SECONDS, together=True)

    def _spawn(self, nursery: Nursery) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            child = nursery.spawn(theirs)
        channel = Channel(ours)
        self._selector.register(channel, selectors.EVENT_READ, len(self._children))
        self._children.append(child)
        self._channels.append(channel)

    # -- speaking ----------------------------------------------------------------------------------------------------

    def exchange(
        self, commands: Sequence[messages.Command], kind: type[R], *, seconds: float, together: bool
    ) -> list[R]:
        """Give each worker its command, all at once, and return all replies, in order of rank.

        ``together`` says that the workers wait for one another inside the command: then, one being lost, the others'
        replies are not waited for. Otherwise every reply is collected before anything is concluded. Raises
        ``NotServableError`` when a worker is lost, is silent for ``seconds``, or the fleet stops, and the error of the
        first worker that failed.
        """
        self.check()
        replies: list[messages.Reply | None] = [None] * len(self._channels)
        # By identity: a command that is for everybody is encoded once. And all of them before the first is sent: what
        # cannot be sent to one worker must not reach the others.
        encoded = {id(command): checked(messages.encode(command)) for command in {id(c): c for c in commands}.values()}
        for rank, (channel, command) in enumerate(zip(self._channels, commands, strict=True)):
            channel.begin(encoded[id(command)])
            self._selector.modify(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
        waiting = set(range(len(self._channels)))
        deadline = time.monotonic() + seconds
        while waiting and not (together and self.lost):
            left = deadline - time.monotonic()
            if left <= 0:
                silent = sorted(waiting)
                self._lose(silent[0], f"did not answer within {seconds:g} s (silent: workers {silent})")
                break
            for key, events in self._selector.select(left):
                if key.data is None:
                    self._heed_wake()
                elif (reply := self._move(key.data, events)) is not None or key.data not in self._alive():
                    replies[key.data] = reply
                    waiting.discard(key.data)
        if self.lost is not None:
            self.end()
            raise NotServableError(self.lost)
        return [self._expected(rank, reply, kind) for rank, reply in enumerate(replies)]

    def watch(self, seconds: float) -> None:
        """Wait until woken, a worker dies, or ``seconds`` have passed; notes a dead worker in ``lost``."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(NotServableError):
                    self._heed_wake()
            elif self._move(key.data, selectors.EVENT_READ) is not None:
                self._lose(key.data, "spoke without being asked")
        if self.lost is not None:
            self.end()

    def check(self) -> None:
        """Raise ``NotServableError`` when a worker was lost."""
        if self.lost is not None:
            raise NotServableError(self.lost)

    def wake(self) -> None:
        """End a ``watch`` of another thread."""
        with contextlib.suppress(OSError):  # full: it will wake all the same; closed: there is nobody to wake
            self._waker.send(b"!")

    def stop(self) -> None:
        """Make the present exchange, and every later one, fail; may be called by a signal handler."""
        self._stopping = True
        self.wake()

    def lose(self, why: str) -> None:
        """Declare the engine over for a reason that is no single process's."""
        if self.lost is None:
            self.lost = f"{why}: restart the server"
        self.end()

    def _alive(self) -> set[int]:
        return {key.data for key in self._selector.get_map().values() if key.data is not None}

    def _move(self, rank: int, events: int) -> messages.Reply | None:
        """Move what can be moved between the server and one worker; its reply when that is complete."""
        channel = self._channels[rank]
        try:
            if events & selectors.EVENT_WRITE and channel.flush():
                self._selector.modify(channel, selectors.EVENT_READ, rank)
            if events & selectors.EVENT_READ and (frame := channel.poll()) is not None:
                reply: messages.Reply = messages.decode(frame, messages.Reply)
                return reply
        except ChannelClosed:
            self._lose(rank, self._cause(rank))
        except (LimitError, msgspec.DecodeError) as fault:
            self._lose(rank, f"sent what is no reply ({fault})")
        return None

    def _expected(self, rank: int, reply: messages.Reply | None, kind: type[R]) -> R:
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, messages.Failed):
            raise error_of(reply.fault, worker=self.label(rank))
        raise RankcastError(f"{self.label(rank)} answered {type(reply).__name__} where {kind.__name__} was due")

    def _heed_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        if self._stopping:
            raise NotServableError("the server is shutting down")

    # -- losing and ending -------------------------------------------------------------------------------------------

    def label(self, rank: int) -> str:
        """How messages name a worker, also before it has said who it is."""
        return self.identities[rank].label if self.identities else self.layout.place(rank).label

    def pid(self, rank: int) -> int:
        return self._children[rank].pid

    def _lose(self, rank: int, why: str) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._channels[rank])
        if self.lost is None:
            self.lost = f"{self.label(rank)} (pid {self.pid(rank)}) is lost, it {why}: restart the server"

    def _cause(self, rank: int) -> str:
        try:
            code = self._children[rank].wait(LEAVE_SECONDS)
        except TimeoutError:
            return "closed its channel"
        if code is None:
            return "ended"
        return f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with {code}"

    def end(self) -> None:
        """Let every worker go: a closed channel ends a worker, a kill one that is stopped. Repeating it is harmless."""
        for channel in self._channels:
            with contextlib.suppress(KeyError, ValueError):  # unregistered already, closed already
                self._selector.unregister(channel)
            channel.close()
        deadline = time.monotonic() + LEAVE_SECONDS
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                child.kill()
                with contextlib.suppress(TimeoutError):  # it cannot be ended while the kernel works for it
                    child.wait(LEAVE_SECONDS)

    def close(self) -> None:
        """``end``, and let go of the rest."""
        self.end()
        for child in self._children:
            child.close()
        if self._nursery is not None:
            self._nursery.close()
        self._selector.close()
        self._woken.close()
        self._waker.close()


def _environment() -> dict[str, str]:
    """What a worker inherits: the server's environment, less the secret, and this very rankcast on its path."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANKCAST_SECRET", "RANKCAST_SECRET_FILE")}
    source = str(Path(__file__).resolve().parents[3])  # the folder that holds the package
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH", "")]))
    kept["GLOO_SOCKET_IFNAME"] = "lo"
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept
