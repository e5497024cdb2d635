"""A trainer that is killed in the middle of a push: ``python dying_trainer.py URL CHECKPOINT MODE MOMENT``.

When only the pause keeps it from the update it says so, and waits for a line. It knows when to die. ``MOMENT`` is a
round, which was just sent to the workers, so that all before it are written, or ``finish``: all is written, and no
worker has attested. It must not tell.
"""

from __future__ import annotations

import os
import signal
import sys

import rankcast
from rankcast.control.http import HttpClient

ABOUT_TO_PAUSE = "about to pause"
FINISH = "finish"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Client(HttpClient):
    """The trainer's client, which knows when it pauses and when an update would end."""

    def __init__(self, url: str, moment: str) -> None:
        super().__init__(url, timeout=60)
        self._moment = moment

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        print(ABOUT_TO_PAUSE, flush=True)
        if not sys.stdin.readline():
            raise EOFError("nobody wants this trainer to go on")
        super().pause(mode, clear_cache)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self._moment == FINISH:
            die()
        super().finish_weight_update(weight_version)


def main(url: str, checkpoint: str, mode: str, moment: str) -> None:
    def look(progress: rankcast.Progress) -> None:
        if progress.stage == "install" and str(progress.round) == moment:
            die()

    with (
        Client(url, moment) as client,
        rankcast.connect(client, checkpoint, mode=mode, bucket_bytes=150_000, timeout=60, progress=look) as sync,
    ):
        sync.push(weight_version="never")


if __name__ == "__main__":
    main(*sys.argv[1:])
