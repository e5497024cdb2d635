"""One engine made of receivers that live in the caller's own process.

This module knows how to make one call on every receiver and how to tell whose call failed. It must not know what a
receiver does, so it takes any object with the four methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rankcast.control.client import Payload, WeightSyncClient
from rankcast.errors import EngineError, RankcastError

# A capability of the client -> the method of a receiver behind it.
_METHODS = {
    "pause": "pause",
    "resume": "resume",
    "update_weight_version": "update_weight_version",
    "abort": "abort_weight_update",
}


class InProcessClient:
    """A ``WeightSyncClient`` over one receiver, or several that together are one engine.

    Payloads are handed on as they are, the same object to every receiver. A call is made on every receiver, in order,
    before a failure of any is raised, so that all stay in step. Raises ``EngineError`` naming each worker that failed;
    ``ValueError`` when there is no receiver, ``TypeError`` when one lacks a required method.
    """

    def __init__(self, receivers: WeightSyncClient | Sequence[WeightSyncClient]) -> None:
        given = receivers if isinstance(receivers, Sequence) else [receivers]
        if not given:
            raise ValueError("an engine needs at least one receiver")
        for receiver in given:
            if not isinstance(receiver, WeightSyncClient):
                raise TypeError(f"{type(receiver).__name__} is no receiver: it lacks one of the four update methods")
        self._receivers = tuple(given)

    @property
    def url(self) -> str:
        """How messages name this engine."""
        return f"{len(self._receivers)} receiver{'s' * (len(self._receivers) > 1)} in this process"

    def supports(self, name: str) -> bool:
        """Whether every receiver has what the optional call ``name`` needs."""
        method = _METHODS.get(name)
        return method is not None and all(callable(getattr(r, method, None)) for r in self._receivers)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._each("init_weight_transfer_engine", lambda receiver: receiver.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._each("start_weight_update", lambda receiver: receiver.start_weight_update())

    def update_weights(self, update_info: Payload) -> None:
        self._each("update_weights", lambda receiver: receiver.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish_weight_update", lambda receiver: receiver.finish_weight_update(weight_version))

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        self._each("pause", lambda receiver: receiver.pause(mode, clear_cache))

    def resume(self) -> None:
        self._each("resume", lambda receiver: receiver.resume())

    def update_weight_version(self, weight_version: str) -> None:
        self._each("update_weight_version", lambda receiver: receiver.update_weight_version(weight_version))

    def abort(self) -> None:
        self._each("abort_weight_update", lambda receiver: receiver.abort_weight_update())

    def _each(self, call: str, act: Callable[[Any], object]) -> None:
        failed: list[tuple[str, Exception]] = []
        for position, receiver in enumerate(self._receivers):
            try:
                act(receiver)
            except Exception as fault:
                failed.append((_label(receiver, position), fault))
        if failed:
            told = "; ".join(f"{label}: {_told(fault)}" for label, fault in failed)
            raise EngineError(
                f"{call} failed on {len(failed)} of {len(self._receivers)} workers in this process: {told}",
                worker=failed[0][0],
                tensor=getattr(failed[0][1], "tensor", None),
            ) from failed[0][1]


def _label(receiver: object, position: int) -> str:
    label = getattr(getattr(receiver, "worker", None), "label", None)
    return label if isinstance(label, str) else f"receiver {position}"


def _told(fault: Exception) -> str:
    return fault.message if isinstance(fault, RankcastError) else f"{type(fault).__name__}: {fault}"
