"""What trainer ranks can say to each other, and the group of one.

This module knows the contract of a trainer group. It must not know how bytes get from one rank to another, nor what
they mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class TrainerGroup(ABC):
    """The trainer ranks of one sync, as this rank sees them; ``rank`` is 0..``size``-1, rank 0 leads.

    Every rank makes the same calls with the same ``what`` in the same order; ``what`` says, for messages, what is being
    waited for. A rank that raises calls ``fail``. Then every call here, on every rank, ends: with its result, or with
    ``TrainerError`` when another rank failed, died, called something else, or made no progress for the timeout that the
    group was formed with. Nothing here pickles: what travels are the caller's bytes.

    Only the thread that drives a push calls it, except for ``pulse``, ``check`` and ``fail``.
    """

    rank: int
    size: int

    @abstractmethod
    def begin(self, what: str = "") -> None:
        """Begin a new epoch, in which what went wrong in earlier ones no longer counts: one for each connect or push.

        ``what`` is called the same on every rank. A rank that missed one which has failed since, because it was called
        otherwise there, goes on to the next; one that is late to it hears how it failed. Waits until every rank begins.
        Raises ``TrainerError`` when one has died, or does not come.
        """

    @abstractmethod
    def gather(self, data: bytes, what: str) -> list[bytes]:
        """All ranks' ``data`` in rank order on rank 0; an empty list elsewhere, at once."""

    @abstractmethod
    def broadcast(self, data: bytes, what: str) -> bytes:
        """Rank 0's ``data`` on every rank. Rank 0 waits until all are there; what others pass counts for nothing."""

    @abstractmethod
    def exchange(self, data: bytes, what: str) -> list[bytes]:
        """All ranks' ``data`` in rank order, on every rank."""

    @abstractmethod
    def check(self) -> None:
        """Raise ``TrainerError`` when a rank has failed in this epoch, or has died; cheap, waits for nothing."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell every other rank that this one has failed, so that its current or next wait raises the same text.

        Idempotent within an epoch, and of no effect when another rank has failed in it already. Never raises.
        """

    @abstractmethod
    def pulse(self) -> None:
        """Say that this rank is making progress, which starts the others' wait for it anew. Cheap, never raises."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Idempotent, never raises; ranks that still wait for this one raise ``TrainerError``."""


class SingleGroup(TrainerGroup):
    """The group of a trainer that is one process."""

    rank = 0
    size = 1

    def begin(self, what: str = "") -> None:
        return

    def gather(self, data: bytes, what: str) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes, what: str) -> bytes:
        return data

    def exchange(self, data: bytes, what: str) -> list[bytes]:
        return [data]

    def check(self) -> None:
        return

    def fail(self, error: BaseException) -> None:
        return

    def pulse(self) -> None:
        return

    def close(self) -> None:
        return
