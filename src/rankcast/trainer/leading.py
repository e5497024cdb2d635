"""What only trainer rank 0 does around a session: pausing, publishing, resuming, and counting.

This module joins the lead with pausing and the report channel, and keeps the counters of a report. It must not know
where weights come from. Resuming is the last thing that happens, and only to a fleet that is whole: every worker at the
new version, or every worker at the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rankcast.errors import DigestError, UnsupportedError
from rankcast.manifest import Manifest, listed
from rankcast.plan.schedule import Placed
from rankcast.telemetry.progress import StageClock
from rankcast.telemetry.report import PushReport, WorkerRow
from rankcast.trainer.digests import Checking
from rankcast.trainer.engine import Engine, WorkerFault, refuse
from rankcast.trainer.lead import Lead
from rankcast.trainer.meeting import Scope, meet
from rankcast.trainer.pausing import pause, reset_caches, resume
from rankcast.trainer.planning import Planning
from rankcast.trainer.shares import Share
from rankcast.trainer.speaker import Speaker
from rankcast.transports.shm import create_segment
from rankcast.wire.handles import Handle
from rankcast.wire.reports import Fault

#: The modes in which workers say which boxes they want, so that tensors can go by route.
ROUTED = ("auto", "direct")
#: The bytes of the segment with which workers try whether they can open what this trainer exports.
_PROBE_BYTES = 4096


class Leading:
    """Rank 0's side of a sync."""

    def __init__(
        self,
        speaker: Speaker,
        manifest: Manifest,
        kind: str,
        scope: Scope,
        *,
        mode: str,
        transport: str,
        pause_mode: str | None,
        lease: float,
        digests: bool,
    ) -> None:
        self.lead = Lead(speaker, mode=mode, lease=lease, digests=digests)
        self.checking: Checking | None = None
        self.kind = kind
        self.planning = Planning(speaker.fleet, manifest, mode=mode, transport=transport)
        self.total_bytes = 0
        self._speaker = speaker
        self._fleet = speaker.fleet
        self._scope = scope
        self._mode = mode
        self._pause = pause_mode
        self._version = ""
        self._manifest = manifest
        self._installs = 0
        self._turn = 0
        self._open = False
        self._published = False
        self._seconds: dict[tuple[str, int], float] = {}
        self._carried: Counter[tuple[str, int]] = Counter()
        self._read: Counter[tuple[str, int]] = Counter()
        self._before = (0, 0, 0)
        self._shares: Mapping[tuple[str, int], Share] = {}
        #: What the fleet served when the last push ended, in words.
        self._standing = "every worker serves what it had"
        #: The meetings since which every worker has opened what is exported.
        self._opened_by = speaker.fleet.meetings

    @classmethod
    def meet(
        cls,
        speaker: Speaker,
        manifest: Manifest,
        *,
        mode: str,
        transport: str,
        pause_mode: str | None,
        lease: float,
        digests: bool,
    ) -> Leading:
        """Meet the fleet, and find out by a probe how its workers can open what this trainer exports.

        Raises ``PushError`` as ``meeting.meet`` does, and ``UnsupportedError`` when a worker can open neither kind.
        """
        why: dict[str, str] = {}
        for kind in ("shm", "shm_name"):
            with create_segment(_PROBE_BYTES, kind=kind) as probe:
                met = meet(speaker, manifest, probe.handle, wanted=mode in ROUTED)
            if met.shut is None:
                return cls(
                    speaker,
                    manifest,
                    kind,
                    met.scope,
                    mode=mode,
                    transport=transport,
                    pause_mode=pause_mode,
                    lease=lease,
                    digests=digests,
                )
            why[kind] = f"{met.shut[0]}: {met.shut[1]}"
        raise UnsupportedError(
            "a worker cannot open this trainer's shared memory, neither through /proc "
            f"({why['shm']}) nor under /dev/shm ({why['shm_name']}): run both on one host as one user"
        )

    def begin(self, version: str) -> None:
        """A push of ``version`` begins on every trainer rank; nothing is said to the fleet yet."""
        self._version = version
        self._seconds.clear()
        self._carried.clear()
        self._read.clear()
        self._published = False
        self._before = self._counters()
        self._fleet.worker_calls = 0

    def open(self) -> bool:
        """Claim, pause and start; returns whether workers were met anew, which have nothing open of what is exported.

        The claim comes first: an engine that a dead trainer had paused is known by the claim that it left.
        """
        self._open = True
        self.lead.claim(self._version, self._meet_again)
        self.planning.renew()
        refuse(pause(self._fleet, self._pause), f"push of {self._version!r} refused: an engine could not be paused")
        self.lead.start()
        return self._opened_by != self._fleet.meetings

    def _meet_again(self, engines: Sequence[Engine]) -> None:
        """Workers that restarted or joined late get the manifest again, and then everything."""
        with create_segment(_PROBE_BYTES, kind=self.kind) as probe:
            met = meet(self._speaker, self._manifest, probe.handle, engines, wanted=self._mode in ROUTED)
        if met.shut is not None:
            raise UnsupportedError(
                f"{met.shut[0]} was met again and cannot open this trainer's shared memory as the other workers do "
                f"({met.shut[1]}): connect again, to find another way"
            )
        self._scope = met.scope

    def prepare(self, rest: Manifest, placed: Placed, handles: tuple[Handle, ...]) -> int:
        """Returns, when every worker has proved the whole session, how many installs come before the staged rounds."""
        self._shares = self.planning.shares(rest, placed, handles)
        programs = 1 if self.planning.ways.direct else 0
        self._installs = programs + placed.installs
        self.lead.prepare(self._shares, self._installs, self.planning.planes)
        self._opened_by = self._fleet.meetings
        self.total_bytes = sum(share.nbytes for share in self._shares.values())
        return programs

    def install(self, turn: int, done: int) -> int:
        """Send a round; returns ``done`` plus the bytes that workers were told to read with it."""
        self._turn = turn
        self.lead.install(turn)
        return done + sum(share.nbytes_by_install[turn] for share in self._shares.values())

    def installed(self) -> None:
        """Wait for the round under way. Raises ``PushError`` also when a worker took other bytes than a rank had."""
        faults: list[WorkerFault] = []
        for engine, report in self.lead.installed():
            who = (engine.id, report.worker.rank)
            self._seconds[who] = self._seconds.get(who, 0.0) + report.seconds
            self._read[who] += report.nbytes
            if report.tensors or report.nbytes:
                self._carried[who] += 1
            if self.checking is not None:
                odd = self.checking.differing(who, self._shares[who], self._turn, report.digests)
                if odd:
                    text = (
                        f"took other bytes of {listed(odd)} than the trainer had when the push began: something wrote "
                        "them meanwhile; push again"
                    )
                    faults.append(WorkerFault(engine.where, report.worker.label, Fault(DigestError.code, text, odd[0])))
        refuse(faults, f"push of {self._version!r} failed")

    def finish(self) -> None:
        """Every worker of every engine attests."""
        self.lead.finish()

    def publish(self) -> None:
        """Name the version everywhere, drop old caches, and only then resume and give the lease back.

        The lease goes last: were this trainer to die before, the next one sees by it whose pause it finds.
        """
        self.lead.set_version()
        refuse(
            reset_caches(self._fleet),
            f"{self._version!r} is installed, and engines may carry its name, but it is not "
            "published: a cache was not reset",
        )
        self._open, self._published = False, True
        self._standing = f"every worker serves {self._version!r}"
        stuck = resume(self._fleet)
        released = self.lead.release(published=True).faults
        for engine in self._fleet.engines:
            engine.paused_by_user = False
        refuse(stuck, f"{self._version!r} is published but an engine did not resume")
        refuse(released, f"{self._version!r} is published but an engine did not give its lease back")

    def abandon(self, reason: str) -> str:
        """End the session on the whole fleet; says what it serves now. Never raises.

        Short, so that the other trainer ranks hear of it in time: an engine that is busy with a call is left to it, and
        told at the next push, or at ``close``.
        """
        try:
            if self._published:
                return f"{self._standing}; what did not resume stays paused"
            if not self._open:
                return f"nothing was said to the fleet: {self._standing}"
            with self._fleet.ending():
                self._standing = self._end(reason)
                return self._standing
        except Exception as error:
            return f"the fleet could not be told to abort ({type(error).__name__}: {error}): ask rankcast status"

    def _end(self, reason: str) -> str:
        state = self.lead.abort(reason)
        self._open = bool(self.lead.unreached)
        stuck: list[str] = []
        if self.lead.serves_old:
            ours = [engine for engine in self._fleet.engines if self.lead.holds(engine)]
            stuck = [f"{fault} (still paused)" for fault in resume(self._fleet, ours)]
        else:
            again = "push again"
            if "not reached" in state:
                again = "bring back what was not reached, and push again"
            if any(engine.paused_by_us for engine in self._fleet.engines):
                state += f". Engines stay paused: {again}, which resumes them when every worker is whole"
            else:
                state += f". {again.capitalize()}"
        self.lead.release()
        return "; ".join([state, *stuck])

    def report(self, clock: StageClock, *, staged_bytes: int) -> PushReport:
        """The report of the push just published."""
        rows = []
        for engine, worker in self._fleet.workers():
            who = (engine.id, worker.rank)
            rows.append(
                WorkerRow(
                    engine=engine.id,
                    where=engine.where,
                    rank=worker.rank,
                    dp=worker.dp,
                    pp=worker.pp,
                    tp=worker.tp,
                    ep=worker.ep,
                    tensors=self._shares[who].tensors,
                    nbytes=self._read[who],
                    calls=self._carried[who],
                    seconds=self._seconds.get(who, 0.0),
                )
            )
        calls = sum(row.calls for row in rows)
        requests, request_bytes, engine_calls = (
            now - before for now, before in zip(self._counters(), self._before, strict=True)
        )
        cast_tensors, cast_nbytes = self.planning.plan.casts if self.planning.plan is not None else (0, 0)
        return PushReport(
            weight_version=self._version,
            mode=self._mode,
            transport="+".join(self.planning.planes),
            seconds=clock.elapsed,
            stage_seconds=dict(clock.seconds),
            rounds=self._installs,
            tensors=len(self._manifest),
            nbytes=sum(row.nbytes for row in rows),
            staged_bytes=staged_bytes,
            worker_calls=calls,
            control_calls=self._fleet.worker_calls - calls,
            engine_calls=engine_calls,
            requests=requests,
            request_bytes=request_bytes,
            ignored=self._scope.ignored,
            untouched=self._scope.untouched,
            direct_tensors=len(self.planning.ways.direct),
            direct_nbytes=self.planning.direct_nbytes,
            cast_tensors=cast_tensors,
            cast_nbytes=cast_nbytes,
            through_loader=dict(Counter(self.planning.ways.reasons.values())),
            ways=self.planning.way_rows,
            workers=tuple(rows),
        )

    def _counters(self) -> tuple[int, int, int]:
        """Requests, bytes of bodies and optional calls so far; a client that does not count counts as nothing."""
        clients = [engine.client for engine in self._fleet.engines]
        return (
            sum(getattr(client, "requests", 0) for client in clients),
            sum(getattr(client, "request_bytes", 0) for client in clients),
            sum(engine.calls for engine in self._fleet.engines),
        )

    def close(self) -> None:
        """Give everything back; engines that cannot be reached any more are left alone."""
        if self._open:
            # An engine was too busy to be told that its session ended. Nobody waits for this, so it may take its time.
            with self._fleet.ending(patient=True):
                self._end("the sync was closed")
        self.lead.release(published=self._published, close=True)
