"""Sessions of other clients: bare entries, without header, MAC or prepare, checked one message at a time.

This module knows what was delivered since start. It must not know rankcast's own sessions. Each entry is checked whole
before its first byte is read; completeness can only be asked at finish.
"""

from __future__ import annotations

from rankcast.errors import ManifestError, StateError
from rankcast.manifest import Manifest, TensorMeta, listed
from rankcast.rollout.delivery import Delivery, Segments, schedule_manifest
from rankcast.rollout.installer import Installer
from rankcast.rollout.scope import Scope
from rankcast.wire.bodies import Schedule
from rankcast.wire.payload import BareEntry


class BareSession:
    """What one session of a client without rankcast's protocol has delivered so far."""

    def __init__(self, installer: Installer) -> None:
        self._installer = installer
        self._segments = Segments()
        self._delivered: dict[str, TensorMeta] = {}

    def check(self, entry: BareEntry) -> Delivery:
        """Open what ``entry`` names; raises an error and reads nothing when any part of it is wrong."""
        manifest = entry.manifest()
        again = [name for name in manifest.names if name in self._delivered]
        if again:
            raise ManifestError(f"tensors given twice in one session: {listed(again)}", tensor=again[0])
        scope = Scope(manifest, self._installer)
        unknown = [name for name in manifest.names if name not in scope.names and not self._installer.may_ignore(name)]
        if unknown and not scope.names:
            # A loader that passes over some names of a full update is normal (another worker's experts); one that
            # takes nothing of an entry meant for this worker is not.
            raise ManifestError(
                f"this worker's loader takes none of these tensors: {listed(unknown)}", tensor=unknown[0]
            )
        count = len(manifest)
        columns = ([0] * count, [at for at, _ in entry.locations], [offset for _, offset in entry.locations])
        schedule = Schedule(manifest.names, manifest.dtypes, manifest.shapes, *(tuple(column) for column in columns))
        schedule_manifest(schedule, installs=1, segments=len(entry.segments))
        opened = self._segments.use(entry.segments)
        return Delivery(schedule, opened, installs=1)

    def deliver(self, entry: BareEntry) -> None:
        """Remember that ``entry`` was installed."""
        self._delivered.update((row.name, row) for row in entry.manifest().rows())

    def check_complete(self, *, whole: bool) -> None:
        """Raise ``ManifestError`` when what was delivered leaves a parameter partly new, or wrote one twice.

        Nothing at all is fine, unless the weights are not ``whole`` since an earlier update failed: ``StateError``.
        """
        if not (self._delivered or whole):
            raise StateError(
                "finish, but nothing came and an earlier update left the weights incomplete: send them all"
            )
        if self._delivered:
            scope = Scope(Manifest.of(self._delivered.values()), self._installer)
            scope.check_overlaps()
            scope.check_complete()

    def close(self) -> None:
        self._segments.close()
