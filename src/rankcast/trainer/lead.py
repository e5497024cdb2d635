"""Trainer rank 0's part of a session: what it says to the fleet, in which order, and what it concludes.

This module knows the life of a session, from claim to publish or abort. It must not know where weights come from, other
trainer ranks, or how bytes are shared. The one rule above all: no install before every worker of every engine has
reported "prepared", and no version before every worker has attested.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from rankcast.errors import EngineError, StateError, travelling
from rankcast.trainer.engine import Engine, Replies, WorkerFault, refuse
from rankcast.trainer.pending import Pending
from rankcast.trainer.shares import Share
from rankcast.trainer.speaker import Heading, Speaker
from rankcast.wire.bodies import Abort, Claim, Install, Prepare, Release
from rankcast.wire.payload import own_payload
from rankcast.wire.reports import Report


class Lead:
    """Speaks to the fleet for all trainer ranks."""

    def __init__(self, speaker: Speaker, *, mode: str, lease: float, digests: bool) -> None:
        self.fleet = speaker.fleet
        self.serves_old = True
        #: Engines that the last abort did not reach, so that a session may still be open there.
        self.unreached: list[Engine] = []
        self._speaker = speaker
        self._mode = mode
        self._transport = "shm"
        self._digests = digests
        self._lease = lease
        self._session = ""
        self._version = ""
        self._shares: Mapping[tuple[str, int], Share] = {}
        self._pending: Pending | None = None
        self._installs = 0
        self._unclaimed: set[tuple[str, int]] = set()
        self._whole: set[tuple[str, int]] = set()
        self._installing = False

    # -- the lease -----------------------------------------------------------------------------------------------------

    def claim(self, version: str, reinit: Callable[[Sequence[Engine]], None]) -> None:
        """Take the lease everywhere. Engines whose workers are new to us go through ``reinit``, and are claimed again.

        Raises ``PushError`` when another trainer holds an engine, and ``EngineError`` when a worker is still a stranger
        after that.
        """
        self.fleet.forget(self._session)
        self._session = secrets.token_hex(16)
        self._version = version
        self._pending = None
        self._unclaimed, self._whole, self._installing = set(), set(), False
        strangers = self._claim(self.fleet.engines)
        if not strangers:
            return
        reinit(strangers)
        strange = self._claim(strangers)
        if strange:
            raise EngineError(
                f"workers of {', '.join(engine.where for engine in strange)} forget this trainer as soon as they have "
                "met it: does the engine restart, or does another trainer connect to it?"
            )

    def _claim(self, engines: Sequence[Engine]) -> list[Engine]:
        """Claim ``engines``; returns those of which a worker does not know this connection, and took no lease."""

        def body(engine: Engine, heading: Heading) -> Claim:
            return Claim(
                request=heading.request,
                report=self._speaker.report_url,
                connection=self._speaker.connection,
                count=heading.count,
                nonces=engine.nonces,
                session=self._session,
                owner=self._speaker.owner,
                lease_seconds=self._lease,
            )

        replies = self._speaker.ask("claim", body, engines)
        for engine in engines:
            reports = replies.of(engine)
            engine.take_over(reports)
            for report in reports:
                who = (report.worker.engine, report.worker.rank)
                whole = report.servable and not report.unpublished
                (self._whole.add if whole else self._whole.discard)(who)
                held = not report.faults and report.connection == self._speaker.connection
                (self._unclaimed.discard if held else self._unclaimed.add)(who)
        refuse(replies.faults, f"push of {self._version!r} refused")
        strangers = []
        for engine in engines:
            reports = replies.of(engine)
            known = {rank: worker.engine for rank, worker in engine.workers.items()}
            if {r.worker.rank: r.worker.engine for r in reports} != known or any(
                r.connection != self._speaker.connection for r in reports
            ):
                engine.meet(reports)
                strangers.append(engine)
            else:
                engine.plan_hashes = {r.worker.rank: r.plan_hash for r in reports}
        return strangers

    def holds(self, engine: Engine) -> bool:
        """Whether no worker of ``engine`` refused the last claim: it may be another trainer's, and its pause too."""
        return not any((engine.id, rank) in self._unclaimed for rank in engine.workers)

    def release(self, *, published: bool = False, close: bool = False) -> Replies:
        """Give the lease back, and with ``close`` the connection too; an engine that is busy is left to its lease.

        ``published`` says that the weights have their name everywhere. An engine that is not left paused is said to be
        settled: of any other the next trainer learns from its workers that the pause it finds is nobody's.
        """

        def body(engine: Engine, heading: Heading) -> Release:
            return Release(
                request=heading.request,
                report=self._speaker.report_url,
                connection=self._speaker.connection,
                count=heading.count,
                owner=self._speaker.owner,
                close=close,
                published=published,
                settled=not engine.paused_by_us,
            )

        engines = [engine for engine in self.fleet.engines if not engine.busy]
        if not (published or close):
            # After an abort, which gave the lease back: only who has something to hear.
            engines = [engine for engine in engines if not engine.paused_by_us and engine not in self.unreached]
        replies = self._speaker.ask("release", body, engines, checked=False)
        self.fleet.forget(self._session)
        return replies

    # -- a session ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the session on every worker."""
        self._raise(self._ask("start", lambda engine: engine.client.start_weight_update()))

    def prepare(self, shares: Mapping[tuple[str, int], Share], installs: int, planes: Sequence[str]) -> None:
        """Tell every worker the whole session; returns when all of them have proved theirs.

        ``shares`` has what each worker, by engine id and rank, is to receive; in ``broadcast`` they are all the same.
        ``planes`` are the transports of all of them. One that does not route is said; of others any one says as much.
        """
        self._transport = next(iter(planes), "shm")
        self._shares = shares
        self._installs = installs

        def send(engine: Engine) -> None:
            engine.client.update_weights(self._payload(engine, self._prepare_entry))

        self._raise(self._ask("prepare", send, sequence=0))
        for engine in self.fleet.engines:
            engine.plan_hashes = {rank: self._shares[engine.id, rank].hash for rank in engine.workers}

    def _payload(self, engine: Engine, entry: Callable[[Engine, int | None], Mapping[str, str]]) -> dict[str, object]:
        ranks: Sequence[int | None] = [None] if self._mode == "broadcast" else sorted(engine.workers)
        return own_payload({rank: dict(entry(engine, rank)) for rank in ranks})

    def _prepare_entry(self, engine: Engine, rank: int | None) -> Mapping[str, str]:
        ranks = list(engine.workers) if rank is None else [rank]
        share = self._shares[engine.id, ranks[0]]
        known = all(engine.plan_hashes.get(r) == share.hash for r in ranks)
        body = Prepare(
            session=self._session,
            engine=engine.id,
            rank=rank,
            workers=len(engine.workers),
            sequence=0,
            weight_version=self._version,
            connection=self._speaker.connection,
            mode=self._mode,
            transport=self._transport,
            digests=self._digests,
            installs=self._installs,
            plan_hash=share.hash,
            schedule=None if known else share.schedule,
            handles=None if known else share.handles,
            program=None if known else share.program,
        )
        return self._speaker.seal(body)

    def install(self, turn: int) -> None:
        """Send round ``turn`` to all engines, without waiting; the one before must have been waited for."""

        def send(engine: Engine) -> None:
            engine.client.update_weights(self._payload(engine, entry))

        def entry(engine: Engine, rank: int | None) -> Mapping[str, str]:
            return self._speaker.seal(
                Install(
                    session=self._session,
                    engine=engine.id,
                    rank=rank,
                    workers=len(engine.workers),
                    sequence=turn + 1,
                    weight_version=self._version,
                    round=turn,
                )
            )

        self._installing = True
        since = self.fleet.ended  # now, and not when the thread gets its turn, which may be after an abort
        self._pending = Pending(self.fleet.callers, lambda: self._ask("install", send, sequence=turn + 1, since=since))

    def installed(self) -> tuple[tuple[Engine, Report], ...]:
        """Wait for the install under way, if one is; raises ``PushError`` when any worker failed."""
        if self._pending is None:
            return ()
        pending, self._pending = self._pending, None
        replies = pending.wait()
        self._raise(replies)
        return replies.reports

    def finish(self) -> None:
        """Every worker attests that all it was prepared for is installed."""
        replies = self._ask("finish", lambda engine: engine.client.finish_weight_update())
        self._raise(replies)
        for engine in self.fleet.engines:
            came = replies.of(engine)
            odd = [r.worker.label for r in came if not r.servable or r.attested_version != self._version]
            if odd or len(came) != len(engine.workers):
                raise StateError(f"{engine.where}: not every worker attested {self._version!r}: {', '.join(odd)}")

    def set_version(self) -> None:
        """Name the weights on every engine that can be told; only after every worker of every engine attested."""

        def send(engine: Engine) -> None:
            tell = engine.optional("update_weight_version")
            if tell is not None:
                tell(self._version)

        failed = self.fleet.each("update_weight_version", send)
        if not failed:
            return
        named = [engine.where for engine in self.fleet.engines if engine not in dict(failed)]
        carry = f"engines that may carry {self._version!r} although it is not published: " + ", ".join(
            [*named, *(f"{engine.where} (not known)" for engine, _ in failed)]
        )
        faults = [WorkerFault.of(engine, error) for engine, error in failed]
        refuse(faults, f"the version was not set everywhere ({carry})")

    def abort(self, reason: str) -> str:
        """End the session everywhere, as far as it can be reached; says in words what the fleet now serves."""
        # An install under way is not waited for: an engine that is still busy with it is found out below.
        self._pending = None
        # A worker that refused our claim is in somebody else's session, or in none: its weights are not ours to end.
        ours = {(engine.id, worker.rank) for engine, worker in self.fleet.workers()} - self._unclaimed
        reached = [engine for engine in self.fleet.engines if any((engine.id, rank) in ours for rank in engine.workers)]

        def send(engine: Engine) -> None:
            engine.client.update_weights(self._payload(engine, entry))

        def entry(engine: Engine, rank: int | None) -> Mapping[str, str]:
            return self._speaker.seal(
                Abort(
                    session=self._session,
                    engine=engine.id,
                    rank=rank,
                    workers=len(engine.workers),
                    sequence=-1,
                    weight_version=self._version,
                    reason=travelling(reason[:500]),
                )
            )

        replies = self._ask("abort", send, engines=reached)
        self.fleet.forget(self._session)
        spoke = {(engine.id, report.worker.rank): report for engine, report in replies.reports}
        mute = ours - spoke.keys()
        self.unreached = [engine for engine in reached if not replies.of(engine)]
        silent = [w.label for engine, w in self.fleet.workers() if (engine.id, w.rank) in mute]
        broken = [report.worker.label for report in spoke.values() if not report.servable]
        # By this session or by one before it, whose publication failed: other workers may have other weights.
        renewed: dict[str, list[str]] = {}
        for report in spoke.values():
            if report.servable and report.unpublished:
                renewed.setdefault(report.attested_version, []).append(report.worker.label)
        # A worker that was whole and was told to install nothing has what it had, even if it cannot say so.
        known = not mute or (not self._installing and mute <= self._whole)
        self.serves_old = known and not broken and not renewed
        if self.serves_old:
            if not silent:
                return "every worker still serves the weights it had before"
            return (
                f"every worker that lives still has the weights it had before; not reached: {', '.join(sorted(silent))}"
            )
        parts = {
            "unusable until the next full push": broken,
            **{f"complete at {version!r}, which is not published": who for version, who in renewed.items()},
            "not reached": silent,
        }
        return "; ".join(f"{what}: {', '.join(sorted(who))}" for what, who in parts.items() if who)

    def _ask(
        self,
        call: str,
        action: Callable[[Engine], object],
        *,
        sequence: int = -1,
        engines: Sequence[Engine] | None = None,
        since: int | None = None,
    ) -> Replies:
        session = self._session
        return self.fleet.ask(call, action, key=lambda engine: session, sequence=sequence, engines=engines, since=since)

    def _raise(self, replies: Replies) -> None:
        refuse(replies.faults, f"push of {self._version!r} failed")
