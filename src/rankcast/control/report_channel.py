"""The report channel: a small HTTP endpoint on the trainer to which workers post what they found.

This module knows how reports arrive, are proved and kept until somebody asks. It must not know what a push concludes
from them. What arrives is data only: anything that is not a well-formed, properly signed report is refused and dropped.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from types import TracebackType
from typing import Any, Self

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rankcast.control.addresses import is_loopback, listening_socket, split_listen, url_of
from rankcast.control.report_store import ReportStore
from rankcast.control.reporter import REPORT_LIMIT
from rankcast.errors import AuthenticationError, EngineError, LimitError, PayloadError
from rankcast.wire.codec import Codec
from rankcast.wire.reports import Report

#: The longest head of a request that is read, in bytes; framing of a body in parts counts as well.
HEAD_LIMIT = 65536
#: How long one report may take to arrive, in seconds; no worker tries longer than this.
RECEIVE_SECONDS = 5.0
_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
# A whole fleet reports in the same moment.
_BACKLOG = 2048


class ReportChannel(ReportStore):
    """Serves ``POST /report`` from a thread of its own between ``start`` and ``close``; a context manager.

    ``listen`` is ``"host"`` or ``"host:port"``; by default a free port of loopback. Only reports that ``codec`` opens
    are taken, so that with a secret all of them are signed. An address beyond loopback is refused without a secret
    (``AuthenticationError``) unless ``allow_unsigned``; ``LimitError`` when the address cannot be listened on. What
    has arrived is asked for with the methods of ``ReportStore``.
    """

    def __init__(self, codec: Codec, *, listen: str | None = None, allow_unsigned: bool = False) -> None:
        super().__init__()
        self._codec = codec
        self._host, self._port = split_listen(listen)
        if not (codec.signed or allow_unsigned or is_loopback(self._host)):
            raise AuthenticationError(
                f"reports would be taken on {self._host}, beyond loopback, from anybody: set RANKCAST_SECRET (or "
                "RANKCAST_SECRET_FILE) on the trainer and on the engines"
            )
        #: How many reports came that were not signed as they had to be.
        self.refused = 0
        self._url: str | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where workers post their reports; raises ``EngineError`` while the channel is not started."""
        if self._url is None:
            raise EngineError("the report channel is not open: start it first")
        return self._url

    def start(self) -> None:
        """Listen and serve; does nothing when started already."""
        if self._server is not None:
            return
        listener = listening_socket(self._host, self._port, backlog=_BACKLOG)
        config = uvicorn.Config(
            self._serve,
            interface="asgi3",
            loop="asyncio",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=600,
            timeout_graceful_shutdown=1,
            backlog=_BACKLOG,
        )
        server = _Server(config)
        url = f"{url_of(listener)}/report"
        thread = threading.Thread(target=server.serve_on, args=(listener,), name="rankcast-reports", daemon=True)
        thread.start()
        if not server.ready.wait(_START_SECONDS) or not server.started:
            server.should_exit = server.force_exit = True
            listener.close()
            raise LimitError(f"the report channel on {url} did not start within {_START_SECONDS:g} s")
        self._url, self._server, self._thread = url, server, thread

    def close(self) -> None:
        """Stop serving and free the port; what has arrived can still be asked for. Does nothing when not started."""
        server, thread = self._server, self._thread
        self._url = self._server = self._thread = None
        if server is None or thread is None:
            return
        server.should_exit = True
        thread.join(_STOP_SECONDS)
        if thread.is_alive():
            server.force_exit = True
            thread.join(_STOP_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One route needs no framework around it, and every report of a push is waited for.
        assert scope["type"] == "http", "uvicorn was told of nothing else"
        request = Request(scope, receive)
        if scope["path"] != "/report":
            response = _refusal(404, "payload", "reports go to /report")
        elif request.method != "POST":
            response = _refusal(405, "payload", "a report is posted")
        else:
            response = await self._take_in(request)
        await response(scope, receive, send)

    async def _take_in(self, request: Request) -> Response:
        # A page in somebody's browser can post plain text to loopback, but not this type.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _refusal(415, "payload", "a report is application/json")
        try:
            async with asyncio.timeout(RECEIVE_SECONDS):
                data = await _body(request)
            report = self._codec.open(_envelope(data), Report, what="a report")
        except TimeoutError:
            return _refusal(408, "payload", f"the report did not arrive within {RECEIVE_SECONDS:g} s")
        except ClientDisconnect:
            return _refusal(400, "payload", "the connection closed within the report")
        except LimitError as fault:
            return _refusal(413, fault.code, fault.message)
        except (AuthenticationError, PayloadError) as fault:
            self.refused += isinstance(fault, AuthenticationError)
            return _refusal(fault.status, fault.code, fault.message)
        self.put(report, len(data))
        return Response(status_code=204)


class _Server(uvicorn.Server):
    """A uvicorn server that says when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def serve_on(self, listener: socket.socket) -> None:
        try:
            self.run(sockets=[listener])
        finally:
            self.ready.set()
            listener.close()


class _Protocol(HttpToolsProtocol):
    """Without a line in the access log for each report; uvicorn's own switch silences every server of the process.

    Its parser is in C and reads heads without end: here they have one.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.access_log = False
        self._head = 0

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self._head > HEAD_LIMIT and not self.transport.is_closing():
            self.send_400_response(f"a head of more than {HEAD_LIMIT:,} bytes")

    def on_body(self, body: bytes) -> None:
        self._head -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        super().on_message_complete()


async def _body(request: Request) -> bytes:
    data = bytearray()
    declared = request.headers.get("content-length", "0")
    # Refused before it is read: a sender that is told the limit need not send the rest.
    if declared.isdigit() and int(declared) > REPORT_LIMIT:
        raise LimitError(f"a report of {int(declared):,} bytes, the limit is {REPORT_LIMIT:,}")
    async for part in request.stream():
        data += part
        if len(data) > REPORT_LIMIT:
            raise LimitError(f"a report of more than {REPORT_LIMIT:,} bytes, which is the limit")
    return bytes(data)


def _envelope(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as fault:
        raise PayloadError(f"a report is no JSON: {fault}") from None


def _refusal(status: int, code: str, message: str) -> Response:
    # A body that was not read to its end would be taken for the next request.
    headers = {"Connection": "close"} if status in (404, 405, 408, 413, 415) else {}
    content = json.dumps({"error": {"code": code, "message": message}})
    return Response(content, status_code=status, media_type="application/json", headers=headers)
