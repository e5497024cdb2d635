"""Reports that arrived, kept in bounds until somebody asks for them.

This module knows which reports belong together: those of one call of one session, or the answers to one request. It
must not know how they arrived. Many threads may put, ask and wait at the same time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from rankcast.wire.reports import Report

#: At most so many reports, and bytes of them as they arrived, are kept; the oldest go first.
KEPT_REPORTS = 2**17
KEPT_BYTES = 2**28

#: Who sent a report: the engine's id and the worker's rank in it.
Sender = tuple[str, int]
_Key = tuple[str, str, int]  # request or session, call, sequence


class ReportStore:
    """Reports by the call that they answer. Of one worker's reports about one call the last counts."""

    def __init__(self, *, kept_reports: int = KEPT_REPORTS, kept_bytes: int = KEPT_BYTES) -> None:
        self.dropped = 0
        self._kept_reports = kept_reports
        self._kept_bytes = kept_bytes
        self._changed = threading.Condition()
        self._groups: dict[_Key, dict[Sender, Report]] = {}
        self._sizes: OrderedDict[tuple[_Key, Sender], int] = OrderedDict()
        self._bytes = 0
        self._latest: OrderedDict[Sender, Report] = OrderedDict()

    def put(self, report: Report, size: int) -> None:
        """Keep ``report``, which took ``size`` bytes to send, and wake whoever waits."""
        sender = (report.worker.engine, report.worker.rank)
        with self._changed:
            for name in {report.request, report.session} - {""}:
                key = (name, report.call, report.sequence)
                self._forget(key, sender)
                self._groups.setdefault(key, {})[sender] = report
                self._sizes[key, sender] = size
                self._bytes += size
            self._latest[sender] = report
            self._latest.move_to_end(sender)
            while len(self._sizes) > self._kept_reports or self._bytes > self._kept_bytes:
                self._forget(*next(iter(self._sizes)))
                self.dropped += 1
            while len(self._latest) > self._kept_reports:
                self._latest.popitem(last=False)
            self._changed.notify_all()

    def reports(self, name: str, call: str, sequence: int = -1) -> dict[Sender, Report]:
        """The reports about ``call`` so far, by sender; ``name`` is the session of the call, or its request."""
        with self._changed:
            return dict(self._groups.get((name, call, sequence), {}))

    def take(self, name: str, call: str, sequence: int = -1) -> dict[Sender, Report]:
        """As ``reports``, and forget them."""
        with self._changed:
            taken = self.reports(name, call, sequence)
            for sender in taken:
                self._forget((name, call, sequence), sender)
            return taken

    def forget(self, name: str) -> None:
        """Forget every report of a session or request that is over."""
        with self._changed:
            for key in [key for key in self._groups if key[0] == name]:
                for sender in list(self._groups[key]):
                    self._forget(key, sender)

    def latest(self, engine: str, rank: int) -> Report | None:
        """The last report of one worker about anything, or ``None`` when it never reported."""
        with self._changed:
            return self._latest.get((engine, rank))

    def wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``predicate()`` holds, at most ``timeout`` seconds; returns whether it does.

        It is called at once and after each report, under the store's lock, so it may ask this store and must be quick.
        """
        with self._changed:
            return self._changed.wait_for(predicate, timeout)

    def _forget(self, key: _Key, sender: Sender) -> None:
        size = self._sizes.pop((key, sender), None)
        if size is None:
            return
        self._bytes -= size
        group = self._groups[key]
        del group[sender]
        if not group:
            del self._groups[key]
