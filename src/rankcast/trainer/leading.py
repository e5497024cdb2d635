"""What only trainer rank 0 does around a session: pausing, publishing, resuming, and counting.

This module joins the lead with pausing and the report channel, and keeps the counters of a report. It must not know
where weights come from. Resuming is the last thing that happens, and only to a fleet that is whole: every worker at the
new version, or every worker at the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rankcast.control.report_channel import ReportChannel
from rankcast.errors import UnsupportedError
from rankcast.manifest import Manifest
from rankcast.plan.schedule import Placed
from rankcast.telemetry.progress import StageClock
from rankcast.telemetry.report import PushReport, WorkerRow
from rankcast.trainer.fleet import Engine, refuse
from rankcast.trainer.lead import Lead
from rankcast.trainer.pausing import pause, reset_caches, resume
from rankcast.trainer.planning import Planning
from rankcast.trainer.shares import Share
from rankcast.transports.shm import create_segment
from rankcast.wire.handles import Handle

#: The modes in which workers say which boxes they want, so that tensors can go by route.
ROUTED = ("auto", "direct")
#: The bytes of the segment with which workers try whether they can open what this trainer exports.
_PROBE_BYTES = 4096


class Leading:
    """Rank 0's side of a sync."""

    def __init__(
        self,
        lead: Lead,
        channel: ReportChannel,
        kind: str,
        manifest: Manifest,
        *,
        mode: str,
        transport: str,
        pause_mode: str | None,
    ) -> None:
        self.lead = lead
        self.kind = kind
        self.planning = Planning(lead.fleet, manifest, mode=mode)
        self.total_bytes = 0
        self._fleet = lead.fleet
        self._channel = channel
        self._mode = mode
        self._transport = transport
        self._pause = pause_mode
        self._version = ""
        self._manifest = manifest
        self._installs = 0
        self._open = False
        self._published = False
        self._seconds: dict[tuple[str, int], float] = {}
        self._shares: Mapping[tuple[str, int], Share] = {}

    @classmethod
    def meet(
        cls,
        lead: Lead,
        channel: ReportChannel,
        manifest: Manifest,
        *,
        mode: str,
        transport: str,
        pause_mode: str | None,
    ) -> Leading:
        """Meet the fleet, and find out by a probe how its workers can open what this trainer exports.

        Raises ``PushError`` as ``Lead.meet`` does, and ``UnsupportedError`` when a worker can open neither kind.
        """
        why: dict[str, str] = {}
        for kind in ("shm", "shm_name"):
            with create_segment(_PROBE_BYTES, kind=kind) as probe:
                answer = lead.meet(manifest, probe.handle, wanted=mode in ROUTED)
            shut = next(((r.worker.label, r.unreachable) for _, r in answer.reports if not r.opened), None)
            if shut is None:
                return cls(lead, channel, kind, manifest, mode=mode, transport=transport, pause_mode=pause_mode)
            why[kind] = f"{shut[0]}: {shut[1]}"
        raise UnsupportedError(
            "a worker cannot open this trainer's shared memory, neither through /proc "
            f"({why['shm']}) nor under /dev/shm ({why['shm_name']}): run both on one host as one user"
        )

    def open(self, version: str, *, moved: bool) -> bool:
        """Claim, pause and start; returns whether workers were met anew, which have nothing open of what is exported.

        The claim comes first: an engine that a dead trainer had paused is known by the claim that it left. ``moved``
        says that shards lie elsewhere than at the last push.
        """
        self._version = version
        self._seconds = {}
        self._published = False
        self._requests = _requests(self._fleet.engines)
        self._fleet.worker_calls = 0
        self._open = True
        met: list[Engine] = []

        def meet_again(engines: Sequence[Engine]) -> None:
            # Workers that restarted or joined late get the manifest again, and then everything.
            met.extend(engines)
            with create_segment(_PROBE_BYTES, kind=self.kind) as probe:
                self.lead.meet(self._manifest, probe.handle, engines, wanted=self._mode in ROUTED)

        self.lead.claim(version, meet_again)
        self.planning.renew(met=bool(met), moved=moved)
        refuse(pause(self._fleet, self._pause), f"push of {version!r} refused: an engine could not be paused")
        self.lead.start()
        return bool(met)

    def prepare(self, rest: Manifest, placed: Placed, handles: tuple[Handle, ...]) -> int:
        """Returns, when every worker has proved the whole session, how many installs come before the staged rounds."""
        self._shares = self.planning.shares(rest, placed, handles)
        programs = 1 if self.planning.ways.direct else 0
        self._installs = programs + placed.installs
        self.lead.prepare(self._shares, self._installs)
        self.total_bytes = sum(share.nbytes for share in self._shares.values())
        return programs

    def install(self, turn: int, done: int) -> int:
        """Send a round; returns ``done`` plus the bytes that workers were told to read with it."""
        self.lead.install(turn)
        return done + sum(share.nbytes_by_install[turn] for share in self._shares.values())

    def installed(self) -> None:
        """Wait for the round under way."""
        for engine, report in self.lead.installed():
            who = (engine.id, report.worker.rank)
            self._seconds[who] = self._seconds.get(who, 0.0) + report.seconds

    def finish(self) -> None:
        """Every worker of every engine attests."""
        self.lead.finish()

    def publish(self) -> None:
        """Name the version everywhere, drop old caches, and only then resume and give the lease back.

        The lease goes last: were this trainer to die before, the next one sees by it whose pause it finds.
        """
        self.lead.set_version()
        refuse(reset_caches(self._fleet), "the weights are installed but not published")
        self._open, self._published = False, True
        stuck = resume(self._fleet)
        released = self.lead.release().faults
        refuse(stuck, f"{self._version!r} is published but an engine did not resume")
        refuse(released, f"{self._version!r} is published but an engine did not give its lease back")

    def abandon(self, reason: str) -> str:
        """End the session on the whole fleet; says what it serves now. Never raises."""
        try:
            if self._published:
                return f"every worker serves {self._version!r}; what did not resume stays paused"
            if not self._open:
                return "no session was open: every worker serves what it had"
            self._open = False
            state = self.lead.abort(reason)
            if not self.lead.serves_old:
                paused = any(engine.paused_by_us for engine in self._fleet.engines)
                held = "Engines stay paused: push again, which resumes them when every worker is whole"
                return f"{state}. {held if paused else 'Push again'}"
            stuck = resume(self._fleet)
            return state + "".join(f"; {fault} (still paused)" for fault in stuck)
        except Exception as error:
            return f"the fleet could not be told to abort ({type(error).__name__}: {error}): ask rankcast status"

    def report(self, clock: StageClock, *, staged_bytes: int) -> PushReport:
        """The report of the push just published."""
        rows = []
        for engine, worker in self._fleet.workers():
            rank, share = worker.rank, self._shares[engine.id, worker.rank]
            rows.append(
                WorkerRow(
                    engine=engine.id,
                    where=engine.where,
                    rank=rank,
                    dp=worker.dp,
                    pp=worker.pp,
                    tp=worker.tp,
                    ep=worker.ep,
                    tensors=share.tensors,
                    nbytes=share.nbytes,
                    calls=share.calls,
                    seconds=self._seconds.get((engine.id, rank), 0.0),
                )
            )
        calls = sum(row.calls for row in rows)
        requests, request_bytes = _requests(self._fleet.engines)
        return PushReport(
            weight_version=self._version,
            mode=self._mode,
            transport=self._transport,
            seconds=clock.elapsed,
            stage_seconds=dict(clock.seconds),
            rounds=self._installs,
            tensors=len(self._manifest),
            nbytes=self.total_bytes,
            staged_bytes=staged_bytes,
            worker_calls=calls,
            control_calls=self._fleet.worker_calls - calls,
            requests=requests - self._requests[0],
            request_bytes=request_bytes - self._requests[1],
            ignored=self.lead.ignored,
            direct_tensors=len(self.planning.ways.direct),
            through_loader=dict(Counter(self.planning.ways.reasons.values())),
            workers=tuple(rows),
        )

    def close(self) -> None:
        """Give everything back; engines that cannot be reached any more are left alone."""
        self.lead.release(connection=True)
        self._channel.close()
        for engine in self._fleet.engines:
            close = getattr(engine.client, "close", None)
            if callable(close):
                close()


def _requests(engines: Sequence[Engine]) -> tuple[int, int]:
    """Requests and bytes of bodies so far; a client that does not count counts as nothing."""
    clients = [engine.client for engine in engines]
    return (
        sum(getattr(client, "requests", 0) for client in clients),
        sum(getattr(client, "request_bytes", 0) for client in clients),
    )
