"""What comes in and goes out over HTTP: bodies read within a limit, and errors as JSON with their status.

This module knows JSON, limits and which of several faults decides the status. It must not know routes or the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rankcast.errors import LimitError, PayloadError, RankcastError, error_for
from rankcast.wire.reports import Fault, Report

#: The longest request body, in bytes, on the routes whose bodies carry every worker's schedule of a large model.
BODY_LIMIT = 256 * 2**20
#: The longest on every other route.
SMALL_BODY_LIMIT = 4 * 2**20

#: Which status an answer has when workers failed in different ways: first what says most about what the engine serves
#: now (a worker is lost, a write failed), then whose doing it is.
_SEVEREST = (503, 500, 422, 401, 409, 413)

T = TypeVar("T")


class BodyTooLarge(LimitError):
    """A request's body is longer than the server takes."""

    code = "body_too_large"
    status = 413


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; raises ``BodyTooLarge``.

    Of a body that is too long a little more is read and dropped, so that a client that is still sending gets to read
    the answer in place of a broken connection.
    """
    declared = request.headers.get("content-length", "")
    length = int(declared) if declared.isascii() and declared.isdigit() else 0
    data = bytearray()
    received = 0
    async for piece in request.stream():
        received += len(piece)
        if max(received, length) <= limit:
            data += piece
        else:
            data.clear()
            if received > 4 * limit:
                break
    if max(received, length) > limit:
        raise BodyTooLarge(f"a body of {max(received, length):,} bytes or more, the limit is {limit:,}")
    return bytes(data)


def parse(body: bytes, kind: type[T], route: str) -> T:
    """The JSON body of a request to ``route`` as ``kind``; raises ``PayloadError``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as fault:
        raise PayloadError(f"POST {route} takes a JSON object, and this is none that it takes: {fault}") from None


def answer(content: object, status: int = 200) -> Response:
    """A JSON response; NaN and infinities become ``null``."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_answer(error: BaseException) -> Response:
    """The response for an error; one that is not rankcast's own is a bug, 500."""
    if not isinstance(error, RankcastError):
        error = RankcastError(f"{type(error).__name__}: {error}")
        return answer({"error": {"code": "internal", "message": error.message, "faults": []}}, 500)
    row = {"worker": error.worker, "code": error.code, "message": error.message, "tensor": error.tensor}
    faults = [row] if error.worker is not None else []
    return answer({"error": {"code": error.code, "message": error.message, "faults": faults}}, error.status)


def faults_answer(reports: Sequence[Report]) -> Response | None:
    """The response for the faults of all workers; ``None`` when there are none.

    ``code`` and ``message`` are of the fault that decides the status, ``faults`` has every worker's.
    """
    found = [(report, fault) for report in reports for fault in report.faults]
    if not found:
        return None
    rows = [
        {
            "worker": report.worker.label,
            "rank": report.worker.rank,
            "code": fault.code,
            "message": fault.message,
            "tensor": fault.tensor,
            "state": report.state,
        }
        for report, fault in found
    ]
    status, (report, fault) = min(((status_of(f), (r, f)) for r, f in found), key=lambda row: severity(row[0]))
    ranks = sorted({report.worker.rank for report, _ in found})
    message = f"{fault.message} [{report.call} failed on workers {ranks} of {len(reports)}]"
    return answer({"error": {"code": fault.code, "message": message, "faults": rows}}, status)


def status_of(fault: Fault) -> int:
    """The HTTP status that stands for a fault's code."""
    return error_for(fault.code).status


def severity(status: int) -> int:
    """A key by which the status that says most comes first."""
    return _SEVEREST.index(status) if status in _SEVEREST else len(_SEVEREST)
