"""The bench's fleet: worker processes behind one HTTP endpoint with the routes of an engine.

It knows how calls are passed on. It must not know what is timed, nor models. The server is the standard library's, in
the process that made the fleet, which does nothing else while a push runs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import msgspec

from rankcast.topology import new_engine_id

HERE = Path(__file__).resolve().parent
#: Route -> the receiver's call, and the field of the request's body that is its argument.
ROUTES = {
    "/init_weight_transfer_engine": ("init", "init_info"),
    "/start_weight_update": ("start", None),
    "/update_weights": ("update", "update_info"),
    "/finish_weight_update": ("finish", None),
}


def environment() -> dict[str, str]:
    """What a process of the bench runs in: one thread, and this checkout."""
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Fleet:
    """Workers that are up; a context manager that ends them."""

    def __init__(self, config: dict[str, Any], workers: int) -> None:
        self.engine = new_engine_id()
        self._locks = [threading.Lock() for _ in range(workers)]
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._paused = False
        for rank in range(workers):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, str(HERE / "worker.py"), str(theirs.fileno()), str(rank), self.engine]
                self._processes.append(
                    subprocess.Popen([*command, json.dumps(config)], pass_fds=[theirs.fileno()], env=environment())
                )
            self._pipes.append(Connection(ours.detach()))
        for pipe in self._pipes:
            pipe.recv_bytes()
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                self._answer(fleet._route(self.path.partition("?")[0], body))

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                self._answer({"is_paused": fleet._paused} if path == "/is_paused" else None)

            def _answer(self, answer: Any) -> None:
                said = msgspec.json.encode(answer)
                head = f"HTTP/1.1 {404 if answer is None else 200} .\r\ncontent-type: application/json\r\n"
                self.wfile.write(f"{head}content-length: {len(said)}\r\n\r\n".encode() + said)

            def log_message(self, *arguments: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def all(self, call: str, *arguments: Any) -> list[Any]:
        """Every worker does ``call`` at the same time; what they say, by rank. Raises ``RuntimeError`` if one fails."""
        return self._each([(call, *arguments)] * len(self._pipes))

    def each(self, call: str, arguments: list[Any]) -> list[Any]:
        """Like ``all``, with an argument of its own for every worker."""
        return self._each([(call, argument) for argument in arguments])

    def _each(self, messages: list[tuple[Any, ...]]) -> list[Any]:
        for lock in self._locks:
            lock.acquire()
        try:
            for pipe, message in zip(self._pipes, messages, strict=True):
                pipe.send_bytes(msgspec.json.encode(message))
            answers = [msgspec.json.decode(pipe.recv_bytes()) for pipe in self._pipes]
        finally:
            for lock in self._locks:
                lock.release()
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            raise RuntimeError(f"a worker failed: {failed[0]}")
        return [answer["done"] for answer in answers]

    def _route(self, path: str, body: bytes) -> Any:
        if path in ("/pause", "/resume"):
            self._paused = path == "/pause"
            return {}
        if path in ("/update_weight_version", "/reset_prefix_cache"):
            return {"success": True}
        if path not in ROUTES:
            return None
        call, field = ROUTES[path]
        argument = msgspec.json.decode(body)[field] if field is not None and body else None
        return {"faults": self.all("call", call, argument)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
