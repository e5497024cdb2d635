"""An engine's HTTP client that writes down what it sends and lets a test act just before or after any call.

It knows the calls of a push by name. It must not know what a test expects of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rankcast.control.http import HttpClient

Act = Callable[[], object]


@dataclass(frozen=True)
class Sent:
    """One call: its kind (of update calls, that of their entries), the bytes of its body, and the body."""

    kind: str
    nbytes: int
    body: Any


@dataclass
class Moment:
    """Before or after the ``nth`` call of ``kind`` from now (0 is the next), once: do ``act``."""

    when: str
    kind: str
    act: Act
    nth: int = 0
    over: bool = field(default=False, init=False)


class Watched(HttpClient):
    """``sent`` grows with every call; ``moments`` are looked at around each."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.sent: list[Sent] = []
        self.moments: list[Moment] = []

    def at(self, when: str, kind: str, act: Act, nth: int = 0) -> Moment:
        """Have ``act`` done ``before`` or ``after`` the ``nth`` next call of ``kind``."""
        self.moments.append(Moment(when, kind, act, nth))
        return self.moments[-1]

    def kinds(self) -> list[str]:
        return [sent.kind for sent in self.sent]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._around(kind_of(init_info), init_info, lambda: super(Watched, self).init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._around("start", None, super().start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._around(kind_of(update_info), update_info, lambda: super(Watched, self).update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._around("finish", None, lambda: super(Watched, self).finish_weight_update(weight_version))

    def update_weight_version(self, weight_version: str) -> None:
        self._around("version", weight_version, lambda: super(Watched, self).update_weight_version(weight_version))

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        self._around("pause", mode, lambda: super(Watched, self).pause(mode, clear_cache))

    def resume(self) -> None:
        self._around("resume", None, super().resume)

    def _around(self, kind: str, body: Any, call: Act) -> None:
        self.sent.append(Sent(kind, len(msgspec.json.encode(body)), body))
        moment = self._due(kind)
        if moment is not None and moment.when == "before":
            moment.act()
        call()
        if moment is not None and moment.when == "after":
            moment.act()

    def _due(self, kind: str) -> Moment | None:
        for moment in self.moments:
            if moment.kind == kind and not moment.over:
                if moment.nth == 0:
                    moment.over = True
                    return moment
                moment.nth -= 1
        return None


def bodies(payload: Any) -> dict[str, dict[str, Any]]:
    """The bodies of an update call's entries, by the rank that they go to (``*``: all)."""
    return {rank: dict(msgspec.json.decode(entry["body"])) for rank, entry in payload["entries"].items()}


def kind_of(payload: Any) -> str:
    """The kind of a sealed message, or of the entries of a payload."""
    envelope = next(iter(payload["entries"].values())) if "entries" in payload else payload
    return str(msgspec.json.decode(envelope["body"])["kind"])
