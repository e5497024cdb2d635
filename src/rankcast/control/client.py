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


#: The optional calls that ``capability`` may be asked for. ``pause(mode, clear_cache)`` (``keep``, ``wait`` or
#: ``abort``), ``resume()`` and ``is_paused()`` hold generation up around an update. ``update_weight_version(version)``
#: names the weights apart from them, ``weight_info()`` has the name as ``weight_version``. ``abort()`` ends a session
#: from outside of it. ``reset_prefix_cache()`` returns False when the engine could not do it now.
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
