"""Sessions of other clients: bare entries, without header, MAC or prepare, checked one message at a time.

This module knows what was delivered since start. It must not know rankcast's own sessions. Each entry is checked whole
before its first byte is read, and against the messages before it. Whether they fill everything, and each did what the
loader does with all of them at once, can only be asked at finish.
"""

from __future__ import annotations

from rankcast.errors import ManifestError, StateError
from rankcast.manifest import Manifest, TensorMeta, listed
from rankcast.rollout.delivery import Delivery, Segments, schedule_manifest
from rankcast.rollout.installer import Installer
from rankcast.rollout.messages import Messages
from rankcast.rollout.scope import Scope
from rankcast.trace.record import Trace
from rankcast.wire.bodies import Schedule
from rankcast.wire.payload import BareEntry


class BareSession:
    """What one session of a client without rankcast's protocol has delivered so far."""

    def __init__(self, installer: Installer) -> None:
        self._installer = installer
        self._segments = Segments()
        self._delivered: dict[str, TensorMeta] = {}
        self._messages = Messages()
        self._checked: Trace | None = None

    def check(self, entry: BareEntry) -> Delivery:
        """Open what ``entry`` names, which is installed next; raises and reads nothing when any part of it is wrong.

        ``ManifestError`` for a tensor that is unknown, differs, came before, or goes where another one went;
        ``PayloadError`` for uneven columns; ``LocationError`` for a place that is not there.
        """
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
        self._messages.check_next(scope.trace)
        count = len(manifest)
        columns = ([0] * count, [at for at, _ in entry.locations], [offset for _, offset in entry.locations])
        schedule = Schedule(manifest.names, manifest.dtypes, manifest.shapes, *(tuple(column) for column in columns))
        schedule_manifest(schedule, installs=1, segments=len(entry.segments))
        delivery = Delivery(schedule, self._segments.use(entry.segments), installs=1)
        self._checked = scope.trace
        return delivery

    def deliver(self) -> None:
        """Remember that the entry that was checked last was installed."""
        if self._checked is not None:
            self._messages.add(self._checked)
            self._delivered.update((row.name, row) for row in self._checked.manifest.rows())
            self._checked = None

    def check_complete(self, *, whole: bool) -> None:
        """Raise ``ManifestError`` when what was delivered leaves a parameter partly new, or wrote one twice.

        And when the loader did something else with a message than it does when all tensors come at once.
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
            self._messages.check_whole(scope.trace)

    def close(self) -> None:
        self._segments.close()
