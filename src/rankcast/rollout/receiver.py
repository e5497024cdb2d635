"""The receiver: one worker's side of every call, over a model and an installer.

This module joins the session machine, the entries and the installer, and reports what happened. It must not know which
engine it sits in, nor how bytes are shared. In a session of rankcast's own no call raises: engines that fan a call out
to several workers read the replies in rank order, and one that raises leaves the others' replies behind for the next
call to find. What went wrong goes to the report channel instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rankcast.control.reporter import Reporter
from rankcast.errors import AuthenticationError, PayloadError, RankcastError, StateError
from rankcast.process import this_process
from rankcast.rollout.answer import Answer
from rankcast.rollout.bare import BareSession
from rankcast.rollout.connection import Connection
from rankcast.rollout.installer import Installer, LoaderInstaller, LoadWeights
from rankcast.rollout.writing import Writing
from rankcast.session import Session
from rankcast.topology import Worker
from rankcast.wire.bodies import (
    Abort,
    Claim,
    EntryBody,
    Identify,
    Init,
    InitBody,
    Install,
    Prepare,
    Release,
    kind_of,
)
from rankcast.wire.codec import Codec, find_secret
from rankcast.wire.payload import bare_entry, check_addressee, check_transport, is_bare, is_routed, pick
from rankcast.wire.reports import Fault, Report, error_of

Payload = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Receiver:
    """Takes weight updates into ``model``, for one worker.

    ``worker`` says who this is (default: the only worker of an engine of its own). ``load_weights`` takes an iterator
    of ``(checkpoint name, full tensor)`` and slices by rank itself; without one, the model's own, or a loader that
    copies parameters by name. ``installer`` replaces both for engines that post-process. ``secret`` defaults to
    ``RANKCAST_SECRET`` or ``RANKCAST_SECRET_FILE``.

    The four methods of vLLM's weight-transfer protocol raise ``RankcastError`` for clients without a session of
    rankcast's own, and never raise within one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        worker: Worker | None = None,
        load_weights: LoadWeights | None = None,
        installer: Installer | None = None,
        secret: str | None = None,
    ) -> None:
        self.worker = worker or Worker(process=this_process())
        self.weight_version = ""
        self._installer: Installer = installer or LoaderInstaller(model, load_weights)
        self._codec = Codec(find_secret(secret))
        self._session = Session()
        self._connection: Connection | None = None
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
        self._call("finish")
        if weight_version is not None:
            self.update_weight_version(weight_version)

    def abort_weight_update(self) -> None:
        """End an open session: the old weights stay if nothing was written, else the worker is unusable."""
        self._call("abort")

    def update_weight_version(self, weight_version: str) -> None:
        """Say what these weights are called; raises ``StateError`` while they are incomplete."""
        with self._lock:
            if not self._session.servable:
                raise StateError(f"the weights of {self.worker.label} are incomplete: they have no version")
            self.weight_version = weight_version

    def close(self) -> None:
        """Unmap what is open and close the report connection."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._drop_bare()
            self._reporter.close()

    # -- one door for every call -------------------------------------------------------------------------------------

    def handle(self, call: str, argument: object = None) -> Report:
        """Do ``call`` (init, start, update, finish, abort), report it to the trainer, and return the report.

        Never raises: an engine that routes outcomes itself reads ``faults`` of what comes back.
        """
        return self.answer(call, argument)[0]

    def _call(self, call: str, argument: object = None) -> None:
        """Raise the first fault for a caller that has no report channel; within rankcast's own sessions, nothing."""
        report, told = self.answer(call, argument)
        if report.faults and not told:
            raise error_of(report.faults[0], worker=self.worker.label)

    def answer(self, call: str, argument: object = None) -> tuple[Report, bool]:
        """``handle``, and whether there was a report channel to tell."""
        with self._lock:
            started = time.monotonic()
            answer = Answer(call)
            try:
                self._act(answer, argument)
            except Exception as fault:
                # Also a bug of ours: an exception here would put the engine's replies out of step.
                answer.faults.append(Fault.of(fault))
            report = self._report(answer, time.monotonic() - started)
            if answer.url:
                self._reporter.send(answer.url, report)
            return report, bool(answer.url)

    def _act(self, answer: Answer, argument: object) -> None:
        actions: dict[str, Callable[[Answer, Any], None]] = {
            "init": self._init,
            "start": self._start,
            "update": self._update,
            "finish": self._finish,
            "abort": self._abort_call,
        }
        if answer.call not in actions:
            raise PayloadError(f"unknown call {answer.call!r}: {', '.join(actions)}")
        if self._session.claimed:
            answer.url, answer.session = self._report_url, self._session.name or ""
        actions[answer.call](answer, argument)

    # -- init route ----------------------------------------------------------------------------------------------------

    def _init(self, answer: Answer, init_info: object) -> None:
        if isinstance(init_info, Mapping) and not init_info and not self._codec.signed:
            answer.url = ""  # whoever asks is not the trainer that listens there
            self._session.check_lease(None, time.monotonic())
            self._end_open_session(answer)
            self._session.forget_holder()
            return
        body: InitBody = self._codec.open(init_info, InitBody, what="an init message")
        answer.url, answer.request, answer.call = body.report, body.request, kind_of(body)
        now = time.monotonic()
        match body:
            case Identify():
                pass
            case Init():
                self._session.check_lease(body.owner, now)
                self._end_open_session(answer)
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                answer.opened, answer.unreachable = Connection.try_probe(body.probe)
                self._connection = Connection(body.connection, body.manifest, self._installer, casts=body.wanted)
                answer.touched = self._connection.touched()
                answer.wanted = self._connection.wanted() if body.wanted else None
            case Claim():
                self._session.check_lease(body.owner, now)
                # Also without an open session its trainer may have died: between claim and start, or before release.
                answer.ended = self._session.left_behind(body.owner)
                self._end_open_session(answer)
                self._session.claim(body.session, body.owner, body.lease_seconds, now)
                self._report_url = body.report
            case Release():
                self._session.release(body.owner)
                if self._connection is not None and body.connection and self._connection.name == body.connection:
                    self._connection.close()
                    self._connection = None

    def _end_open_session(self, answer: Answer) -> None:
        """A session found open when a new one is asked for was left by a trainer that died."""
        if self._session.is_open:
            self._abandon()
            answer.ended = True

    # -- update route --------------------------------------------------------------------------------------------------

    def _start(self, answer: Answer, argument: object) -> None:
        if not self._session.claimed and self._codec.signed:
            raise AuthenticationError("start came without a signed claim, and this worker has a secret")
        self._session.start()
        self._writing.start()
        if not self._session.claimed:
            self._drop_bare()
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
                check_transport(body.transport, routed=is_routed(payload))
                self._prepare(answer, body)
            case Install():
                self._install(answer, body)
            case Abort():
                self._abandon()

    def _prepare(self, answer: Answer, body: Prepare) -> None:
        if not self._session.may_prepare(body.sequence):
            answer.repeated = True
            return
        if self._connection is None or self._connection.name != body.connection:
            raise StateError(f"{self.worker.label} does not know connection {body.connection[:8]}: init first")
        self._connection.prepare(body)
        self._next_version = body.weight_version
        self._session.prepared(body.installs)

    def _install(self, answer: Answer, body: Install) -> None:
        if not self._session.may_install(body.sequence):
            answer.repeated = True
            return
        assert self._connection is not None, "prepared implies connected"
        if body.round != body.sequence - 1:
            raise PayloadError(f"install {body.sequence} names round {body.round}: rounds are installed in order")
        prepared = self._connection.prepared
        turn = body.round - (prepared.program is not None)
        if prepared.program is not None and turn < 0:
            self._connection.verify()
            self._writing.program(prepared.program)
            answer.nbytes = prepared.program.nbytes
        else:
            self._writing.weights(prepared.delivery.weights(turn))
            answer.tensors, answer.nbytes = prepared.delivery.count(turn), prepared.delivery.nbytes(turn)
        self._session.installed(body.sequence)

    def _update_bare(self, answer: Answer, entry: Mapping[str, Any], *, routed: bool) -> None:
        if self._codec.signed:
            raise AuthenticationError("a bare entry came, and this worker has a secret: only signed entries are taken")
        if self._session.claimed:
            raise StateError("a bare entry came, but a rankcast session is open")
        if not self._session.is_open or self._bare is None:
            raise StateError(f"update, but no session is open (the worker is {self.state}): start first")
        parsed = bare_entry(entry)
        check_transport(parsed.transport, routed=routed)
        if not parsed.names:
            return
        delivery = self._bare.check(parsed)
        self._writing.weights(delivery.weights(0))
        self._bare.deliver(parsed)
        answer.tensors, answer.nbytes = delivery.count(0), delivery.nbytes(0)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, answer: Answer, argument: object) -> None:
        self._session.check_finish()
        if self._bare is not None:
            self._finish_bare()
        wrote = self._writing.finish()
        own = self._session.claimed
        self._session.finished()
        if own:
            self.weight_version = self._next_version
        elif wrote:
            self.weight_version = ""

    def _finish_bare(self) -> None:
        assert self._bare is not None
        try:
            self._bare.check_complete(whole=self.servable)
        except RankcastError:
            self._abandon()
            raise
        finally:
            self._drop_bare()

    def _abort_call(self, answer: Answer, argument: object) -> None:
        if argument is not None:
            self._update(answer, argument)
            return
        if self._codec.signed:
            raise AuthenticationError("an unsigned abort came, and this worker has a secret")
        if self._session.claimed:
            self._session.check_lease(None, time.monotonic())
        self._abandon()

    def _abandon(self) -> None:
        self._writing.abandon()
        self._session.abandon()
        if not self._session.servable:
            self.weight_version = ""
        self._drop_bare()

    def _drop_bare(self) -> None:
        if self._bare is not None:
            self._bare.close()
            self._bare = None

    # -- answering -----------------------------------------------------------------------------------------------------

    def _report(self, answer: Answer, seconds: float) -> Report:
        connection = self._connection
        return answer.report(
            self.worker,
            self._session,
            weight_version=self.weight_version,
            connection=connection.name if connection is not None else "",
            plan_hash=connection.plan_hash if connection is not None else "",
            seconds=seconds,
            unsent=self._reporter.unsent,
        )
