"""How the embedded fleet is put on an address: who may be served, and how everything ends.

This module knows sockets, signals and uvicorn. It must not know routes, nor what the fleet does.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from rankcast.control.addresses import is_loopback, listening_socket, url_of
from rankcast.engines.reference.fleet import Fleet
from rankcast.engines.reference.server import application
from rankcast.errors import AuthenticationError

_BACKLOG = 1024
# Requests that are held while generation is paused count as well; beyond it the answer is 503 at once.
_CONCURRENT = 1024


def check_address(host: str, secret: str | bytes | None) -> None:
    """Raise ``AuthenticationError`` for an address beyond loopback without a secret: anybody could write weights."""
    if secret is None and not is_loopback(host):
        raise AuthenticationError(
            f"the reference server was asked to listen on {host}, beyond loopback, without a secret: set "
            "RANKCAST_SECRET (or RANKCAST_SECRET_FILE) here and on the trainer, or take 127.0.0.1"
        )


def serve(
    checkpoint: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    expert_parallel: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
    secret: str | bytes | None = None,
    ready: Callable[[Fleet, str], None] = lambda fleet, url: None,
) -> None:
    """Serve ``checkpoint`` until SIGINT or SIGTERM; call it from the main thread.

    ``port`` 0 takes any free one. ``ready`` is called with the running fleet and its URL once requests are answered.
    Raises ``AuthenticationError`` (see ``check_address``), ``LimitError`` when the address cannot be listened on, and
    what keeps the fleet from starting.
    """
    check_address(host, secret)
    fleet = Fleet(checkpoint, tp=tp, pp=pp, dp=dp, expert_parallel=expert_parallel, secret=secret)
    with listening_socket(host, port, backlog=_BACKLOG) as listener:
        url = url_of(listener)
        try:
            fleet.start()
            config = uvicorn.Config(
                application(fleet),
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=600,
                timeout_graceful_shutdown=1,
                backlog=_BACKLOG,
                limit_concurrency=_CONCURRENT,
            )
            # uvicorn raises the signal again once it has shut down; it must not kill us before the fleet is closed.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, frame: None)
            _Server(config, fleet, lambda: ready(fleet, url)).run(sockets=[listener])
        finally:
            fleet.close()


class _Server(uvicorn.Server):
    """A uvicorn server that says when it answers, and that lets held requests go as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, fleet: Fleet, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._fleet = fleet
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._fleet.stop()
        super().handle_exit(sig, frame)
