"""A small real HTTP server whose every route a test scripts, and reports to send."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rankcast.topology import Worker
from rankcast.wire.reports import Report

Answer = Callable[[Request], Awaitable[Response]]


class ScriptedEngine:
    """Serves on loopback; answers ``{}`` to anything, or what ``answers`` has for the path. Keeps what it was sent."""

    def __init__(self, port: int = 0) -> None:
        self.answers: dict[str, Answer] = {}
        self.received: list[tuple[str, str, dict[str, str], bytes]] = []
        self.headers: list[dict[str, str]] = []
        self.peers: set[tuple[str, int]] = set()
        self.closing = asyncio.Event()
        self._ready = threading.Event()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(64)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])
        config = uvicorn.Config(app, loop="asyncio", http="h11", lifespan="off", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self.closing.set)
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def forget(self) -> None:
        """As new: handlers that wait are let go, and nothing is scripted or remembered."""
        self._loop.call_soon_threadsafe(self.closing.set)
        self.closing = asyncio.Event()
        for kept in (self.answers, self.received, self.headers, self.peers):
            kept.clear()

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._ready.set)
            await self._server.serve(sockets=[self._listener])

        asyncio.run(serve())

    async def _answer(self, request: Request) -> Response:
        self.received.append((request.method, request.url.path, dict(request.query_params), await request.body()))
        self.headers.append(dict(request.headers))
        assert request.client is not None
        self.peers.add((request.client.host, request.client.port))
        answer = self.answers.get(request.url.path)
        return JSONResponse({}) if answer is None else await answer(request)


@pytest.fixture(scope="module")
def _server() -> Iterator[ScriptedEngine]:
    server = ScriptedEngine()
    yield server
    server.close()


@pytest.fixture
def engine(_server: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield _server
    _server.forget()


@pytest.fixture
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def make_report() -> Callable[..., Report]:
    def make(rank: int = 0, workers: int = 8, **fields: Any) -> Report:
        given = {"session": "session", "call": "install", "sequence": 1, "state": "idle", "servable": True}
        worker = Worker(engine="e" * 32, rank=rank, workers=workers)
        return Report(**{"generation": 0, "worker": worker, **given, **fields})

    return make
