"""What all messages of one connection have in common: its name, its owner, where reports go, and a count that rises.

This module knows how messages of the init route are numbered, sealed and answered. It must not know when which of them
is said.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Sequence

from rankcast.trainer.engine import Engine, Replies
from rankcast.trainer.fleet import Fleet
from rankcast.wire.bodies import EntryBody, InitBody, Owner
from rankcast.wire.codec import Codec


@dataclasses.dataclass(frozen=True)
class Heading:
    """How a message of the init route begins: the request that its reports name, and the connection's next count."""

    request: str
    count: int


class Speaker:
    """One connection of ``owner`` with a fleet, whose workers report to ``report_url``."""

    def __init__(self, fleet: Fleet, codec: Codec, report_url: str, owner: Owner) -> None:
        self.fleet = fleet
        self.connection = secrets.token_hex(16)
        self.owner = owner
        self.report_url = report_url
        self._codec = codec
        # A worker refuses what does not count on: a message that was recorded and is sent again.
        self._count = itertools.count(1)

    def seal(self, body: EntryBody | InitBody) -> dict[str, str]:
        """``body`` as it travels."""
        return self._codec.seal(body)

    def ask(
        self,
        call: str,
        body: Callable[[Engine, Heading], InitBody],
        engines: Sequence[Engine] | None = None,
        *,
        checked: bool = True,
    ) -> Replies:
        """Send ``body`` of each engine through the init route; what its workers reported."""
        count = next(self._count)
        asked = list(self.fleet.engines if engines is None else engines)
        headings = {engine: Heading(secrets.token_hex(8), count) for engine in asked}

        def send(engine: Engine) -> None:
            engine.client.init_weight_transfer_engine(self.seal(body(engine, headings[engine])))

        return self.fleet.ask(call, send, key=lambda engine: headings[engine].request, engines=asked, checked=checked)
