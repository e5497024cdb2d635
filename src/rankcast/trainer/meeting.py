"""Meeting a fleet: every worker says who it is, what it can open, and what it takes of the trainer's tensors.

This module knows the init message and what must hold of its answers. It must not know sessions, or what the answers
are used for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rankcast.errors import UnsupportedError
from rankcast.manifest import Manifest, listed
from rankcast.trainer.engine import Engine, WorkerFault, refuse
from rankcast.trainer.speaker import Heading, Speaker
from rankcast.wire.bodies import Init
from rankcast.wire.handles import Handle
from rankcast.wire.reports import Fault


@dataclasses.dataclass(frozen=True)
class Scope:
    """What the fleet as a whole leaves out: tensors that every worker passes over on purpose, and buffers by the names
    that workers have for them, which no tensor fills."""

    ignored: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Met:
    """What came of a meeting: what is left out, and of the workers that cannot open the probe the first, with why."""

    scope: Scope
    shut: tuple[str, str] | None


def meet(
    speaker: Speaker, manifest: Manifest, probe: Handle, engines: Sequence[Engine] | None = None, *, wanted: bool
) -> Met:
    """Init: every worker says who it is, whether it can open ``probe``, and which tensors it touches.

    With ``wanted`` it also says which boxes of them it wants, and where. ``engines`` are those to meet (default: all);
    what must hold is looked at for the whole fleet. Raises ``PushError`` listing every fault: unknown tensors, wrong
    shapes or dtypes, parameters left incomplete; and ``UnsupportedError`` for an engine that has two names. Workers
    that were refused, or that cannot open the probe, stay strangers: a claim must not find them known.
    """
    fleet = speaker.fleet

    def body(engine: Engine, heading: Heading) -> Init:
        return Init(
            request=heading.request,
            report=speaker.report_url,
            connection=speaker.connection,
            count=heading.count,
            owner=speaker.owner,
            manifest=manifest,
            probe=probe,
            wanted=wanted,
        )

    asked = list(fleet.engines if engines is None else engines)
    replies = speaker.ask("init", body, asked)
    known: dict[str, Engine] = {}
    for engine in asked:
        engine.take_over(replies.of(engine))
    for engine in fleet.engines:
        # Of two names for one engine the second one's messages are repeated ones, which says nothing to anybody.
        said = {report.worker.engine for report in replies.of(engine)} or {engine.id}
        for other in (known.setdefault(name, engine) for name in said if name):
            if other is not engine:
                raise UnsupportedError(f"{other.where} and {engine.where} are the same engine: name it once")
    refuse(replies.faults, "connect refused")
    for engine in asked:
        reports = replies.of(engine)
        engine.meet(reports)
        engine.nonces = {}
        engine.meetings += 1
        engine.touched = {r.worker.rank: r.touched for r in reports if r.touched is not None}
        engine.wanted = {r.worker.rank: r.wanted for r in reports if r.wanted is not None}
        engine.plan_hashes = {}
    shut = next(((r.worker.label, r.unreachable) for _, r in replies.reports if not r.opened), None)
    met = Met(_scope(fleet.engines, manifest), shut)
    if shut is None:
        for engine in asked:
            engine.nonces = {str(report.worker.rank): report.nonce for report in replies.of(engine)}
    return met


def _scope(engines: Sequence[Engine], manifest: Manifest) -> Scope:
    faults: list[WorkerFault] = []
    ignored: set[int] = set()
    untouched: dict[str, None] = {}
    for engine in engines:
        taken: set[int] = set()
        passed: set[int] = set()
        for rank, touched in engine.touched.items():
            taken.update(touched.names)
            passed.update(touched.ignored)
            untouched.update(dict.fromkeys(touched.untouched))
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
    return Scope(tuple(manifest.names[i] for i in sorted(ignored)), tuple(untouched))
