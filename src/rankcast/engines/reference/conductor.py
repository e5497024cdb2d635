"""The fleet's one thread: it speaks to the workers, one thing after another, and gives requests their turns.

This module knows that updates run between forward passes and never within one, and when the engine may generate at all.
It must not know how a fleet is configured, nor HTTP.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from rankcast.engines.agreement import partly_written
from rankcast.engines.reference import messages
from rankcast.engines.reference.processes import WorkerProcesses
from rankcast.engines.reference.request import Request, uncancelled
from rankcast.engines.reference.standing import Standing
from rankcast.engines.reference.turns import PauseMode, RequestQueue
from rankcast.errors import NotServableError, RankcastError, StateError
from rankcast.wire.payload import narrow
from rankcast.wire.reports import Report

#: How often a fleet at rest looks for requests that were held too long, in seconds.
_LOOK_SECONDS = 5.0
_JOIN_SECONDS = 5.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Conductor:
    """Does what is submitted, before the next forward pass, and forward passes while there is nothing else to do.

    ``processes`` must be up when it starts; it ends them when it ends. ``call_seconds`` bounds a call on all workers,
    ``exchange_seconds`` one exchange among them. The methods without an underscore return at once and may be called by
    any thread; what they return is completed by the conductor's.
    """

    def __init__(self, processes: WorkerProcesses, *, call_seconds: float, exchange_seconds: float) -> None:
        self.standing = Standing(processes.layout.workers)
        self.queue = RequestQueue()
        self._processes = processes
        self._layout = processes.layout
        self._call_seconds = call_seconds
        self._exchange_seconds = exchange_seconds
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._gate = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin to end; for a signal handler too."""
        self._stopping = True
        self._processes.stop()

    def join(self) -> None:
        """Wait for the end, after ``stop``; the processes of a thread that never ran are ended here."""
        if self._thread.ident is None:
            self._processes.close()
        else:
            self._thread.join(_JOIN_SECONDS)

    # -- what can be asked -------------------------------------------------------------------------------------------

    def call(self, call: str, argument: object) -> Future[list[Report]]:
        return self._submit(lambda: self._call(call, argument))

    def finish(self, weight_version: str | None) -> Future[list[Report]]:
        return self._submit(lambda: self._finish(weight_version))

    def set_version(self, weight_version: str) -> Future[None]:
        return self._submit(lambda: self._set_version(weight_version))

    def checksums(self) -> Future[list[dict[str, messages.ParameterChecksum]]]:
        return self._submit(self._checksums)

    def resume(self) -> Future[None]:
        return self._submit(self._resume)

    def admit(self, request: Request) -> None:
        """Put ``request`` in line, or fail it."""

        def admit() -> None:
            self._processes.check()
            if not (self.queue.paused and self.standing.session_open):
                self.standing.check_servable()
            self.queue.add(request)

        def refuse(admitted: Future[None]) -> None:
            if (error := _error_of(admitted)) is not None:
                request.fail(error)

        self._submit(admit).add_done_callback(refuse)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Completed once no forward pass will run until ``resume``."""
        done: Future[None] = uncancelled()

        def pause() -> None:
            self._processes.check()
            if mode == "wait" and self.standing.session_open and len(self.queue):
                raise StateError("pause with mode=wait during a weight update: requests cannot finish now, use keep")
            self.queue.pause(mode, done)

        def refuse(accepted: Future[None]) -> None:
            if (error := _error_of(accepted)) is not None:
                done.set_exception(error)

        self._submit(pause).add_done_callback(refuse)
        return done

    # -- the thread --------------------------------------------------------------------------------------------------

    def _submit(self, action: Callable[[], T]) -> Future[T]:
        """Have the fleet's thread do ``action`` before the next forward pass."""
        future: Future[T] = uncancelled()
        with self._gate:
            if self._stopping or not self._thread.is_alive():
                future.set_exception(self._gone())
                return future
            self._commands.append((action, future))
        self._processes.wake()
        return future

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._do_commands()
                request = self.queue.next()
                if request is not None:
                    self._step(request)
                elif not self._commands:
                    self._processes.watch(_LOOK_SECONDS)
                    self.queue.expire()
                if self._processes.lost is not None and len(self.queue):
                    self.queue.fail_all(NotServableError(self._processes.lost), waiting=True)
        except Exception as fault:
            _log.exception("the fleet's thread failed")
            self._processes.lose(f"the fleet's thread failed: {type(fault).__name__}: {fault}")
        finally:
            with self._gate:
                self._stopping = True
            for _, future in self._commands:
                future.set_exception(self._gone())
            self.queue.fail_all(self._gone(), waiting=True)
            self.queue.resume()
            self._processes.close()

    def _do_commands(self) -> None:
        for _ in range(len(self._commands)):
            action, future = self._commands.popleft()
            try:
                result = action()
            except Exception as fault:
                future.set_exception(fault)
            else:
                future.set_result(result)

    def _gone(self) -> NotServableError:
        return NotServableError(self._processes.lost or "the server is shutting down")

    def _everyone(self, command: messages.Command) -> list[messages.Command]:
        return [command] * self._layout.workers

    def _call(self, call: str, argument: object) -> list[Report]:
        self.standing.check_call(call)
        whole = messages.Call(call=call, argument=msgspec.json.encode(argument))
        commands: list[messages.Command] = []
        for rank in range(self._layout.workers):
            part = narrow(argument, rank) if call == "update" else argument
            same = part is argument
            commands.append(whole if same else messages.Call(call=call, argument=msgspec.json.encode(part)))
        answers = self._processes.exchange(commands, messages.Answer, seconds=self._call_seconds, together=False)
        reports = [answer.report for answer in answers]
        self.standing.note(call, reports)
        if call == "finish" and not any(report.faults for report in reports):
            partly = partly_written(reports)
            if partly is not None:
                self._call("disown", None)
                raise StateError(partly)
        return reports

    def _finish(self, weight_version: str | None) -> list[Report]:
        reports = self._call("finish", None)
        if weight_version is not None and not any(report.faults for report in reports):
            self._set_version(weight_version)
        return reports

    def _set_version(self, weight_version: str) -> None:
        self._processes.check()
        self.standing.check_publishable()
        command = messages.SetVersion(weight_version=weight_version)
        self._processes.exchange(self._everyone(command), messages.Done, seconds=self._call_seconds, together=False)
        self.standing.weight_version = weight_version

    def _checksums(self) -> list[dict[str, messages.ParameterChecksum]]:
        command = self._everyone(messages.Checksum())
        found = self._processes.exchange(command, messages.Checksums, seconds=self._call_seconds, together=False)
        return [answer.parameters for answer in found]

    def _resume(self) -> None:
        self._processes.check()
        self.standing.check_resumable()
        self.queue.resume()

    def _step(self, request: Request) -> None:
        """One forward pass on every worker; the weights cannot change within it, and its version is read with it."""
        try:
            self.standing.check_servable()
        except NotServableError as refusal:
            self.queue.fail_all(refusal, waiting=False)
            return
        version = self.standing.weight_version
        command = messages.Step(token_ids=request.sequence, prompt_log_probs=request.wants_prompt)
        seconds = 2 * self._exchange_seconds
        try:
            chosen = self._processes.exchange(self._everyone(command), messages.Chosen, seconds=seconds, together=True)
            speaker = request.replica * self._layout.pp * self._layout.tp + (self._layout.pp - 1) * self._layout.tp
            token = chosen[speaker].token
            if token is None:
                raise RankcastError(f"{self._processes.label(speaker)} chose no token")
        except RankcastError as fault:
            # A pass that failed on one worker leaves its peers waiting for it, and their exchanges out of step.
            self._processes.lose(f"a forward pass failed: {fault.message}")
            request.fail(fault)
            return
        reason = request.took(token, chosen[speaker].log_prob, chosen[speaker].prompt_log_probs, version)
        if reason is not None:
            self.queue.remove(request)
            request.end(reason)


def _error_of(done: Future[Any]) -> RankcastError | None:
    error = done.exception()
    if error is None or isinstance(error, RankcastError):
        return error
    return RankcastError(f"{type(error).__name__}: {error}")
