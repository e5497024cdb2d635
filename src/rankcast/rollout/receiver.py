"""The receiver: one worker's side of every call, over a model and an installer.

This module joins the session machine, the entries and the installer, and reports what happened. It must not know which
engine it sits in, nor how bytes are shared. In a session of rankcast's own no call raises: engines that fan a call out
to several workers read the replies in rank order, and one that raises leaves the others' replies behind for the next
call to find. What went wrong goes to the report channel instead, and only when it cannot be delivered there, or when
the caller may be somebody else than who listens there, does the call raise after all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rankcast.control.reporter import Reporter
from rankcast.errors import AuthenticationError, InstallError, PayloadError, RankcastError, StateError
from rankcast.process import this_process
from rankcast.rollout.answer import Answer
from rankcast.rollout.bare import BareSession
from rankcast.rollout.connection import Connection
from rankcast.rollout.connections import Connections
from rankcast.rollout.installer import Installer, LoaderInstaller, LoadWeights
from rankcast.rollout.writing import Writing
from rankcast.session import Session
from rankcast.topology import Worker
from rankcast.transports.opening import MAPPED, PLANES
from rankcast.wire.bodies import (
    Abort,
    Claim,
    EntryBody,
    Identify,
    Init,
    InitBody,
    Install,
    Owner,
    Prepare,
    Release,
    kind_of,
)
from rankcast.wire.codec import Codec, find_secret
from rankcast.wire.payload import bare_entry, check_addressee, check_transport, is_bare, is_routed, pick
from rankcast.wire.reports import UNREPORTED, Fault, Report, error_of

Payload = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Receiver:
    """Takes weight updates into ``model``, for one worker.

    ``worker`` says who this is (default: the only worker of an engine of its own). ``load_weights`` takes an iterator
    of ``(checkpoint name, full tensor)`` and slices by rank itself; without one, the model's own, or a loader that
    copies parameters by name. ``installer`` replaces both for engines that post-process. ``secret`` defaults to
    ``RANKCAST_SECRET`` or ``RANKCAST_SECRET_FILE``.

    ``weight_version`` is the published name of the weights, empty while they have none.

    The four methods of vLLM's weight-transfer protocol raise ``RankcastError`` for clients without a session of
    rankcast's own. Within one they raise only what could not be reported to the trainer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        worker: Worker | None = None,
        load_weights: LoadWeights | None = None,
        installer: Installer | None = None,
        secret: str | bytes | None = None,
    ) -> None:
        self.worker = worker or Worker(process=this_process())
        self.weight_version = ""
        self._installer: Installer = installer or LoaderInstaller(model, load_weights)
        self._codec = Codec(find_secret(secret))
        self._session = Session()
        self._connections = Connections(self._installer)
        self._attested = ""
        self._bare: BareSession | None = None
        self._next_version = ""
        self._reporter = Reporter(self._codec)
        self._report_url = ""
        self._writing = Writing(self._installer, self._session, self.worker.label)
        self._lock = threading.RLock()

    # -- what an engine asks ---------------------------------------------------------------------------------------

    @property
    def servable(self) -> bool:
        """False from the first write of a session until its weights are complete, and after a failure."""
        return self._session.servable

    @property
    def state(self) -> str:
        return str(self._session.state)

    @property
    def session_open(self) -> bool:
        return self._session.is_open

    # -- vLLM's four calls, and two more -----------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: Payload) -> None:
        self._call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        report = self._call("finish")
        if weight_version is not None and not report.faults:
            self.update_weight_version(weight_version)

    def abort_weight_update(self) -> None:
        """End an open session: the old weights stay if nothing was written, else the worker is unusable."""
        self._call("abort")

    def update_weight_version(self, weight_version: str) -> None:
        """Say what these weights are called.

        Raises ``StateError`` while they are incomplete, and ``AuthenticationError`` when a secret is set and no signed
        session has installed them under this very name.
        """
        with self._lock:
            if not self._session.servable:
                raise StateError(f"the weights of {self.worker.label} are incomplete: they have no version")
            if self._codec.signed and weight_version != self._attested:
                raise AuthenticationError(
                    f"{self.worker.label} was told, unsigned, to call its weights {weight_version!r}, but a signed "
                    f"session installed {self._attested!r}: push them under the name that they are to have",
                    worker=self.worker.label,
                )
            self.weight_version = weight_version

    def close(self) -> None:
        """Unmap what is open and close the report connection."""
        with self._lock:
            self._connections.close()
            self._drop_bare()
            self._reporter.close()

    # -- one door for every call -------------------------------------------------------------------------------------

    def handle(self, call: str, argument: object = None) -> Report:
        """Do ``call`` (one of ``_act``), report it to the trainer, and return the report; never raises."""
        return self.answer(call, argument)[0]

    def _call(self, call: str, argument: object = None) -> Report:
        """Raise the first fault for a caller to whom it was not reported; within rankcast's own sessions, nothing."""
        report, told = self.answer(call, argument)
        if report.faults and not told:
            raise error_of(report.faults[0], worker=self.worker.label)
        return report

    def answer(self, call: str, argument: object = None) -> tuple[Report, bool]:
        """``handle``, and whether the caller was told of it by a report that was delivered."""
        with self._lock:
            started = time.monotonic()
            answer = Answer(call)
            try:
                self._act(answer, argument)
            except Exception as fault:  # also a bug of ours: raised here it puts the engine's replies out of step
                answer.faults.append(Fault.of(fault))
            report = self._report(answer, time.monotonic() - started)
            # Each report takes part of a push's time: not where its sender was heard just before, and all is well.
            unasked = report.call in UNREPORTED and not report.faults
            told = bool(answer.url) and not unasked and self._reporter.send(answer.url, report)
            return report, told and not answer.raises

    def _act(self, answer: Answer, argument: object) -> None:
        actions: dict[str, Callable[[Answer, Any], None]] = {
            "init": self._init,
            "start": self._start,
            "update": self._update,
            "finish": self._finish,
            "abort": self._abort_call,
            "abandon": lambda answer, _: self._end(answer),
            "disown": lambda answer, _: self._end(answer, disown=True),
        }
        if answer.call not in actions:
            raise PayloadError(f"unknown call {answer.call!r}: {', '.join(actions)}")
        if self._session.claimed:
            answer.url, answer.session = self._report_url, self._session.name or ""
        actions[answer.call](answer, argument)

    # -- init route ----------------------------------------------------------------------------------------------------

    def _init(self, answer: Answer, init_info: object) -> None:
        now = time.monotonic()
        if isinstance(init_info, Mapping) and not init_info and not self._codec.signed:
            answer.url = ""  # whoever asks is not the trainer that listens there
            self._session.check_lease(None, now)
            self._make_way(answer, None)
            return
        body: InitBody = self._codec.open(init_info, InitBody, what="an init message")
        answer.url, answer.request, answer.call = body.report, body.request, kind_of(body)
        if not isinstance(body, Identify):
            self._connections.check_count(body)
        match body:
            case Identify():
                pass
            case Init():
                self._session.check_init(body.owner, now)
                self._make_way(answer, body.owner)
                answer.opened, answer.unreachable = Connection.try_probe(body.probe)
                connection = self._connections.open(body)
                answer.touched = connection.touched()
                answer.wanted = connection.wanted() if body.wanted else None
            case Claim():
                self._session.check_lease(body.owner, now)
                if not self._connections.knows(body, self.worker.rank):
                    # Not a fault: this worker is new to that trainer, which sees it by this and begins with an init.
                    answer.stranger = True
                    return
                self._make_way(answer, body.owner)
                self._session.claim(body.session, body.owner, body.lease_seconds, now)
                self._report_url = body.report
            case Release():
                held = self._session.release(body.owner, settled=body.settled, published=body.published)
                if held and body.published and self.servable:
                    self.weight_version = self._attested
                if body.close:
                    self._connections.close(body.connection)

    def _make_way(self, answer: Answer, owner: Owner | None) -> None:
        """End what was left by whoever died or let its lease run out, now that ``owner`` (or nobody) comes instead."""
        if self._session.is_open:
            self._end(answer)
            answer.ended = True
        elif self._session.held_by_other(owner):
            self._session.forget_holder()
            answer.ended = True

    # -- update route --------------------------------------------------------------------------------------------------

    def _start(self, answer: Answer, argument: object) -> None:
        lapsed = self._session.lapsed(time.monotonic())
        if lapsed:
            answer.url = ""  # whoever starts now is not the trainer that claimed
        if self._codec.signed and (lapsed or not self._session.claimed):
            raise AuthenticationError("start came without a signed claim, and this worker has a secret")
        if lapsed:
            self._make_way(answer, None)
        # Two starts come from two callers, and the one who listens on the channel need not be the second.
        answer.raises = self._session.is_open
        self._session.start()
        try:
            self._writing.abandon()
        except RankcastError:
            self._end(answer)
            raise
        self._drop_bare()
        if not self._session.claimed:
            self._bare = BareSession(self._installer)

    def _update(self, answer: Answer, payload: Any) -> None:
        entry = pick(payload, self.worker)
        if is_bare(entry):
            self._update_bare(answer, entry, routed=is_routed(payload))
            return
        body: EntryBody = self._codec.open(entry, EntryBody, what=f"the entry of {self.worker.label}")
        answer.call, answer.sequence = kind_of(body), body.sequence
        check_addressee(body, self.worker)
        self._session.check_session(body.session)
        self._session.renew(time.monotonic())
        match body:
            case Prepare():
                check_transport(body.transport, routed=is_routed(payload), spoken=PLANES)
                self._prepare(answer, body)
            case Install():
                self._install(answer, body)
            case Abort():
                self._end(answer)

    def _prepare(self, answer: Answer, body: Prepare) -> None:
        again = not self._session.may_prepare(body.sequence)
        connection = self._connections.current
        if connection is None or connection.name != body.connection:
            raise StateError(f"{self.worker.label} does not know connection {body.connection[:8]}: init first")
        if again:
            if not connection.holds(body) or body.weight_version != self._next_version:
                raise StateError(
                    f"{self.worker.label} was prepared for {self._next_version!r} by plan "
                    f"{connection.plan_hash[:8]}, and a second prepare is for {body.weight_version!r} by plan "
                    f"{body.plan_hash[:8]}: abort, and start again"
                )
            answer.repeated = True
            return
        connection.prepare(body)
        self._next_version = body.weight_version
        self._session.prepared(body.installs)

    def _install(self, answer: Answer, body: Install) -> None:
        answer.repeated = not self._session.may_install(body.sequence)
        connection = self._connections.current
        assert connection is not None, "prepared implies connected"
        if body.round != body.sequence - 1:
            raise PayloadError(f"install {body.sequence} names round {body.round}: rounds are installed in order")
        prepared = connection.prepared
        answer.tensors, answer.nbytes = prepared.carries(body.round)
        if not answer.repeated:
            if prepared.program is not None and body.round == 0:
                connection.verify()
                self._writing.program(prepared.program)
            else:
                self._writing.weights(prepared.weights(body.round))
            self._session.installed(body.sequence)
        # A repeated one is answered as the first was, whose answer may be lost.
        answer.digests = prepared.said(body.round)

    def _update_bare(self, answer: Answer, entry: Mapping[str, Any], *, routed: bool) -> None:
        if self._codec.signed:
            raise AuthenticationError("a bare entry came, and this worker has a secret: only signed entries are taken")
        if self._session.claimed:
            answer.raises = True
            raise StateError("a bare entry came, but a rankcast session is open")
        if not self._session.is_open or self._bare is None:
            raise StateError(f"update, but no session is open (the worker is {self.state}): start first")
        parsed = bare_entry(entry)
        check_transport(parsed.transport, routed=routed, spoken=MAPPED)
        if not parsed.names:
            return
        delivery = self._bare.check(parsed)
        self._writing.weights(delivery.weights(0))
        self._bare.deliver()
        answer.tensors, answer.nbytes = delivery.count(0), delivery.nbytes(0)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, answer: Answer, argument: object) -> None:
        self._session.check_finish()
        if self._bare is not None:
            self._finish_bare(answer)
        wrote = self._writing.finish()
        answer.wrote = wrote or not self._installer.required()
        own = self._session.claimed
        self._session.finished(wrote=wrote)
        if own or wrote:
            # Named by what was installed, but not published: the name that counts comes once every worker has attested.
            self._attested = self._next_version if own else ""
            self.weight_version = ""

    def _finish_bare(self, answer: Answer) -> None:
        assert self._bare is not None
        try:
            self._bare.check_complete(whole=self.servable)
        except RankcastError:
            self._end(answer)
            raise
        finally:
            self._drop_bare()

    def _abort_call(self, answer: Answer, argument: object) -> None:
        if argument is not None:
            self._update(answer, argument)
            return
        answer.raises = True  # a trainer of rankcast's own sends an entry, so that this is somebody else
        if self._codec.signed:
            raise AuthenticationError("an unsigned abort came, and this worker has a secret")
        if self._session.claimed:
            self._session.check_lease(None, time.monotonic())
        self._end(answer)

    def _end(self, answer: Answer, *, disown: bool = False) -> None:
        """The one place in which a session ends without being finished, or is disowned, whoever ends it and why."""
        unfinished = self._session.is_open or not self._session.servable
        try:
            self._writing.abandon()
        except InstallError as fault:
            answer.faults.append(Fault.of(fault))
        finally:
            self._session.abandon(disown=disown)
        if not self._session.servable:
            self.weight_version = self._attested = ""
        if unfinished and self._connections.current is not None:
            self._connections.current.let_go()  # what it has open belongs to a trainer that may be gone
        self._drop_bare()

    def _drop_bare(self) -> None:
        if self._bare is not None:
            self._bare.close()
            self._bare = None

    # -- answering -----------------------------------------------------------------------------------------------------

    def _report(self, answer: Answer, seconds: float) -> Report:
        return answer.report(
            self.worker,
            self._session,
            weight_version=self.weight_version,
            attested_version=self._attested,
            connection=self._connections.current,
            seconds=seconds,
            unsent=self._reporter.unsent,
        )
