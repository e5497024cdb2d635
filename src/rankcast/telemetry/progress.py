"""Stages of a push, and the records that say how far one is.

This module knows the fixed vocabulary of stages and how their seconds are summed. It must not know who shows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

Stage = Literal["plan", "prepare", "wire", "install", "check", "publish"]

#: The stages in the order in which a push goes through them; ``wire`` is the trainer's staging.
STAGES: tuple[Stage, ...] = ("plan", "prepare", "wire", "install", "check", "publish")


class Progress(msgspec.Struct, frozen=True):
    """One step of a push, for a progress display. ``done`` and ``total`` count bytes that workers were told to read."""

    weight_version: str
    stage: Stage
    round: int
    rounds: int
    done: int
    total: int


class StageClock:
    """Sums seconds by stage. Stages may overlap (staging runs while workers install), so the sum may pass the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._began = time.monotonic()

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - started

    @property
    def elapsed(self) -> float:
        """Seconds since this clock was made."""
        return time.monotonic() - self._began


ProgressCallback = Callable[[Progress], None]
