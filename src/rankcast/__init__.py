"""Rank-local weight updates: each rollout worker gets the weights it owns, and no copy of everything.

This module lists the public names. It must not import any of them before they are asked for: ``import rankcast`` is
cheap, and only what needs torch loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rankcast.errors import (
    AuthenticationError,
    DigestError,
    EngineError,
    InstallError,
    LeaseError,
    LimitError,
    LocationError,
    ManifestError,
    NotServableError,
    PayloadError,
    PushError,
    RankcastError,
    SourceError,
    StateError,
    TrainerError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from rankcast.control.client import WeightSyncClient
    from rankcast.rollout.receiver import Receiver
    from rankcast.telemetry.progress import Progress
    from rankcast.telemetry.report import PushReport
    from rankcast.topology import Worker
    from rankcast.trainer.connect import connect
    from rankcast.trainer.sources import (
        Declared,
        DeclaredSource,
        IterableSource,
        ModuleSource,
        SafetensorsSource,
        Weight,
        WeightSource,
    )
    from rankcast.trainer.sync import Sync

_WHERE = {
    "Declared": "rankcast.trainer.sources",
    "DeclaredSource": "rankcast.trainer.sources",
    "IterableSource": "rankcast.trainer.sources",
    "ModuleSource": "rankcast.trainer.sources",
    "Progress": "rankcast.telemetry.progress",
    "PushReport": "rankcast.telemetry.report",
    "Receiver": "rankcast.rollout.receiver",
    "SafetensorsSource": "rankcast.trainer.sources",
    "Sync": "rankcast.trainer.sync",
    "Weight": "rankcast.trainer.sources",
    "WeightSource": "rankcast.trainer.sources",
    "WeightSyncClient": "rankcast.control.client",
    "Worker": "rankcast.topology",
    "connect": "rankcast.trainer.connect",
}

__all__ = [
    "AuthenticationError",
    "Declared",
    "DeclaredSource",
    "DigestError",
    "EngineError",
    "InstallError",
    "IterableSource",
    "LeaseError",
    "LimitError",
    "LocationError",
    "ManifestError",
    "ModuleSource",
    "NotServableError",
    "PayloadError",
    "Progress",
    "PushError",
    "PushReport",
    "RankcastError",
    "Receiver",
    "SafetensorsSource",
    "SourceError",
    "StateError",
    "Sync",
    "TrainerError",
    "UnsupportedError",
    "Weight",
    "WeightSource",
    "WeightSyncClient",
    "Worker",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'rankcast' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
