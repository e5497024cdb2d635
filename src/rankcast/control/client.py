"""What a client of one engine can do: four calls every client has, and others that one may have.

This module knows the shapes of the calls, which are vLLM's, so that vLLM's own clients satisfy them. It must not know
how a call travels, or in which order a push makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

#: What ``update_weights`` takes: one dict for every worker alike, or a list indexed by global worker rank.
Payload = dict[str, Any] | list[dict[str, Any]]


@runtime_checkable
class WeightSyncClient(Protocol):
    """The control plane of one engine, as the trainer sees it; structural, no import or base class is needed.

    A call returns when every worker behind the engine has acted, and raises when the engine refused or failed. Calls of
    one client are made one at a time. An implementation must not retry: none of the calls may be repeated blindly.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Payload) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@runtime_checkable
class CanPause(Protocol):
    """Generation can be held up around an update. ``mode`` is ``keep``, ``wait`` or ``abort``."""

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None: ...

    def resume(self) -> None: ...

    def is_paused(self) -> bool: ...


@runtime_checkable
class CanUpdateVersion(Protocol):
    """The engine carries a weight version that can be set apart from the weights."""

    def update_weight_version(self, weight_version: str) -> None: ...


@runtime_checkable
class CanTellWeights(Protocol):
    """The engine says which weight version it serves; the reply's ``weight_version`` is always there."""

    def weight_info(self) -> dict[str, Any]: ...


@runtime_checkable
class CanAbort(Protocol):
    """A session can be ended from outside of it."""

    def abort(self) -> None: ...


@runtime_checkable
class CanResetPrefixCache(Protocol):
    """Cached prefixes can be thrown away; the call returns False when the engine could not do it now."""

    def reset_prefix_cache(self) -> bool: ...


#: The optional calls that ``capability`` may be asked for.
CAPABILITIES = frozenset(
    {"pause", "resume", "is_paused", "update_weight_version", "weight_info", "abort", "reset_prefix_cache"}
)


def capability(client: object, name: str) -> Callable[..., Any] | None:
    """The optional call ``name`` of ``client``, or ``None`` when it has none.

    A client whose calls depend on what lies behind it says so in a method ``supports(name) -> bool``. Raises
    ``ValueError`` for a name that is no capability.
    """
    if name not in CAPABILITIES:
        raise ValueError(f"{name!r} is no optional call of a client; there are {', '.join(sorted(CAPABILITIES))}")
    supports = getattr(client, "supports", None)
    if callable(supports) and not supports(name):
        return None
    found = getattr(client, name, None)
    return found if callable(found) else None
