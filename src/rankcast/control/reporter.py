"""The worker's end of the report channel: posts what a call found, and never holds a worker up for long.

This module knows how a report is sent and what becomes of one that cannot be. It must not know what a report says. It
never raises: a worker that cannot report still answers in step with its peers. No proxy of the environment is asked: a
trainer and its engines are neighbours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import msgspec

from rankcast.control.exchange import (
    Answer,
    BrokenConnectionError,
    Call,
    LongAnswerError,
    NoAnswerError,
    SlowAnswerError,
    SlowConnectionError,
)
from rankcast.control.kept_connection import KeptConnection
from rankcast.control.said import said
from rankcast.errors import LimitError
from rankcast.wire.codec import Codec
from rankcast.wire.reports import Fault, Report

#: How long one ``send`` may take in all, in seconds.
SEND_SECONDS = 5.0
#: How many reports that could not be delivered are kept.
KEPT_UNSENT = 64
#: The longest report that a channel reads, in bytes. Which of 100,000 tensors a loader touches takes about 1 MB.
REPORT_LIMIT = 16 * 2**20
#: The longest answer of a channel that is read, in bytes.
ANSWER_LIMIT = 65536
_KEPT_TEXT = 1000
_log = logging.getLogger(__name__)


class Reporter:
    """Posts reports over a kept connection; those it could not deliver go first when their channel is there again.

    ``unsent`` is how many wait, at most 64; ``lost`` how many older ones were given up, or were refused by a channel.
    ``last_fault`` says in words why the last report did not arrive, and is empty when it did. Thread-safe.
    """

    def __init__(self, codec: Codec, *, seconds: float = SEND_SECONDS) -> None:
        self.lost = 0
        self.last_fault = ""
        self._codec = codec
        self._seconds = seconds
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._sending = threading.Lock()
        self._connection: KeptConnection | None = None

    @property
    def unsent(self) -> int:
        """How many reports wait to be delivered."""
        return len(self._waiting)

    def send(self, url: str, report: Report) -> bool:
        """Post ``report`` to ``url``, after those that wait for the same URL; returns whether it arrived.

        Takes at most 5 s and never raises. A report that did not arrive is kept, unless the channel refused it. One
        that is longer than a channel reads is sent without its columns, and says so in a fault.
        """
        deadline = time.monotonic() + self._seconds
        try:
            data = msgspec.json.encode(self._codec.seal(report))
            if len(data) > REPORT_LIMIT:  # kept, it would stand before all that follow and never arrive
                data = msgspec.json.encode(self._codec.seal(_shortened(report, len(data))))
            if not self._sending.acquire(timeout=self._seconds):
                self.last_fault = f"another report was still being sent after {self._seconds:g} s"
                self._keep(url, data)
                return False
            try:
                return self._send(url, data, deadline)
            finally:
                self._sending.release()
        except Exception as fault:
            _log.exception("a report to %s was lost", url)
            self.last_fault = f"{url}: {type(fault).__name__}: {fault}"
            self.lost += 1
            return False

    def close(self) -> None:
        """Close the connection. Reports that still wait are given up."""
        with self._sending:
            self._waiting.clear()
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _send(self, url: str, data: bytes, deadline: float) -> bool:
        while (waiting := next((item for item in self._waiting if item[0] == url), None)) is not None:
            if self._post(url, waiting[1], deadline) is None:
                self._keep(url, data)
                return False
            self._waiting.remove(waiting)
        arrived = self._post(url, data, deadline)
        if arrived is None:
            self._keep(url, data)
        return arrived is True

    def _keep(self, url: str, data: bytes) -> None:
        self._waiting.append((url, data))
        while len(self._waiting) > KEPT_UNSENT:
            self._waiting.popleft()
            self.lost += 1

    def _post(self, url: str, data: bytes, deadline: float) -> bool | None:
        """Whether the channel took the report; ``None`` when it could not be reached."""
        for _ in range(2):
            try:
                return self._judge(url, _posted(self._connected(url), data, deadline))
            except BrokenConnectionError as fault:
                # A kept connection may have gone stale. A report may be sent twice: of two equal ones the last counts.
                self.last_fault = f"{url}: the connection broke ({fault})"
            except (SlowConnectionError, SlowAnswerError):
                self.last_fault = f"{url}: not within {self._seconds:g} s"
                return None
            except (NoAnswerError, LongAnswerError, ValueError) as fault:
                self.last_fault = f"{url}: {type(fault).__name__}: {fault}"
                return None
        return None

    def _connected(self, url: str) -> KeptConnection:
        if self._connection is None or self._connection.url != url:
            fresh = KeptConnection(url)
            if self._connection is not None:
                self._connection.close()
            self._connection = fresh
        return self._connection

    def _judge(self, url: str, answer: Answer) -> bool | None:
        status = answer.status
        if status // 100 == 2:
            self.last_fault = ""
            return True
        self.last_fault = f"{url} answered {status}: {said(answer.body)}"
        _log.warning("a report was refused: %s", self.last_fault)
        if status >= 500 or status in (404, 408):
            return None  # not this report's fault, or not the channel that was meant: it may be taken later
        self.lost += 1
        return False


def _posted(connection: KeptConnection, data: bytes, deadline: float) -> Answer:
    headers = ((b"Host", connection.authority.encode("ascii")), (b"Content-Type", b"application/json"))
    return connection.send(Call("POST", connection.target, headers, data, deadline, deadline, ANSWER_LIMIT))


def _shortened(report: Report, size: int) -> Report:
    """``report`` without what makes it long, and with the fault that it is."""
    fault = LimitError(
        f"the report of {report.worker.label} about {report.call} has {size:,} bytes, the limit is {REPORT_LIMIT:,}: "
        "connect with fewer tensors, or in mode 'ranklocal', which asks for no boxes"
    )
    return msgspec.structs.replace(
        report, faults=(Fault.of(fault),), touched=None, wanted=None, unreachable=report.unreachable[:_KEPT_TEXT]
    )
