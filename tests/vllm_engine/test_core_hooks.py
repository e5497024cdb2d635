"""What the engine core concludes from its workers' answers, over receivers without vLLM's workers: faults on one rank.

A fault that only one rank has, at a moment of a test's choice, is not to be had from real workers. The engine core here
is a stand-in that passes calls on; the hook, the receivers and their answers are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from rankcast import InstallError, Receiver, StateError, UnsupportedError, Worker
from rankcast.engines.vllm import core_hooks
from rankcast.engines.vllm.worker_hooks import CALLS, Reply
from rankcast.process import this_process
from rankcast.rollout.installer import LoaderInstaller
from rankcast.topology import new_engine_id
from rankcast.transports.shm import create_segment
from rankcast.wire.bodies import Owner

pytestmark = pytest.mark.vllm

SIZE = 64


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))


class Breaking(LoaderInstaller):
    """An installer that fails once at each of what ``breaks`` names."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.breaks: set[str] = set()

    def abandon(self) -> None:
        self._fail("abandon")

    def finish(self) -> None:
        self._fail("finish")

    def _fail(self, at: str) -> None:
        if at in self.breaks:
            self.breaks.remove(at)
            raise RuntimeError(f"{at} broke")


class Scheduler:
    """What an engine core keeps of a pause."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.pause_state = PauseState.PAUSED_ALL

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state


class Engine:
    """Two workers behind one engine core."""

    def __init__(self) -> None:
        engine = new_engine_id()
        self.core: Any = SimpleNamespace(
            _rankcast_open=False, _rankcast_unservable=False, _rankcast_held=False, scheduler=Scheduler()
        )
        self.core.model_executor = SimpleNamespace(collective_rpc=self._workers)
        self.installers = [Breaking(Model()) for _ in range(2)]
        self.receivers = [
            Receiver(
                installer._model,
                installer=installer,
                worker=Worker(engine=engine, rank=rank, workers=2, tp=rank, process=this_process()),
            )
            for rank, installer in enumerate(self.installers)
        ]

    def call(self, method: str, *args: object) -> None:
        core_hooks._collective_rpc(self.core, self._workers, method, None, args)

    def _workers(self, method: str, timeout: object = None, args: tuple[object, ...] = (), *_: object) -> list[str]:
        answers = [receiver.answer(CALLS[method], *args[:1]) for receiver in self.receivers]
        return [msgspec.json.encode(Reply(*answer)).decode() for answer in answers]

    @property
    def states(self) -> list[str]:
        return [receiver.state for receiver in self.receivers]

    @property
    def values(self) -> list[float]:
        return [installer._model.weight.unique().item() for installer in self.installers]

    def push(self, *payloads: object) -> None:
        self.call("start_weight_update")
        for payload in payloads:
            self.call("update_weights", payload)
        self.call("finish_weight_update")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(core_hooks, "_check_quiet", lambda core, what: None)
    made = Engine()
    yield made
    for receiver in made.receivers:
        receiver.close()


@pytest.fixture
def entry() -> Iterator[dict[str, Any]]:
    with create_segment(SIZE * 4) as segment:
        segment.memory.view(torch.float32).fill_(5)
        yield {
            "names": ["weight"],
            "dtype_names": ["float32"],
            "shapes": [[SIZE]],
            "segments": [msgspec.to_builtins(segment.handle)],
            "locations": [[0, 0]],
        }


NOTHING: dict[str, Any] = {"names": []}


def test_a_start_that_fails_on_one_rank_is_taken_back_on_all(engine: Engine, entry: dict[str, Any]) -> None:
    # A finish that breaks leaves its reload begun when letting go of that breaks too.
    engine.installers[0].breaks = {"finish"}
    engine.installers[1].breaks = {"finish", "abandon"}
    with pytest.raises(InstallError, match="worker 1"):
        engine.push(entry)
    engine.installers[1].breaks = {"abandon"}
    with pytest.raises(InstallError, match="abandon broke"):
        engine.call("start_weight_update")
    assert "started" not in engine.states
    assert not engine.core._rankcast_open
    engine.push(entry)
    assert engine.states == ["idle", "idle"]
    assert engine.values == [5.0, 5.0]
    assert core_hooks.why_not(engine.core) is None


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_session_that_leaves_one_worker_out_makes_the_engine_unservable_until_a_whole_one(
    engine: Engine, entry: dict[str, Any], left_out: int
) -> None:
    for receiver in engine.receivers:
        receiver.update_weight_version("old")
    entries = [entry, entry]
    entries[left_out] = NOTHING
    with pytest.raises(StateError, match=rf"nothing for workers \[{left_out}\]"):
        engine.push(entries)
    assert engine.states == ["unusable", "unusable"]
    assert [receiver.servable for receiver in engine.receivers] == [False, False]
    assert [receiver.weight_version for receiver in engine.receivers] == ["", ""]
    assert "push again" in str(core_hooks.why_not(engine.core))
    with pytest.raises(StateError, match="send them all"):
        engine.push(NOTHING)
    assert "push again" in str(core_hooks.why_not(engine.core))
    engine.push(entry)
    assert core_hooks.why_not(engine.core) is None
    assert engine.values == [5.0, 5.0]


def test_entries_may_be_empty_call_by_call_and_a_session_may_bring_nothing_at_all(
    engine: Engine, entry: dict[str, Any]
) -> None:
    engine.push([entry, NOTHING], [NOTHING, entry])
    assert engine.values == [5.0, 5.0]
    engine.push(NOTHING)
    engine.push()
    assert engine.states == ["idle", "idle"]
    assert core_hooks.why_not(engine.core) is None


def test_ranks_that_got_out_of_step_in_a_trainers_session_are_brought_together_without_its_leave(
    engine: Engine, entry: dict[str, Any]
) -> None:
    # Nobody listens on the report channel any more, so the fault is the caller's to hear.
    owner = Owner("d" * 32, this_process(), "a trainer")
    for receiver in engine.receivers:
        receiver._session.claim("0" * 32, owner, 60, time.monotonic())
    engine.call("start_weight_update")
    engine.receivers[0].handle("abandon")
    assert engine.states == ["idle", "started"]
    with pytest.raises(StateError, match=r"worker 0.*start first.*worker 1.*session is open"):
        engine.call("update_weights", entry)
    assert engine.states == ["idle", "idle"]
    assert core_hooks.why_not(engine.core) is None


def test_a_pause_that_would_run_the_next_part_of_streaming_input_runs_nothing_until_the_weights_are_whole(
    engine: Engine, entry: dict[str, Any]
) -> None:
    from vllm.v1.core.sched.interface import PauseState

    scheduler = engine.core.scheduler
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.call("start_weight_update")
    assert scheduler.pause_state == PauseState.PAUSED_ALL
    engine.call("update_weights", entry)
    engine.installers[1].breaks = {"finish"}
    with pytest.raises(InstallError):
        engine.call("finish_weight_update")
    assert scheduler.pause_state == PauseState.PAUSED_ALL
    # A pause that ends requests in flight is one that takes no new ones.
    core_hooks._pause(engine.core, lambda mode: scheduler.set_pause_state(PauseState.PAUSED_NEW), "abort")
    assert scheduler.pause_state == PauseState.PAUSED_ALL
    engine.push(entry)
    assert scheduler.pause_state == PauseState.PAUSED_NEW


@pytest.mark.parametrize("method", ["abandon_weight_update", "disown_weight_update"])
def test_the_engine_core_s_own_calls_are_nobody_else_s(engine: Engine, method: str) -> None:
    engine.call("start_weight_update")
    with pytest.raises(UnsupportedError, match="own call"):
        engine.call(method)
    assert engine.states == ["started", "started"]
