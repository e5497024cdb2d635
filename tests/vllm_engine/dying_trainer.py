"""A trainer that is killed in the middle of a push: ``python dying_trainer.py URL CHECKPOINT STAGE``.

It knows when to die: as the first sign of ``STAGE``. It must not tell anybody.
"""

from __future__ import annotations

import os
import signal
import sys

import rankcast


def main(url: str, checkpoint: str, stage: str) -> None:
    def die(progress: rankcast.Progress) -> None:
        if progress.stage == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    with rankcast.connect(url, checkpoint, bucket_bytes=150_000, timeout=60, progress=die) as sync:
        sync.push(weight_version="never")


if __name__ == "__main__":
    main(*sys.argv[1:])
