"""A connection: what a worker keeps between the sessions of one trainer.

This module knows the traced manifest, what was prepared last and the segments open for it. It must not know sequence
numbers or who holds the lease. Keeping these is what makes a second push send neither names nor shapes nor handles.
"""

from __future__ import annotations

import dataclasses
import secrets

import torch

from rankcast.errors import LocationError, PayloadError, RankcastError, StateError
from rankcast.manifest import Manifest
from rankcast.rollout.delivery import Delivery, Segments, schedule_manifest
from rankcast.rollout.installer import Installer
from rankcast.rollout.program import CopyProgram, check_program
from rankcast.rollout.scope import Scope
from rankcast.transports.digest import packed
from rankcast.transports.opening import open_any
from rankcast.wire.bodies import Prepare
from rankcast.wire.handles import Handle
from rankcast.wire.plan_digest import plan_digest
from rankcast.wire.reports import Touched, Wanted


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What one session installs: the copy program, if there is one, runs first, then the delivery's rounds."""

    hash: str
    handles: tuple[Handle, ...]
    installs: int
    program: CopyProgram | None
    delivery: Delivery
    #: Of what each install brought, once it did, as they travel; ``None`` where nobody asks for them.
    digests: dict[int, str] | None = None

    def turn(self, number: int) -> int:
        """Which of the delivery's rounds install ``number`` is."""
        return number - (self.program is not None)

    def carries(self, number: int) -> tuple[int, int]:
        """How many tensors through the loader, and bytes in all, install ``number`` brings."""
        if self.program is not None and number == 0:
            return 0, self.program.nbytes
        turn = self.turn(number)
        return self.delivery.count(turn), self.delivery.nbytes(turn)

    def weights(self, number: int) -> list[tuple[str, torch.Tensor]]:
        """The tensors of install ``number``, which is not the program; raises as ``Delivery.weights`` does."""
        weights = self.delivery.weights(self.turn(number))
        if self.digests is not None:
            # Now: a loader may write into what it is given.
            self.digests[number] = packed(self.delivery.digests(self.turn(number)))
        return weights

    def said(self, number: int) -> str:
        """The digests of install ``number``, which is done; empty where nobody asks for them."""
        if self.digests is None:
            return ""
        if self.program is not None and number == 0:
            return packed(self.program.digests)
        return self.digests.get(number, "")

    def drop(self) -> None:
        """Let go of every view, so that the segments below can be unmapped."""
        self.delivery.drop()
        if self.program is not None:
            self.program.drop()


