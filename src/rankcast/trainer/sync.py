"""A sync: what ``connect`` returns, and the push that every trainer rank makes together.

This module joins the trainer ranks' exports with rank 0's part towards the fleet, in lock-step by round. It must not
know how either does its work. However a push ends, it ends on every rank: with the same report, or with an error that
says what the fleet serves now.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from types import TracebackType
from typing import Self

import msgspec

from rankcast.errors import DigestError, PushError, RankcastError, StateError, TrainerError
from rankcast.plan.routes import Plan
from rankcast.telemetry.progress import Progress, ProgressCallback, Stage, StageClock
from rankcast.telemetry.report import PushReport
from rankcast.trainer.digests import Checking
from rankcast.trainer.direct import DirectExports
from rankcast.trainer.exports import Exports
from rankcast.trainer.group import TrainerGroup
from rankcast.trainer.leading import Leading
from rankcast.trainer.sources.base import WeightSource
from rankcast.trainer.watch import Watch

_LOG = logging.getLogger("rankcast")


class Sync:
    """Pushes one source into one fleet, any number of times. Made by ``rankcast.connect``; a context manager.

    In an SPMD trainer every rank has one, and every rank makes every call, in the same order. One thread at a time.
    """

    def __init__(
        self,
        group: TrainerGroup,
        source: WeightSource,
        exports: Exports,
        leading: Leading | None,
        direct: DirectExports | None,
        checking: Checking | None,
        progress: ProgressCallback | None,
        closing: contextlib.ExitStack,
    ) -> None:
        """``closing`` has everything that ``close`` gives back; ``leading`` is there on trainer rank 0 only."""
        self._group = group
        self._source = source
        self._exports = exports
        self._leading = leading
        self._direct = direct
        self._checking = checking
        self._progress = progress
        self._closing = closing
        self._closed = False
        self._pushing = threading.Lock()

    def push(self, weight_version: str) -> PushReport:
        """Bring the source's weights into every worker of every engine, and publish them as ``weight_version``.

        ``weight_version`` is any string but an empty one, the same on every trainer rank. Returns, on every rank, when
        the trainer may change its weights again.

        Raises ``PushError`` when the fleet did not take them (its message says what every worker serves now), and
        ``TrainerError``, on every rank and within seconds, when another one raised, died or pushes something else; with
        ``check="digest"`` also ``DigestError``, on every rank, when replicas of a tensor on trainer ranks differ. A
        later push starts afresh. Raises ``StateError`` for a closed sync, and for a version that is no such string,
        before anything is done.
        """
        if self._closed:
            raise StateError("push on a closed sync: connect again")
        if not self._pushing.acquire(blocking=False):
            raise StateError("push within a push of the same sync, from another thread or its progress callback")
        try:
            return self._begin(weight_version)
        finally:
            self._pushing.release()

    def _begin(self, weight_version: str) -> PushReport:
        self._group.begin(f"push of {weight_version!r}")
        try:
            _check_version(weight_version)
        except StateError as error:
            self._exports.announce(str(weight_version))  # the other ranks count this push as well
            self._group.fail(error)
            raise
        clock = StageClock()
        try:
            return self._push(weight_version, clock)
        except BaseException as error:
            self._exports.forget_exchange()
            if self._direct is not None:
                self._direct.say_again()
            failure = self._conclude(weight_version, error)
            if not (isinstance(error, DigestError) and error.heard):
                self._group.fail(failure)
            if failure is error:
                raise
            raise failure from error
        finally:
            if self._exports.staging is not None:
                self._exports.staging.end()

    def _push(self, version: str, clock: StageClock) -> PushReport:
        group, exports, leading, direct = self._group, self._exports, self._leading, self._direct
        with clock.stage("plan"):
            if leading is not None:
                leading.begin(version)
            exports.announce(version)
            watch = Watch(self._source, group.rank)
            placed, handles = exports.refresh(watch.addresses)
            if direct is not None:
                direct.refresh(watch.addresses)
            staging = exports.staging
            assert staging is not None, "refresh lays out"
        with clock.stage("prepare"):
            if leading is not None:
                met_anew = leading.open()
            if exports.named:
                # The names are gone since the last readers had them: who is new needs new ones.
                said = group.broadcast(b"new" if leading is not None and met_anew else b"", "who is new")
                placed, handles = exports.renew() if said else (placed, handles)
                staging = exports.staging
                assert staging is not None, "renew lays out"
            programs = leading.prepare(exports.rest, placed, handles) if leading is not None else 0
            group.broadcast(b"", "prepared")
            exports.unlink()
            # What changed before the first byte is read costs nobody their old weights.
            if self._checking is not None:
                if direct is not None:
                    self._checking.take_shards(direct, leading.planning if leading is not None else None)
                self._checking.replicas.compare()
            watch.check()
            group.gather(b"", "nothing changed before it is read")
        done = 0
        if leading is not None and programs:
            # Every rank has let its shards be read since it said where they lie.
            with clock.stage("install"):
                done = leading.install(0, done)
            self._tell(version, "install", 0, programs + placed.installs, done)
        staging.begin(self._checking.replicas.later if self._checking is not None else ())
        for turn in range(placed.installs):
            with clock.stage("wire"):
                # Round turn-2 used the same buffer: the lead has heard from all of its readers before it says this.
                # Of two large tensors in a row the second has to wait for the first.
                if leading is not None and exports.fills_again(turn):
                    leading.installed()
                group.broadcast(b"", f"buffer of round {turn} is free")
                staging.stage(turn)
                if self._checking is not None:
                    self._checking.take_round(exports, turn, f"round {turn} is staged")
                else:
                    group.gather(b"", f"round {turn} is staged")
            if leading is not None:
                with clock.stage("install"):
                    leading.installed()
                    done = leading.install(programs + turn, done)
                self._tell(version, "install", programs + turn, programs + placed.installs, done)
        if leading is not None:
            with clock.stage("install"):
                leading.installed()
        with clock.stage("check"):
            group.broadcast(b"", "installed")
            watch.check()
            group.gather(b"", "nothing changed while it was read")
        if leading is not None:
            with clock.stage("check"):
                leading.finish()
            with clock.stage("publish"):
                leading.publish()
            copied = direct.copied_bytes if direct is not None else 0
            report = leading.report(clock, staged_bytes=exports.staged_bytes() + copied)
            self._tell(version, "publish", report.rounds, report.rounds, report.nbytes)
            group.broadcast(msgspec.msgpack.encode(report), "published")
            return report
        mine = msgspec.msgpack.decode(group.broadcast(b"", "published"), type=PushReport)
        return msgspec.structs.replace(mine, seconds=clock.elapsed, stage_seconds=dict(clock.seconds))

    def _conclude(self, version: str, error: BaseException) -> BaseException:
        """What this rank raises; on the lead, after the fleet was told to end the session."""
        if self._leading is None:
            return error
        state = self._leading.abandon(f"{type(error).__name__}: {error}")
        if not isinstance(error, Exception):
            return error
        text = error.message if isinstance(error, RankcastError) else f"{type(error).__name__}: {error}"
        headline = "" if text.startswith(("push of", "connect")) else f"push of {version!r} failed: "
        message = f"{headline}{text}. {state}"
        if isinstance(error, PushError):
            return PushError(message, faults=error.faults, codes=error.codes, tensor=error.tensor)
        if isinstance(error, TrainerError):
            return TrainerError(message)
        if isinstance(error, DigestError):
            return DigestError(message, tensor=error.tensor)
        code = error.code if isinstance(error, RankcastError) else "internal"
        tensor = error.tensor if isinstance(error, RankcastError) else None
        return PushError(message, faults=(text,), codes=(code,), tensor=tensor)

    def _tell(self, version: str, stage: Stage, turn: int, rounds: int, done: int) -> None:
        if self._progress is None or self._leading is None:
            return
        try:
            self._progress(Progress(version, stage, turn, rounds, done, self._leading.total_bytes))
        except Exception:
            # Who only watches must not leave a fleet half-way.
            _LOG.exception("the progress callback raised, and is not called any more")
            self._progress = None

    @property
    def plan(self) -> Plan | None:
        """The plan of what goes by route: ``explain()``, ``to_json()``, ``hash``.

        There is one on trainer rank 0, from ``connect`` on: another one when a worker was met again, or a shard moved,
        which changes where it is read but no route. ``None`` on other ranks, and where nothing goes by route.
        """
        return self._leading.planning.plan if self._leading is not None else None

    def close(self) -> None:
        """Give back the lease, the segments, the report channel and the trainer ranks' connections. Idempotent.

        Everything is given back also when one of them raises; the last such error is raised in the end.
        """
        if self._closed:
            return
        self._closed = True
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_version(version: object) -> None:
    if not isinstance(version, str):
        raise StateError(
            f"weight_version is {version!r}, of type {type(version).__name__}; it must be a str: name the weights, "
            f"for example push({str(version)!r})"
        )
    try:
        version.encode()
    except UnicodeEncodeError:
        raise StateError(f"weight_version {version!r} has no UTF-8 form: name the weights otherwise") from None
    if not version:
        raise StateError("weight_version is an empty string: name the weights")
