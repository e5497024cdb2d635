"""Trainer rank 0's part of a session: what it says to the fleet, in which order, and what it concludes.

This module knows the life of a session, from claim to publish or abort. It must not know where weights come from, other
trainer ranks, or how bytes are shared. The one rule above all: no install before every worker of every engine has
reported "prepared", and no version before every worker has attested.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

from rankcast.control.client import capability
from rankcast.errors import StateError
from rankcast.manifest import Manifest, listed
from rankcast.trainer.fleet import Answer, Engine, Fleet, WorkerFault, fault_of, refuse
from rankcast.trainer.shares import Share
from rankcast.wire.bodies import Abort, Claim, Init, Install, Owner, Prepare, Release
from rankcast.wire.codec import Codec
from rankcast.wire.handles import Handle
from rankcast.wire.payload import own_payload
from rankcast.wire.reports import Fault, Report


class Lead:
    """Speaks to the fleet for all trainer ranks."""

    def __init__(
        self, fleet: Fleet, codec: Codec, report_url: str, owner: Owner, *, mode: str, transport: str, lease: float
    ) -> None:
        self.fleet = fleet
        self.connection = secrets.token_hex(16)
        self.ignored: tuple[str, ...] = ()
        self._codec = codec
        self._report_url = report_url
        self._owner = owner
        self._mode = mode
        self._transport = transport
        self._lease = lease
        self._session = ""
        self._version = ""
        self._shares: Mapping[tuple[str, int], Share] = {}
        self._pending: _Pending | None = None
        self._installs = 0
        self.serves_old = True
        self._generations: dict[tuple[str, int], int] = {}
        self._refused: set[tuple[str, int]] = set()
        self._whole: set[tuple[str, int]] = set()
        self._installing = False

    # -- connecting ------------------------------------------------------------------------------------------------

    def meet(
        self, manifest: Manifest, probe: Handle, engines: Sequence[Engine] | None = None, *, wanted: bool = False
    ) -> Answer:
        """Init: every worker says who it is, whether it can open ``probe``, and which tensors it touches.

        With ``wanted`` it also says which boxes of them it wants, and where.

        Raises ``PushError`` listing every fault: unknown tensors, wrong shapes or dtypes, parameters left incomplete.
        """
        requests = {id(engine): secrets.token_hex(8) for engine in self.fleet.engines}

        def send(engine: Engine) -> None:
            body = Init(
                request=requests[id(engine)],
                report=self._report_url,
                connection=self.connection,
                owner=self._owner,
                manifest=manifest,
                probe=probe,
                wanted=wanted,
            )
            engine.client.init_weight_transfer_engine(self._codec.seal(body))

        answer = self.fleet.ask("init", send, key=lambda engine: requests[id(engine)], engines=engines)
        refuse(answer.faults, "connect refused")
        for engine in self.fleet.engines if engines is None else engines:
            reports = answer.of(engine)
            engine.meet(reports)
            engine.take_over(reports)
            engine.touched = {r.worker.rank: r.touched for r in reports if r.touched is not None}
            engine.wanted = {r.worker.rank: r.wanted for r in reports if r.wanted is not None}
            engine.plan_hashes = {}
        self._check_scope(manifest)
        return answer

    def _check_scope(self, manifest: Manifest) -> None:
        faults: list[WorkerFault] = []
        ignored: set[int] = set()
        for engine in self.fleet.engines:
            taken: set[int] = set()
            passed: set[int] = set()
            for rank, touched in engine.touched.items():
                taken.update(touched.names)
                passed.update(touched.ignored)
                if touched.missing_count:
                    gaps = "; ".join(touched.missing)
                    message = f"missing tensors leave {touched.missing_count} parameters incomplete: {gaps}"
                    faults.append(WorkerFault(engine.where, engine.workers[rank].label, Fault("manifest", message)))
            extra = [manifest.names[i] for i in range(len(manifest)) if i not in taken and i not in passed]
            if extra:
                message = f"unknown tensors, which no worker takes: {listed(extra)}"
                faults.append(WorkerFault(engine.where, "", Fault("manifest", message, extra[0])))
            ignored |= passed - taken
        refuse(faults, "connect refused")
        self.ignored = tuple(manifest.names[i] for i in sorted(ignored))

    # -- a session ---------------------------------------------------------------------------------------------------

    def claim(self, version: str, reinit: Callable[[Sequence[Engine]], None]) -> None:
        """Take the lease everywhere. Engines whose workers are new to us go through ``reinit`` then."""
        self._session = secrets.token_hex(16)
        self._version = version
        self._pending = None
        self._generations, self._refused = {}, set()
        self._whole, self._installing = set(), False
        requests = {id(engine): secrets.token_hex(8) for engine in self.fleet.engines}

        def send(engine: Engine) -> None:
            body = Claim(
                request=requests[id(engine)],
                report=self._report_url,
                connection=self.connection,
                session=self._session,
                owner=self._owner,
                lease_seconds=self._lease,
            )
            engine.client.init_weight_transfer_engine(self._codec.seal(body))

        answer = self.fleet.ask("claim", send, key=lambda engine: requests[id(engine)])
        self._generations = {(r.worker.engine, r.worker.rank): r.generation for _, r in answer.reports}
        self._refused = {(r.worker.engine, r.worker.rank) for _, r in answer.reports if r.faults}
        self._whole = {(r.worker.engine, r.worker.rank) for _, r in answer.reports if r.servable}
        refuse(answer.faults, f"push of {version!r} refused")
        strangers = []
        for engine in self.fleet.engines:
            reports = answer.of(engine)
            engine.take_over(reports)
            known = {rank: worker.engine for rank, worker in engine.workers.items()}
            if {r.worker.rank: r.worker.engine for r in reports} != known or any(
                r.connection != self.connection for r in reports
            ):
                engine.meet(reports)
                strangers.append(engine)
            else:
                engine.plan_hashes = {r.worker.rank: r.plan_hash for r in reports}
        if strangers:
            reinit(strangers)

    def start(self) -> None:
        """Open the session on every worker."""
        self._raise(self._ask("start", lambda engine: engine.client.start_weight_update()))

    def prepare(self, shares: Mapping[tuple[str, int], Share], installs: int) -> None:
        """Tell every worker the whole session; returns when all of them have proved theirs.

        ``shares`` has what each worker, by engine id and rank, is to receive; in ``broadcast`` they are all the same.
        """
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
            connection=self.connection,
            mode=self._mode,
            transport=self._transport,
            installs=self._installs,
            plan_hash=share.hash,
            schedule=None if known else share.schedule,
            handles=None if known else share.handles,
            program=None if known else share.program,
        )
        return self._codec.seal(body)

    def install(self, turn: int) -> None:
        """Send round ``turn`` to all engines, without waiting; the one before must have been waited for."""

        def send(engine: Engine) -> None:
            engine.client.update_weights(self._payload(engine, entry))

        def entry(engine: Engine, rank: int | None) -> Mapping[str, str]:
            return self._codec.seal(
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
        self._pending = _Pending(lambda: self._ask("install", send, sequence=turn + 1))

    def installed(self) -> tuple[tuple[Engine, Report], ...]:
        """Wait for the install under way, if one is; raises ``PushError`` when any worker failed."""
        if self._pending is None:
            return ()
        answer, self._pending = self._pending.wait(), None
        self._raise(answer)
        return answer.reports

    def finish(self) -> None:
        """Every worker attests that all it was prepared for is installed."""
        answer = self._ask("finish", lambda engine: engine.client.finish_weight_update())
        self._raise(answer)
        for engine in self.fleet.engines:
            odd = [r.worker.label for r in answer.of(engine) if not r.servable or r.weight_version != self._version]
            if odd or len(answer.of(engine)) != len(engine.workers):
                raise StateError(f"{engine.where}: not every worker attested {self._version!r}: {', '.join(odd)}")

    def set_version(self) -> None:
        """Name the weights on every engine that can be told; only after every worker of every engine attested."""

        def send(engine: Engine) -> None:
            tell = capability(engine.client, "update_weight_version")
            if tell is not None:
                tell(self._version)

        failed = self.fleet.each("update_weight_version", send)
        refuse([WorkerFault(e.where, "", fault_of(error)) for e, error in failed], "the version was not set everywhere")

    def abort(self, reason: str) -> str:
        """End the session everywhere, as far as it can be reached; says in words what the fleet now serves."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        # A worker that refused our claim is in somebody else's session, or in none: its weights are not ours to end.
        ours = {(engine.id, worker.rank) for engine, worker in self.fleet.workers()} - self._refused
        reached = [engine for engine in self.fleet.engines if any((engine.id, rank) in ours for rank in engine.workers)]

        def send(engine: Engine) -> None:
            engine.client.update_weights(self._payload(engine, entry))

        def entry(engine: Engine, rank: int | None) -> Mapping[str, str]:
            return self._codec.seal(
                Abort(
                    session=self._session,
                    engine=engine.id,
                    rank=rank,
                    workers=len(engine.workers),
                    sequence=-1,
                    weight_version=self._version,
                    reason=reason[:500],
                )
            )

        answer = self._ask("abort", send, engines=reached)
        spoke = {(engine.id, report.worker.rank): report for engine, report in answer.reports}
        mute = ours - spoke.keys()
        silent = [w.label for engine, w in self.fleet.workers() if (engine.id, w.rank) in mute]
        broken = [report.worker.label for report in spoke.values() if not report.servable]
        renewed = [
            report.worker.label
            for who, report in spoke.items()
            if report.servable and report.generation != self._generations.get(who)
        ]
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
            f"complete at {self._version!r}, which is not published": renewed,
            "not reached": silent,
        }
        return "; ".join(f"{what}: {', '.join(sorted(who))}" for what, who in parts.items() if who)

    def release(self, *, connection: bool = False) -> Answer:
        """Give the lease back, and on closing the connection too."""
        self.fleet.forget(self._session)
        requests = {id(engine): secrets.token_hex(8) for engine in self.fleet.engines}

        def send(engine: Engine) -> None:
            body = Release(
                request=requests[id(engine)],
                report=self._report_url,
                owner=self._owner,
                connection=self.connection if connection else "",
            )
            engine.client.init_weight_transfer_engine(self._codec.seal(body))

        return self.fleet.ask("release", send, key=lambda engine: requests[id(engine)])

    def _ask(
        self,
        call: str,
        action: Callable[[Engine], object],
        *,
        sequence: int = -1,
        engines: Sequence[Engine] | None = None,
    ) -> Answer:
        session = self._session
        return self.fleet.ask(call, action, key=lambda engine: session, sequence=sequence, engines=engines)

    def _raise(self, answer: Answer) -> None:
        refuse(answer.faults, f"push of {self._version!r} failed")


class _Pending:
    """One call to the fleet running in the background."""

    def __init__(self, action: Callable[[], Answer]) -> None:
        self._result: list[Answer | BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(action,), name="rankcast install", daemon=True)
        self._thread.start()

    def _run(self, action: Callable[[], Answer]) -> None:
        try:
            self._result.append(action())
        except BaseException as error:
            self._result.append(error)

    def wait(self) -> Answer:
        # Bounded: the fleet gives up on an engine that makes no progress.
        self._thread.join()
        result = self._result[0]
        if isinstance(result, BaseException):
            raise result
        return result