class Connection:
    """One trainer's connection to one worker, named by the trainer."""

    def __init__(self, name: str, manifest: Manifest, installer: Installer, *, casts: bool) -> None:
        """Trace ``manifest``; raises ``ManifestError`` where the engine's loader refuses one of its tensors.

        ``casts`` says that a tensor's dtype may differ from its parameter's, as long as a copy program brings it.
        """
        manifest.check()
        self.name = name
        #: Drawn for this connection alone: what was recorded of an earlier one of the same name is worth nothing.
        self.nonce = secrets.token_hex(16)
        self._scope = Scope(manifest, installer, casts=casts)
        self._scope.check_overlaps()
        self._segments = Segments()
        self._prepared: Prepared | None = None
        self._scheduled: tuple[Manifest, tuple[int, ...]] = Manifest.of(()), ()

    @staticmethod
    def try_probe(probe: Handle) -> tuple[bool, str]:
        """Whether this process can open what the trainer exports, and why not."""
        try:
            open_any(probe).close()
        except RankcastError as fault:
            return False, fault.message
        return True, ""

    def touched(self) -> Touched:
        """What this worker's loader does with the manifest."""
        return self._scope.touched()

    def wanted(self) -> Wanted:
        """The boxes that this worker wants of the manifest's tensors."""
        return self._scope.wanted()

    def diff(self, later: Connection) -> list[str]:
        """In words, what this worker's loader does otherwise since it was traced for ``later``."""
        return self._scope.diff(later._scope)

    @property
    def outdated(self) -> bool:
        """Whether the engine's loader may do something else by now than what was traced."""
        return bool(self._scope.changes())

    @property
    def plan_hash(self) -> str:
        """The hash of what was prepared last; empty when nothing is."""
        return self._prepared.hash if self._prepared is not None else ""

    @property
    def prepared(self) -> Prepared:
        """What the open session installs; raises ``StateError`` when nothing is prepared."""
        if self._prepared is None:
            raise StateError("nothing is prepared: prepare first")
        return self._prepared

    def prepare(self, body: Prepare) -> None:
        """Prove the whole session before any of it: names, shapes, dtypes, completeness, segments, bounds and targets.

        Raises the error of the first thing that is wrong; then a session that was sent whole is not kept, nor what it
        would have replaced.
        """
        changes = self._scope.changes()
        if changes:
            raise StateError(f"the loader was traced before this changed: {'; '.join(changes)}: push again")
        if body.handles is None:
            self._prepare_again(body)
        else:
            self._prepare_anew(body, body.handles)
        # In every session, also one of the same plan: an engine may have replaced a parameter since.
        self._scope.check_targets()
        self._scope.check_rounds(*self._scheduled)
        prepared = self.prepared
        self._prepared = dataclasses.replace(prepared, digests={} if body.digests else None)
        if prepared.program is not None:
            prepared.program.take_digests(body.digests)

    def _prepare_again(self, body: Prepare) -> None:
        if body.schedule is not None or body.program is not None:
            raise PayloadError("a prepare message has a schedule or a program and no handles: send all, or none")
        if self._prepared is None or not self.holds(body):
            held = self.plan_hash[:8] or "none"
            raise StateError(f"plan {body.plan_hash[:8]} is not known here (this worker holds {held}): send it whole")
        self._segments.verify()

    def _prepare_anew(self, body: Prepare, handles: tuple[Handle, ...]) -> None:
        if body.schedule is None:
            raise PayloadError("a prepare message has handles and no schedule: send all, or none")
        self._forget()
        # The program, where there is one, takes the first install.
        turns = body.installs - (body.program is not None)
        if turns < 0:
            raise PayloadError(
                f"a prepare message announces {body.installs} installs, which leaves none for "
                f"{'its copy program' if body.program is not None else 'anything'}: nothing of it would ever be written"
            )
        manifest = schedule_manifest(body.schedule, installs=turns, segments=len(handles))
        if body.program is not None:
            check_program(body.program, self._scope.parameters, len(handles))
        self._scope.check(manifest, body.program)
        self._scheduled = manifest, body.schedule.rounds
        try:
            opened = self._segments.use(handles)
            delivery = Delivery(body.schedule, opened, turns)
            program = self._scope.program(body.program, opened) if body.program is not None else None
        except LocationError:
            self._forget()
            raise
        # Last, because whatever else is wrong says more.
        digest = plan_digest(body.schedule, body.program, handles)
        if digest != body.plan_hash:
            raise PayloadError(
                f"a prepare message calls its schedule, program and handles plan {body.plan_hash[:8]}, and they are "
                f"plan {digest[:8]}: they are not those that the trainer means, or were changed on their way"
            )
        self._segments.lend(delivery.segments)
        self._prepared = Prepared(body.plan_hash, handles, body.installs, program, delivery)

    def holds(self, body: Prepare) -> bool:
        """Whether ``body`` is what was prepared last, by its plan."""
        held = self._prepared
        return held is not None and (held.hash, held.installs) == (body.plan_hash, body.installs)

    def verify(self) -> None:
        """Prove that every open segment is still there to be read; raises ``LocationError``.

        What is read next is what the trainer has there: a page that a loader wrote to, in an earlier session, was this
        process's own copy since, and a program reads whatever lies on it besides.
        """
        self._segments.verify_sizes()
        self._segments.refresh()

    def _forget(self) -> None:
        if self._prepared is not None:
            self._prepared.drop()
            self._prepared = None

    def close(self) -> None:
        """Unmap every segment."""
        self.let_go()

    def let_go(self) -> None:
        """Unmap every segment; the connection goes on, and what is prepared next has to be sent whole."""
        self._forget()
        self._segments.close()
