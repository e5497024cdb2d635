"""A trainer group as a star: every rank has one connection, to rank 0, which passes on what concerns all.

This module knows epochs, the order of calls, who is waited for, and what a silent or closed connection means. It must
not know how connections are made, nor what the exchanged bytes say. A thread for each connection reads all the time, so
that a failure is heard of while this rank computes or talks to engines, and a sender is never held up by a busy rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

import msgspec

from rankcast.errors import RankcastError, TrainerError, travelling
from rankcast.process import provably_dead
from rankcast.trainer.group_base import TrainerGroup
from rankcast.trainer.group_link import PROMPTLY, Frame, Link, Peer

#: Rank 0 passes progress on this many times within one timeout.
_PULSES = 20
#: How often, in seconds, processes that are waited for are looked up: a forked child may keep a dead one's socket open.
_LOOK = 1.0


class StarGroup(TrainerGroup):
    """The ``TrainerGroup`` of several processes; ``form_group`` makes it.

    ``links`` are this rank's connections by rank (on rank 0 to all others, elsewhere to rank 0), ``peers`` all ranks in
    order. ``timeout`` is in seconds without progress of those waited for; other ranks than 0 wait a little longer, so
    that the rank which knows who is missing says so first.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], peers: Sequence[Peer], *, timeout: float) -> None:
        self.rank = rank
        self.size = len(peers)
        self._links = dict(links)
        self._peers = tuple(peers)
        self._timeout = timeout
        self._patience = timeout if rank == 0 else timeout * (1 + 2 / _PULSES) + 1.0
        self._changed = threading.Condition()
        # Sends that answer a call, and news of a rank that left, go out one after the other: a rank that left after a
        # call had all it needed must not spoil that call for the others.
        self._telling = threading.RLock()
        self._epoch = 0
        self._inbox: dict[int, deque[Frame]] = {peer: deque() for peer in links}
        self._begun: dict[int, int] = {}  # rank -> the epoch that it is done with
        self._go = 0
        self._failures: dict[int, str] = {}
        #: What rank 0 calls the epoch that it is in, and, elsewhere, what it called those that have failed.
        self._what = ""
        self._failed: dict[int, str] = {}
        self._died: str | None = None
        self._left: dict[int, str] = {}
        self._heard = dict.fromkeys(links, 0.0)
        self._pulsed = 0.0
        self._looked = 0.0
        self._closed = False
        self._readers = [
            threading.Thread(target=self._read, args=(peer, link), name=f"rankcast-rank-{peer}", daemon=True)
            for peer, link in self._links.items()
        ]
        for reader in self._readers:
            reader.start()

    # -- the calls ---------------------------------------------------------------------------------------

    def begin(self, what: str = "") -> None:
        with self._changed:
            if self.rank == 0:
                self._epoch += 1
                self._failures.clear()
                self._what = what
            else:
                self._pass_over(what)
            self._raise_failed(begins=True)
        if self.rank == 0:
            self._wait(lambda peer: peer in self._begun, "begin")
            with self._telling:
                self._begun.clear()
                self._send_all(Frame(self._epoch, "go"))
        else:
            self._send_all(Frame(self._epoch, "begin"))
            self._wait(lambda _: self._go > self._epoch, "begin", begins=what)
            with self._changed:
                self._epoch = self._go
                self._failures = {epoch: text for epoch, text in self._failures.items() if epoch >= self._epoch}
                self._failed = {epoch: what for epoch, what in self._failed.items() if epoch >= self._epoch}

    def gather(self, data: bytes, what: str) -> list[bytes]:
        return self._call("gather", what, data, lambda _: None)

    def broadcast(self, data: bytes, what: str) -> bytes:
        return self._call("broadcast", what, data if self.rank == 0 else b"", lambda _: data)[0]

    def exchange(self, data: bytes, what: str) -> list[bytes]:
        replies = self._call("exchange", what, data, msgspec.msgpack.encode)
        return replies if self.rank == 0 else msgspec.msgpack.decode(replies[0], type=list[bytes])

    def check(self) -> None:
        with self._changed:
            self._raise_failed()

    def fail(self, error: BaseException) -> None:
        text = error.message if isinstance(error, RankcastError) else str(error)
        if not isinstance(error, TrainerError):
            text = f"{self._peers[self.rank].label} raised {type(error).__name__}: {text}"
        with contextlib.suppress(Exception):
            self._fail(travelling(text))

    def pulse(self) -> None:
        now = time.monotonic()
        if self._closed or now - self._pulsed < self._timeout / _PULSES:
            return
        self._pulsed = now
        for link in self._links.values():
            link.send_promptly(Frame(self._epoch, "pulse"), 0.0)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for link in self._links.values():
            link.send_promptly(Frame(self._epoch, "close"))
            link.shut()
        for reader in self._readers:
            reader.join(PROMPTLY)
        for link in self._links.values():
            link.close()

    # -- how a call goes ---------------------------------------------------------------------------------

    def _call(self, kind: str, what: str, data: bytes, answer: Callable[[list[bytes]], bytes | None]) -> list[bytes]:
        """Everyone's data to rank 0, and rank 0's answer to everyone when it has one; what each rank then has."""
        label = f"{kind} {what!r}"
        with self._changed:
            # A rank may leave right after its part of this call: rank 0 sees in its wait whether something is missing.
            self._raise_failed(missing=self._links if self.rank else ())
        if self.rank == 0:
            gathered = [data, *(frame.data for frame in self._receive(range(1, self.size), label))]
            reply = answer(gathered)
            if reply is not None:
                self._send_all(Frame(self._epoch, "data", label, reply))
            return gathered
        self._send_all(Frame(self._epoch, "data", label, data))
        if kind == "gather":
            self.check()
            return []
        return [frame.data for frame in self._receive([0], label)]

    def _receive(self, peers: Sequence[int], label: str) -> list[Frame]:
        """The next frame of this epoch from each of ``peers``, all of which must be about ``label``."""

        def arrived(peer: int) -> bool:
            waiting = self._inbox[peer]
            while waiting and waiting[0].epoch < self._epoch:
                waiting.popleft()
            if waiting and waiting[0].what != label:
                self._raise(
                    f"{self._peers[self.rank].label} calls {label} while {self._peers[peer].label} calls "
                    f"{waiting[0].what}: every trainer rank must make the same calls in the same order"
                )
            if not waiting and self._begun.get(peer) == self._epoch:
                self._raise(
                    f"{self._peers[peer].label} begins another connect or push while {self._peers[self.rank].label} "
                    f"still waits for it in {label}: it must have raised without telling"
                )
            return bool(waiting)

        self._wait(arrived, label, peers)
        with self._changed:
            return [self._inbox[peer].popleft() for peer in peers]

    def _wait(
        self,
        arrived: Callable[[int], bool],
        label: str,
        peers: Sequence[int] | None = None,
        *,
        begins: str | None = None,
    ) -> None:
        """Until ``arrived`` for each of ``peers`` (default: all that have a link), or raise ``TrainerError``.

        ``begins`` is what a rank calls the epoch that it waits to begin.
        """
        missing = set(self._links if peers is None else peers)
        if self.rank == 0:  # those who wait for this rank wait for what it waits for
            self.pulse()
        with self._changed:
            since = time.monotonic()
            while True:
                before = len(missing)
                missing = {peer for peer in missing if not arrived(peer)}
                if not missing:
                    return
                now = time.monotonic()
                self._look_for_dead(missing, now)
                if begins is not None:
                    self._pass_over(begins)  # word of a failure may come only now
                self._raise_failed(begins=begins is not None, missing=missing)
                heard = now if len(missing) < before else max(self._heard[peer] for peer in missing)
                if heard > since:
                    since = heard
                    if self.rank == 0:
                        self.pulse()
                if now - since > self._patience:
                    self._raise(self._late(missing, label))
                self._changed.wait(min(self._patience - (now - since) + 0.01, _LOOK))

    def _late(self, missing: set[int], label: str) -> str:
        names = ", ".join(self._peers[peer].label for peer in sorted(missing))
        return (
            f"no progress from {names} for {self._timeout:g} s: {self._peers[self.rank].label} waits in {label}. Find "
            "out what it does (py-spy dump --pid), or give connect a longer timeout"
        )

    def _look_for_dead(self, missing: set[int], now: float) -> None:
        if now - self._looked < _LOOK:
            return
        self._looked = now
        for peer in sorted(missing):
            if provably_dead(self._peers[peer].process):
                self._lose(peer, f"{self._peers[peer].label} died")

    def _pass_over(self, what: str) -> None:
        """Leave behind what failed without this rank, if it was something else than ``what``."""
        for epoch in sorted(self._failures):
            if epoch > self._epoch and self._failed.get(epoch, what) != what:
                del self._failures[epoch], self._failed[epoch]
                self._epoch = epoch

    # -- failures ----------------------------------------------------------------------------------------

    def _raise(self, text: str) -> NoReturn:
        self._fail(text)
        raise TrainerError(text)

    def _raise_failed(self, *, begins: bool = False, missing: Collection[int] = ()) -> None:
        """Raise for a failure that concerns this rank now; a rank that begins is done with its current epoch.

        A rank that died is everyone's concern, one that left only when it is among the ``missing``.
        """
        if self._closed:
            raise TrainerError(f"{self._peers[self.rank].label} has closed this group: connect again")
        recent = [epoch for epoch in self._failures if epoch > self._epoch or (epoch == self._epoch and not begins)]
        if recent:
            text = self._failures[min(recent)]
            self._epoch = min(recent)
            raise TrainerError(text)
        gone = self._died or next((self._left[peer] for peer in missing if peer in self._left), None)
        if gone is not None:
            self._raise(gone)

    def _fail(self, text: str, *, epoch: int | None = None, origin: int | None = None) -> None:
        """Note that ``epoch`` has failed, once, and tell every rank but ``origin``."""
        with self._changed:
            epoch = self._epoch if epoch is None else epoch
            if self._closed or epoch in self._failures or epoch < self._epoch:
                return
            self._failures[epoch] = text
            self._changed.notify_all()
        self._tell(Frame(epoch, "fail", text, travelling(self._what).encode()), but=origin)

    def _lose(self, peer: int, text: str) -> None:
        """Note for good that ``peer`` died, unless it left in order before; rank 0 tells the others."""
        with self._changed:
            if self._closed or self._died is not None or peer in self._left:
                return
            self._died = text
            self._changed.notify_all()
        if self.rank == 0:
            self._tell(Frame(self._epoch, "lost", text), but=peer)

    def _tell(self, frame: Frame, *, but: int | None) -> None:
        with self._telling:
            for peer, link in self._links.items():
                if peer != but:
                    link.send_promptly(frame)

    def _send_all(self, frame: Frame) -> None:
        with self._telling:
            for peer, link in self._links.items():
                try:
                    link.send(frame)
                except OSError as fault:
                    self._lose(peer, f"{self._peers[peer].label} cannot be reached any more: {fault}")

    # -- what arrives ------------------------------------------------------------------------------------

    def _read(self, peer: int, link: Link) -> None:
        try:
            while True:
                self._take(peer, link.receive())
        except (EOFError, OSError, ValueError, msgspec.MsgspecError) as fault:
            why = "" if isinstance(fault, (EOFError, ConnectionResetError)) else f" ({fault})"
            self._lose(peer, f"{self._peers[peer].label} died: its connection to {self._other(peer)} ended{why}")

    def _other(self, peer: int) -> str:
        return "rank 0" if peer else f"rank {self.rank}"

    def _take(self, peer: int, frame: Frame) -> None:
        with self._changed:
            self._heard[peer] = time.monotonic()
            match frame.kind:
                case "data" if frame.epoch >= self._epoch:
                    self._inbox[peer].append(frame)
                case "begin":
                    self._begun[peer] = frame.epoch
                case "go":
                    self._go = frame.epoch
                case "close":
                    self._left[peer] = f"{self._peers[peer].label} has left the group"
            self._changed.notify_all()
        match frame.kind:
            case "fail":
                if self.rank and frame.data:
                    self._failed[frame.epoch] = frame.data.decode()
                self._fail(frame.what, epoch=frame.epoch, origin=peer)
            case "lost":
                self._lose(peer, frame.what)
