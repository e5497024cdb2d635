"""The session machine: what a worker may do next, the same for every engine.

This module knows states, sequence numbers and the lease. It must not know tensors, transports, threads or clocks: the
caller passes the time in and reports what it wrote. Every refusal leaves the machine exactly as it was.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from rankcast.errors import LeaseError, StateError
from rankcast.process import ProcessIdentity, provably_dead
from rankcast.wire.bodies import Owner


class State(enum.StrEnum):
    """A worker's state. After a failure it is ``UNUSABLE``, or ``IDLE`` again when the old weights are still whole."""

    IDLE = "idle"
    STARTED = "started"
    PREPARED = "prepared"
    INSTALLING = "installing"
    INSTALLED = "installed"
    UNUSABLE = "unusable"


OPEN = frozenset({State.STARTED, State.PREPARED, State.INSTALLING, State.INSTALLED})


class Session:
    """One worker's session state, from idle through start, prepare, installs and finish, back to idle.

    ``generation`` counts completed sessions. ``servable`` is False from the first write of a session until its weights
    are complete, and after a failure. ``unpublished`` is set when a trainer's session is complete here, and cleared by
    its owner's word that it is complete everywhere, or by weights that came without one. ``orphaned`` is set when a
    claim ends in any other way than by its owner's word that nothing is left paused (a settled release), and cleared by
    that word of the last owner.
    """

    def __init__(self, *, provably_dead: Callable[[ProcessIdentity], bool] = provably_dead) -> None:
        self.generation = 0
        self.name: str | None = None
        self._provably_dead = provably_dead
        self._state = State.IDLE
        self._whole = True
        self._installs = 0
        self._sequence = -1
        self._holder: Owner | None = None
        self.orphaned = False
        self.unpublished = False
        self._last_owner = ""
        self._lease_until = 0.0
        self._lease_seconds = 0.0

    @property
    def state(self) -> State:
        return self._state

    @property
    def servable(self) -> bool:
        return self._whole

    @property
    def is_open(self) -> bool:
        return self._state in OPEN

    @property
    def claimed(self) -> bool:
        """Whether a trainer holds this worker by a claim (its lease may have run out)."""
        return self._holder is not None

    # -- lease ---------------------------------------------------------------------------------------------------

    def check_lease(self, owner: Owner | None, now: float) -> None:
        """Raise ``LeaseError`` while somebody else than ``owner`` holds the worker and may be alive."""
        holder = self._holder
        if holder is None or (owner is not None and holder.id == owner.id):
            return
        if not self.lapsed(now):
            raise LeaseError(
                f"{holder.name} holds this fleet for {self._lease_until - now:.0f} s more (or until it finishes): "
                "wait for it, or end that process"
            )

    def lapsed(self, now: float) -> bool:
        """Whether there is a claim that anybody may set aside: its holder is dead, or its lease has run out."""
        holder = self._holder
        return holder is not None and (self._lease_until <= now or self._provably_dead(holder.process))

    def held_by_other(self, owner: Owner | None) -> bool:
        """Whether there is a claim, alive or not, of somebody else than ``owner``."""
        return self._holder is not None and (owner is None or self._holder.id != owner.id)

    def check_init(self, owner: Owner, now: float) -> None:
        """Raise ``LeaseError`` as ``check_lease`` does, ``StateError`` while ``owner`` itself has a session open."""
        self.check_lease(owner, now)
        holder = self._holder
        if holder is None or not self.is_open or holder.id != owner.id:
            return
        if not self.lapsed(now):
            raise StateError(f"init, but a session of {holder.name} is {self._state}: finish it or abort it first")

    def claim(self, session: str, owner: Owner, lease_seconds: float, now: float) -> bool:
        """Take the lease for ``session``; returns whether a session that was left open was ended.

        ``now`` and ``lease_seconds`` are seconds of one clock. Raises ``LeaseError``.
        """
        self.check_lease(owner, now)
        left_open = self.is_open
        if left_open:
            self.abandon()
        elif self.held_by_other(owner):
            self._drop_lease()
        self.name = session
        self._holder = owner
        self._last_owner = owner.id
        self._lease_seconds = lease_seconds
        self._lease_until = now + lease_seconds
        return left_open

    def renew(self, now: float) -> None:
        """The owner was heard from."""
        self._lease_until = now + self._lease_seconds

    def forget_holder(self) -> None:
        """Drop a lease that nobody can claim any more (``check_lease`` said so), when no session is open under it."""
        if not self.is_open:
            self._drop_lease()

    def release(self, owner: Owner, *, settled: bool, published: bool = False) -> bool:
        """Give the lease back, if it is ``owner``'s and no session is open under it; returns whether it was.

        ``settled`` is its word that nothing is left paused; it counts until somebody else has claimed. ``published`` is
        its word that every worker of every engine has these weights, and counts under its lease only.
        """
        held = self._holder is not None and self._holder.id == owner.id and not self.is_open
        if held:
            self.unpublished = self.unpublished and not published
            self._drop_lease()
        if settled and self._last_owner == owner.id and self._holder is None:
            self.orphaned = False
        return held

    # -- the life of a session -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the session, and forget every earlier one, so that a retry after a failure is exactly a first try."""
        if self.is_open:
            raise StateError(
                f"start, but a session is {self._state} already: finish it or abort it first (nothing was changed)"
            )
        self._state = State.STARTED
        self._installs = 0
        self._sequence = -1

    def check_session(self, session: str) -> None:
        """Raise ``StateError`` unless ``session`` is the one that holds this worker."""
        if session != self.name:
            raise StateError(f"an entry of session {session[:8]} came, this worker holds {(self.name or 'none')[:8]}")

    def may_prepare(self, sequence: int) -> bool:
        """Whether to act on a prepare: False for a repeat of one already done. Raises ``StateError`` out of order."""
        if self._state in (State.PREPARED, State.INSTALLING, State.INSTALLED) and sequence == 0:
            return False
        if self._state is not State.STARTED or sequence != 0:
            raise StateError(f"prepare with sequence number {sequence}, but the session is {self._state}")
        return True

    def prepared(self, installs: int) -> None:
        """The manifest was proved; ``installs`` messages are to follow. Nothing is written yet."""
        self._state = State.PREPARED
        self._installs = installs
        self._sequence = 0
        if installs == 0:
            self._state = State.INSTALLED

    def may_install(self, sequence: int) -> bool:
        """Whether to act on an install: False for a repeat, which is acknowledged and not applied twice.

        Raises ``StateError`` on a gap, on one install too many, and in every state in which nothing was prepared.
        """
        if self._state not in (State.PREPARED, State.INSTALLING, State.INSTALLED):
            raise StateError(f"install {sequence} came, but the session is {self._state}: prepare first")
        if 0 < sequence <= self._sequence:
            return False
        if sequence != self._sequence + 1 or sequence > self._installs:
            raise StateError(
                f"install with sequence number {sequence} came, expected {self._sequence + 1} of {self._installs}"
            )
        return True

    def writing(self) -> None:
        """The first write of this session is about to happen: from here on the old weights are gone."""
        if not self.is_open:
            raise StateError(f"a write, but the session is {self._state}: start first")
        self._whole = False
        self._state = State.INSTALLING

    def installed(self, sequence: int) -> None:
        """The install of ``sequence`` is complete."""
        self._sequence = sequence
        self._state = State.INSTALLED if sequence == self._installs else State.INSTALLING

    def check_finish(self) -> None:
        """Raise ``StateError`` unless everything that was prepared is installed."""
        if not self.is_open:
            raise StateError(f"finish, but no session is open (the worker is {self._state}): start first")
        if self.claimed and self._state is not State.INSTALLED:
            raise StateError(
                f"finish, but the session is {self._state} after {max(self._sequence, 0)} of {self._installs} "
                "installs: send the rest, or abort"
            )

    def finished(self, *, wrote: bool = True) -> None:
        """The weights are complete: the worker may serve again. The lease stays until its owner releases it.

        A session that ``wrote`` nothing left the weights as published as they were.
        """
        self.generation += 1
        self.unpublished = self.claimed or (self.unpublished and not wrote)
        self._whole = True
        self._state = State.IDLE

    def abandon(self, *, disown: bool = False) -> None:
        """End the session: idle with the old weights when nothing was written since they were whole, else unusable.

        ``disown`` says that these weights, whole as they are, must not be served: they are not those of the others.
        """
        self._whole = self._whole and not disown
        self._state = State.IDLE if self._whole else State.UNUSABLE
        self._drop_lease()

    def broken(self) -> None:
        """A write failed half-way, or completeness was not proved after one: not servable until a full session."""
        self._state = State.UNUSABLE

    def _drop_lease(self) -> None:
        self.orphaned = self.orphaned or self._holder is not None
        self._holder = None
        self._lease_until = 0.0
        self.name = None
