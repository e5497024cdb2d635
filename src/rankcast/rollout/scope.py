"""What a complete update is for one worker: which tensors its loader takes, and what would stay uninitialised.

This module knows traces and manifests. It must not know sessions or bytes. A worker answers from its own trace, so that
nobody has to compute, from the outside, which tensors it owns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from rankcast.errors import ManifestError
from rankcast.manifest import LISTED, Manifest, listed
from rankcast.rollout.apart import Apart
from rankcast.rollout.by_round import check_rounds
from rankcast.rollout.installer import Installer
from rankcast.rollout.padding import Padding, cleared_by, padding_of
from rankcast.rollout.program import CopyProgram
from rankcast.rollout.traced_targets import TracedTargets
from rankcast.rollout.wanted import check_filled, wanted_of
from rankcast.trace.record import Trace
from rankcast.transports.opening import Opened
from rankcast.wire.bodies import Program
from rankcast.wire.reports import Touched, Wanted


class Scope:
    """One manifest, traced: taken once per connection and asked at every prepare; of bare entries, once for each."""

    def __init__(self, manifest: Manifest, installer: Installer, *, casts: bool = False) -> None:
        """Trace ``manifest``; raises as ``Installer.trace`` does, and ``ManifestError`` where a dtype differs.

        With ``casts`` a dtype may differ, and is refused only for a tensor that is to come through the loader.
        """
        self.manifest = manifest
        self.trace: Trace = installer.trace(manifest)
        self._proved: tuple[Manifest, Sequence[int], int] | None = None
        self._casts = {cast.name: cast for cast in self.trace.casts()}
        if not casts:
            self._refuse_casts(self._casts)
        self._by_loader = {**cleared_by(self.trace), **installer.by_loader()}
        self._targets = TracedTargets(self.trace)
        self._whole_modules = installer.whole_modules
        self._touched = self.trace.touched()
        self._installer = installer
        self._ignored = tuple(i for i in self.trace.ignored() if installer.may_ignore(manifest.names[i]))

    @functools.cached_property
    def missing(self) -> list[str]:
        """One line for each parameter that the manifest leaves incomplete."""
        return self.trace.missing(self._installer.required())

    def check_overlaps(self) -> None:
        """Raise ``ManifestError`` when two tensors of the manifest go to the same place."""
        overlaps = self.trace.overlaps()
        if overlaps:
            raise ManifestError(f"tensors would overwrite each other: {listed(overlaps)}: leave one out of the source")

    @property
    def names(self) -> frozenset[str]:
        """The names this worker copies from."""
        return frozenset(self.manifest.names[i] for i in self._touched)

    def touched(self) -> Touched:
        """The answer to an init."""
        missing = self.missing
        return Touched(
            self._touched,
            self._ignored,
            tuple(missing[:LISTED]),
            len(missing),
            self.trace.untouched(self._installer.persistent_buffers()),
        )

    @property
    def parameters(self) -> frozenset[str]:
        """The names of this worker's destinations."""
        return frozenset(self.trace.destinations.names)

    def wanted(self) -> Wanted:
        """The boxes that this worker wants, for a plan."""
        casts = {self.manifest.index[name]: cast.destination for name, cast in self._casts.items()}
        return wanted_of(self.trace, self._by_loader, casts, whole_modules=self._whole_modules)

    def program(self, program: Program, opened: Sequence[Opened]) -> CopyProgram:
        """``program`` over what was opened for it; raises ``LocationError`` where a route reaches outside of that."""
        return CopyProgram(program, opened, self._targets, self._padding)

    @functools.cached_property
    def _padding(self) -> tuple[Padding, ...]:
        return padding_of(self.trace)

    def _refuse_casts(self, names: Iterable[str]) -> None:
        found = [self._casts[name] for name in names if name in self._casts]
        if found:
            first = found[0]
            raise ManifestError(
                f"{first.name} is {first.source} at the trainer but {first.destination} in the worker's "
                f"{first.parameter} ({len(found)} such tensors): declare the wire dtype at the source, for example "
                f"ModuleSource(model, dtype=torch.{first.destination})",
                tensor=first.name,
            )

    def check(self, scheduled: Manifest, program: Program | None = None) -> None:
        """Raise ``ManifestError`` unless ``scheduled`` and ``program`` together fill this worker wholly.

        ``scheduled`` are the tensors that come through the loader, as they were traced; ``program`` must write exactly
        what the loader would have written of all others.
        """
        self._refuse_casts(scheduled.names)
        for row in scheduled.rows():
            at = self.manifest.index.get(row.name)
            if at is None:
                raise ManifestError(f"unknown tensor {row.name}: it was not in the manifest at init", tensor=row.name)
            known = self.manifest.row(at)
            if known != row:
                raise ManifestError(f"{row} is announced, but it was {known} at init", tensor=row.name)
        if program is not None:
            check_filled(self.trace, program, [self.manifest.index[name] for name in scheduled.names])
        else:
            absent = sorted(self.names - set(scheduled.names))
            if absent:
                raise ManifestError(f"missing tensors: {listed(absent)}", tensor=absent[0])
        self.check_complete()

    def check_rounds(self, scheduled: Manifest, rounds: Sequence[int]) -> None:
        """Raise ``ManifestError`` unless the loader does in each round exactly its part of the trace.

        It is asked again once a parameter was replaced by another: it may have kept the old one, and go on filling it.
        """
        objects = self._installer.objects()
        if self._proved == (scheduled, rounds, objects):
            return
        check_rounds(self.trace, self._installer.trace, scheduled, rounds)
        self._proved = (scheduled, rounds, objects)

    def diff(self, later: Scope) -> list[str]:
        """In words, what the loader does otherwise by the trace of ``later``; empty when the traces are the same."""
        return [] if self.trace.hash == later.trace.hash else self.trace.diff(later.trace)

    def changes(self) -> list[str]:
        """In words, what the engine says of itself now and did not when it was traced; empty when the trace holds."""
        return self.trace.fingerprint.changes(self._installer.fingerprint())

    def check_targets(self, apart: Apart) -> None:
        """Raise ``ManifestError`` naming a parameter that is not as it was when it was traced, and what ``apart``
        raises for one that lies where something is read. Writes nothing."""
        self._targets.apart = apart
        self._installer.check(self._targets)

    def check_complete(self) -> None:
        """Raise ``ManifestError`` when even all of the manifest leaves a parameter incomplete."""
        if self.missing:
            raise ManifestError(f"the update does not fill every parameter: {listed(self.missing)}")
