"""Which connection a worker has, and which message of a connection came last, so that none can be played again.

This module knows names, rising numbers and nonces. It must not know sessions or leases. What it remembers is bounded: a
name that was forgotten can be used again, for a connection whose claims must carry a nonce that no recorded one has.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from rankcast.errors import StateError
from rankcast.manifest import listed
from rankcast.rollout.connection import Connection
from rankcast.rollout.installer import Installer
from rankcast.wire.bodies import Claim, Init, Release, kind_of

_log = logging.getLogger(__name__)

#: How many connections' last messages are remembered.
REMEMBERED = 1024


class Connections:
    """The one connection that there is, ``current``, and the numbers of those that were."""

    def __init__(self, installer: Installer) -> None:
        self.current: Connection | None = None
        self._installer = installer
        self._last: OrderedDict[str, int] = OrderedDict()

    def check_count(self, body: Init | Claim | Release) -> None:
        """Remember the number of ``body``; raises ``StateError`` unless it is higher than all before it."""
        name, last = body.connection, self._last.get(body.connection)
        if last is not None and body.count <= last:
            raise StateError(
                f"{kind_of(body)} {body.count} of connection {name[:8]} came after its message {last}: it was repeated "
                "or held up on its way, and nothing was done"
            )
        self._last[name] = body.count
        self._last.move_to_end(name)
        while len(self._last) > REMEMBERED:
            kept = self.current.name if self.current is not None else ""
            del self._last[next(name for name in self._last if name != kept)]

    def open(self, body: Init) -> Connection:
        """Take the place of the connection that there was; raises ``ManifestError`` as ``Connection`` does."""
        before = self.current
        self.close()
        self.current = Connection(body.connection, body.manifest, self._installer, casts=body.wanted)
        if before is not None and before.name == body.connection and (found := before.diff(self.current)):
            _log.info("the loader was traced again, and does otherwise: %s", listed(found))
        return self.current

    def knows(self, body: Claim, rank: int) -> bool:
        """Whether ``body``, as the worker of ``rank`` has it, is of the current connection and not of a namesake.

        Nor is a connection known whose trace no longer holds: its trainer is to begin anew, with an init.
        """
        known = self.current
        if known is None or known.name != body.connection or body.nonces.get(str(rank)) != known.nonce:
            return False
        return not known.outdated

    def close(self, name: str | None = None) -> None:
        """Close the current connection, if it is called ``name`` (``None``: whatever it is called)."""
        if self.current is not None and name in (None, self.current.name):
            self.current.close()
            self.current = None
