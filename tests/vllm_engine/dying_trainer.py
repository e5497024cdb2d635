"""A trainer that is killed in the middle of a push: ``python dying_trainer.py URL CHECKPOINT ROUND``.

It knows when to die: when ``ROUND`` was sent to the workers, and so all before it are written. It must not tell.
"""

from __future__ import annotations

import os
import signal
import sys

import rankcast


def main(url: str, checkpoint: str, number: int) -> None:
    def die(progress: rankcast.Progress) -> None:
        if progress.stage == "install" and progress.round == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with rankcast.connect(url, checkpoint, mode="ranklocal", bucket_bytes=150_000, timeout=60, progress=die) as sync:
        sync.push(weight_version="never")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
