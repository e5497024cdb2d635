"""A client over receivers of this process: the same payload objects, all receivers in step, failures by name."""

from __future__ import annotations

from typing import Any

import pytest

from rankcast.control.client import WeightSyncClient, capability
from rankcast.control.inprocess import InProcessClient
from rankcast.errors import EngineError, ManifestError
from rankcast.topology import Worker


class Recorder:
    """A receiver's surface, without a model: keeps its calls, and fails those that ``fails`` names."""

    def __init__(self, rank: int = 0, workers: int = 1, fails: dict[str, Exception] | None = None) -> None:
        self.worker = Worker(engine="e" * 32, rank=rank, workers=workers)
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails or {}

    def _did(self, call: str, argument: Any = None) -> None:
        self.calls.append((call, argument))
        if call in self.fails:
            raise self.fails[call]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._did("init", init_info)

    def start_weight_update(self) -> None:
        self._did("start")

    def update_weights(self, update_info: Any) -> None:
        self._did("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._did("finish", weight_version)


class FullRecorder(Recorder):
    def pause(self, mode: str, clear_cache: bool) -> None:
        self._did("pause", (mode, clear_cache))

    def resume(self) -> None:
        self._did("resume")

    def update_weight_version(self, weight_version: str) -> None:
        self._did("version", weight_version)

    def abort_weight_update(self) -> None:
        self._did("abort")


@pytest.mark.parametrize("payload", [{"names": []}, [{"names": []}, {"names": ["a"]}]])
def test_every_receiver_gets_the_same_object_in_every_call(payload: Any) -> None:
    receivers = [FullRecorder(rank, 2) for rank in range(2)]
    client = InProcessClient(receivers)
    assert isinstance(client, WeightSyncClient)
    init = {"body": "b"}
    client.init_weight_transfer_engine(init)
    client.start_weight_update()
    client.update_weights(payload)
    client.finish_weight_update("17")
    client.pause("wait", False)
    client.resume()
    client.update_weight_version("17")
    client.abort()
    for receiver in receivers:
        assert [call for call, _ in receiver.calls] == [
            "init", "start", "update", "finish", "pause", "resume", "version", "abort"
        ]  # fmt: skip
        assert receiver.calls[0][1] is init
        assert receiver.calls[2][1] is payload
        assert receiver.calls[3][1] == "17"
        assert receiver.calls[4][1] == ("wait", False)


def test_all_receivers_are_called_before_any_failure_is_raised_and_each_that_failed_is_named() -> None:
    faults = [ManifestError("model.norm.weight is missing", tensor="model.norm.weight"), None, OSError("disk")]
    receivers = [Recorder(rank, 3, {"update": fault} if fault else None) for rank, fault in enumerate(faults)]
    with pytest.raises(EngineError) as caught:
        InProcessClient(receivers).update_weights({})
    assert [len(receiver.calls) for receiver in receivers] == [1, 1, 1]
    assert "update_weights failed on 2 of 3 workers" in caught.value.message
    assert "worker 0 of 3" in caught.value.message
    assert "model.norm.weight is missing" in caught.value.message
    assert "worker 2 of 3" in caught.value.message
    assert "OSError: disk" in caught.value.message
    assert "worker 1 of 3" not in caught.value.message
    assert caught.value.tensor == "model.norm.weight"
    assert caught.value.__cause__ is faults[0]


def test_a_capability_is_there_only_when_every_receiver_has_it() -> None:
    assert capability(InProcessClient(FullRecorder()), "pause") is not None
    mixed = InProcessClient([FullRecorder(0, 2), Recorder(1, 2)])
    for name in ("pause", "resume", "update_weight_version", "abort", "weight_info", "is_paused", "reset_prefix_cache"):
        assert capability(mixed, name) is None
        assert capability(Recorder(), name) is None
    found = capability(InProcessClient(FullRecorder()), "abort")
    assert found is not None
    found()
    assert capability(FullRecorder(), "update_weight_version") is not None
    assert capability(FullRecorder(), "is_paused") is None


def test_a_name_that_is_no_capability_is_a_mistake_and_not_an_absence() -> None:
    with pytest.raises(ValueError, match="'puase' is no optional call"):
        capability(InProcessClient(Recorder()), "puase")


def test_a_user_made_client_needs_no_base_class_and_an_incomplete_one_is_told() -> None:
    assert isinstance(Recorder(), WeightSyncClient)
    with pytest.raises(TypeError, match="object is no receiver"):
        InProcessClient([object()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one receiver"):
        InProcessClient([])
