"""A connection: what a worker keeps between the sessions of one trainer.

This module knows the traced manifest, the schedule prepared last and the segments open for it. It must not know
sequence numbers or who holds the lease. Keeping these is what makes a second push send neither names nor shapes again.
"""

from __future__ import annotations

from rankcast.errors import LocationError, RankcastError, StateError
from rankcast.manifest import Manifest
from rankcast.rollout.delivery import Delivery, Segments, schedule_manifest
from rankcast.rollout.installer import Installer
from rankcast.rollout.scope import Scope
from rankcast.transports.shm import open_handle
from rankcast.wire.bodies import Prepare, Schedule
from rankcast.wire.handles import Handle
from rankcast.wire.reports import Touched


class Connection:
    """One trainer's connection to one worker, named by the trainer."""

    def __init__(self, name: str, manifest: Manifest, installer: Installer) -> None:
        """Trace ``manifest``; raises ``ManifestError`` where the engine's loader refuses one of its tensors."""
        manifest.check()
        self.name = name
        self.schedule_hash = ""
        self._scope = Scope(manifest, installer)
        self._schedule: Schedule | None = None
        self._handles: tuple[Handle, ...] = ()
        self._installs = 0
        self._segments = Segments()
        self._delivery: Delivery | None = None

    @staticmethod
    def try_probe(probe: Handle) -> tuple[bool, str]:
        """Whether this process can open what the trainer exports, and why not."""
        try:
            open_handle(probe).close()
        except RankcastError as fault:
            return False, fault.message
        return True, ""

    def touched(self) -> Touched:
        """What this worker's loader does with the manifest."""
        return self._scope.touched()

    @property
    def delivery(self) -> Delivery:
        """The tensors of the session prepared last; raises ``StateError`` when none is."""
        if self._delivery is None:
            raise StateError("nothing is prepared: prepare first")
        return self._delivery

    def prepare(self, body: Prepare) -> None:
        """Prove the whole session before any of it: names, shapes, dtypes, completeness, segments and bounds.

        Raises the error of the first thing that is wrong; then nothing of the earlier session is kept either.
        """
        schedule = body.schedule
        if schedule is None:
            if body.schedule_hash != self.schedule_hash or self._schedule is None:
                raise StateError(
                    f"schedule {body.schedule_hash[:8]} is not known here (this worker holds "
                    f"{self.schedule_hash[:8] or 'none'}): send it whole"
                )
            schedule = self._schedule
        if self._delivery is not None and (schedule, body.handles, body.installs) == (
            self._schedule,
            self._handles,
            self._installs,
        ):
            self._segments.use(body.handles)
            return
        self._forget()
        manifest = schedule_manifest(schedule, installs=body.installs, segments=len(body.handles))
        self._scope.check(manifest)
        try:
            self._delivery = Delivery(schedule, self._segments.use(body.handles), body.installs)
        except LocationError:
            self._forget()
            raise
        self._schedule, self._handles, self._installs = schedule, body.handles, body.installs
        self.schedule_hash = body.schedule_hash

    def _forget(self) -> None:
        if self._delivery is not None:
            self._delivery.drop()
            self._delivery = None
        self._schedule, self.schedule_hash = None, ""

    def close(self) -> None:
        """Unmap every segment."""
        self._forget()
        self._segments.close()
