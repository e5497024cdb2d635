"""The embedded fleet: one engine of several worker processes that serve one checkpoint.

This module knows how a fleet is put together and what can be asked of it. It must not know HTTP, nor in which order the
workers are spoken to (``conductor``).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from rankcast.engines.reference.conductor import Conductor
from rankcast.engines.reference.config import DecoderConfig, read_config
from rankcast.engines.reference.layout import Layout, check_layout
from rankcast.engines.reference.messages import ParameterChecksum
from rankcast.engines.reference.processes import WorkerProcesses
from rankcast.engines.reference.request import Ask, Generation, Request, end_tokens
from rankcast.engines.reference.standing import WorkerStanding
from rankcast.engines.reference.turns import PauseMode
from rankcast.topology import new_engine_id
from rankcast.wire.codec import Codec
from rankcast.wire.reports import Report

#: How long all workers may take over one call of an update, in seconds.
CALL_SECONDS = 300.0
#: How long one exchange between workers may take within a forward pass, in seconds.
EXCHANGE_SECONDS = 60.0


class Fleet:
    """Workers that serve one checkpoint together; see ``Layout`` for the sizes.

    ``secret`` is what trainers sign with, if they do, and ``codec`` opens what they sign. ``start`` spawns the workers,
    ``close`` ends them. Every method raises ``NotServableError``, naming the worker, once a worker was lost. Methods
    may be called by any thread; each ``submit_`` method is the one of the same name, without waiting.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        expert_parallel: bool = False,
        secret: str | bytes | None = None,
        call_seconds: float = CALL_SECONDS,
        exchange_seconds: float = EXCHANGE_SECONDS,
    ) -> None:
        self.layout = Layout(tp=tp, pp=pp, dp=dp, expert_parallel=expert_parallel)
        self.config: DecoderConfig = read_config(checkpoint)
        check_layout(self.config, self.layout)
        self.engine = new_engine_id()
        self._checkpoint = str(checkpoint)
        self._end_tokens = end_tokens(checkpoint)
        self._secret = secret.encode(errors="surrogateescape") if isinstance(secret, str) else secret
        self.codec = Codec(self._secret)
        self._exchange_seconds = exchange_seconds
        self._processes = WorkerProcesses(self.layout)
        self._conductor = Conductor(self._processes, call_seconds=call_seconds, exchange_seconds=exchange_seconds)

    def start(self) -> None:
        """Spawn the workers and wait until all have loaded the checkpoint; raises what a worker failed with."""
        try:
            self._processes.start(self._checkpoint, self.engine, self._secret, self._exchange_seconds)
        except BaseException:
            self._processes.close()
            raise
        self._conductor.start()

    def stop(self) -> None:
        """Begin to end, without waiting; for a signal handler. ``close`` is still to be called."""
        self._conductor.stop()

    def close(self) -> None:
        """End the workers; what is asked or in flight fails. Repeating it is harmless."""
        self.stop()
        self._conductor.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- updates -----------------------------------------------------------------------------------------------------

    def call(self, call: str, argument: object = None) -> list[Report]:
        """Have every worker's receiver do ``call`` (init, start, update, finish, abort): all reports, by rank.

        Faults are in the reports. Of a payload of rankcast's own form each worker is sent only its own entry. Raises
        ``StateError`` for a finish of a session in which workers went different ways.
        """
        return self.submit_call(call, argument).result()

    def submit_call(self, call: str, argument: object = None) -> Future[list[Report]]:
        return self._conductor.call(call, argument)

    def finish(self, weight_version: str | None = None) -> list[Report]:
        """``call("finish")``; the version is set only when every worker finished without a fault."""
        return self.submit_finish(weight_version).result()

    def submit_finish(self, weight_version: str | None = None) -> Future[list[Report]]:
        return self._conductor.finish(weight_version)

    def update_weight_version(self, weight_version: str) -> None:
        """Say what the weights are called; raises ``StateError`` during a session and ``NotServableError``."""
        self.submit_weight_version(weight_version).result()

    def submit_weight_version(self, weight_version: str) -> Future[None]:
        return self._conductor.set_version(weight_version)

    def checksums(self) -> list[dict[str, ParameterChecksum]]:
        """What every worker holds, by rank: parameter name -> checksum, dtype, shape."""
        return self.submit_checksums().result()

    def submit_checksums(self) -> Future[list[dict[str, ParameterChecksum]]]:
        return self._conductor.checksums()

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        replica: int | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
        prompt_log_probs: bool = False,
    ) -> Generation:
        """Decode greedily, as ``request`` with these wishes; waits for it, also while generation is paused."""
        ask = Ask(
            token_ids=tuple(token_ids),
            max_tokens=max_tokens,
            replica=replica or 0,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stop_token_ids),
            prompt_logprobs=prompt_log_probs,
        )
        return self.request(ask).future.result()

    def request(self, ask: Ask) -> Request:
        """Put a request in line and return it without waiting; raises as ``Ask.check`` does.

        Its future raises ``NotServableError`` when a worker is not servable. While generation is paused it waits,
        unless no update is in progress that could make the engine servable.
        """
        ask.check(self.config, self.layout)
        request = Request(ask, self._end_tokens)
        self._conductor.admit(request)
        return request

    def abandon(self, request: Request) -> None:
        """Nobody waits for ``request`` any more: it gets no further pass. Harmless once it is answered."""
        request.abandoned = True
        self._processes.wake()

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating; returns when no forward pass is running or will run. See ``RequestQueue.pause``."""
        self.submit_pause(mode).result()

    def submit_pause(self, mode: PauseMode) -> Future[None]:
        return self._conductor.pause(mode)

    def resume(self) -> None:
        """Generate again; raises ``StateError`` while an update session is open. Repeating it is harmless."""
        self.submit_resume().result()

    def submit_resume(self) -> Future[None]:
        return self._conductor.resume()

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """The engine's last published weight version; ``default`` before the first."""
        return self._conductor.standing.weight_version

    @property
    def paused(self) -> bool:
        return self._conductor.queue.paused

    @property
    def requests(self) -> int:
        """How many requests are in flight or waiting."""
        return len(self._conductor.queue)

    @property
    def lost(self) -> str | None:
        """What befell a worker that was lost, and which; ``None`` while all live."""
        return self._processes.lost

    def check_alive(self) -> None:
        """Raise ``NotServableError`` when a worker was lost."""
        self._processes.check()

    def workers(self) -> tuple[WorkerStanding, ...]:
        """Each worker's state as of its last answer, by rank; only a call changes it."""
        return self._conductor.standing.workers

    def label(self, rank: int) -> str:
        return self._processes.label(rank)

    def pids(self) -> list[int]:
        """The workers' process ids, by rank."""
        return [self._processes.pid(rank) for rank in range(self.layout.workers)]
