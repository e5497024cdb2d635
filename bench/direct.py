"""How fast the direct mode is: ``python bench/direct.py --json``, one JSON object on stdout.

Two trainer ranks, each with half of the experts of a mixture, push into four workers (two data-parallel replicas of
two, experts spread over all four). All are processes with one thread; the fleet answers over HTTP on loopback. After
every timing each worker's parameters are digested and compared with what its own loader makes of the whole tensors.

* ``bytes``: of all parameters of all workers;
* ``copy_seconds``: the faster of ``contiguous_seconds`` (each worker copies as many bytes in one piece out of another
  process's memory) and ``views_seconds`` (each worker copies the boxes of its plan by views made beforehand);
* ``direct_seconds``: the whole ``sync.push()`` on rank 0, ``direct`` mode, from the second push on;
* ``ratio``: ``copy_seconds / direct_seconds``, both medians over repeats that are interleaved one by one;
* ``first_push_seconds``: the first push of a connection, when memory is touched for the first time;
* ``ranklocal_seconds``, ``broadcast_seconds``: the same push in the other modes, from the second push on;
* ``control_bytes_per_worker``: bytes of all requests of a direct push, divided by workers.

Other work on the machine moves every number; medians of interleaved runs move least, and of them the ratio.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(2, str(Path(__file__).resolve().parent.parent / "tests"))
from case import TRAINER_RANKS, WORKERS, config_of
from fleet import HERE, Fleet, environment

from line_ranks import ObedientRanks

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Trainer(ObedientRanks):
    """The trainer's ranks; every call is made by all of them at once."""

    seconds = 1200.0

    def __init__(self, config: dict[str, Any], folder: str) -> None:
        command = [sys.executable, str(HERE / "trainer.py"), f"{folder}/store", json.dumps(config)]
        super().__init__(command, TRAINER_RANKS, environment())


class Bench:
    """A fleet and a trainer, and what is timed of them."""

    def __init__(self, fleet: Fleet, trainer: Trainer, say: Callable[[str], None]) -> None:
        self._fleet, self._trainer, self._say = fleet, trainer, say
        self._step = 0
        self._pushes = 0
        say("digests of what the workers' own loaders make of two sets of weights")
        self._expected = [fleet.all("expected", step) for step in (0, 1)]
        fleet.all("scrub")
        trainer.all("become", 0)
        sizes = fleet.all("size")
        self.nbytes = sum(sizes)
        lent = trainer.all("lend", max(sizes))
        fleet.each("open_source", [lent[rank * TRAINER_RANKS // WORKERS] for rank in range(WORKERS)])

    def copy(self, how: str) -> float:
        """Seconds until all workers have copied, each in its own process, all at once."""
        began = time.perf_counter()
        self._fleet.all(how)
        return time.perf_counter() - began

    def check(self) -> None:
        """Every worker holds what the trainer has now."""
        found = self._fleet.all("digest")
        if found != self._expected[self._step]:
            odd = [rank for rank in range(WORKERS) if found[rank] != self._expected[self._step][rank]]
            raise SystemExit(f"workers {odd} do not hold the weights that were pushed")

    def push(self) -> dict[str, Any]:
        """One push of the other weights than the last; checked. What rank 0 says of it."""
        self._step = 1 - self._step
        self._trainer.all("become", self._step)
        self._pushes += 1
        said: dict[str, Any] = self._trainer.all("push", str(self._pushes))[0]
        self.check()
        return said

    def direct(self, repeats: int) -> dict[str, Any]:
        connecting = max(self._trainer.all("connect", self._fleet.url, "direct"))
        first = self.push()
        routes = self._fleet.all("take_views")
        # Once each without counting: what is touched for the first time is no steady state.
        self.copy("copy_contiguous")
        self.copy("copy_views")
        self.push()
        contiguous, views, whole, stages = [], [], [], []
        for number in range(repeats):
            contiguous.append(self.copy("copy_contiguous"))
            self._fleet.all("scrub")
            views.append(self.copy("copy_views"))
            self.check()
            said = self.push()
            whole.append(said["seconds"])
            stages.append(said["report"]["stage_seconds"])
            self._say(
                f"{number + 1} of {repeats}: contiguous {contiguous[-1]:.3f} s, views {views[-1]:.3f} s, "
                f"push {whole[-1]:.3f} s"
            )
        self._fleet.all("drop_views")
        self._trainer.all("close")
        # The faster way of copying, and not the faster of two samples each time, which would be luck.
        copying, pushing = min(map(statistics.median, (contiguous, views))), statistics.median(whole)
        report = said["report"]
        return {
            "contiguous_seconds": statistics.median(contiguous),
            "views_seconds": statistics.median(views),
            "copy_seconds": copying,
            "direct_seconds": pushing,
            "ratio": copying / pushing,
            "stage_seconds": {
                stage: round(statistics.median(seconds.get(stage, 0.0) for seconds in stages), 4) for stage in stages[0]
            },
            "connect_seconds": connecting,
            "first_push_seconds": first["seconds"],
            "control_bytes_per_worker": report["request_bytes"] / WORKERS,
            "routes": sum(routes),
            "worker_calls": report["worker_calls"],
            "staged_bytes": report["staged_bytes"],
        }

    def other(self, mode: str, repeats: int) -> float:
        """The median of a push in another mode, from the second push of a connection on."""
        self._say(mode)
        self._trainer.all("connect", self._fleet.url, mode)
        self.push()
        found = [self.push()["seconds"] for _ in range(repeats)]
        self._trainer.all("close")
        return statistics.median(found)


def main() -> int:
    arguments = argparse.ArgumentParser(description="How fast the direct mode is.")
    arguments.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments.add_argument("--size", default="4GiB", help="bytes of all destinations together, for example 64MiB")
    arguments.add_argument("--repeats", type=int, default=15, help="interleaved repeats; medians are printed")
    chosen = arguments.parse_args()
    number, unit = re.fullmatch(r"(\d+)([KMG]iB)?", chosen.size).groups("")  # type: ignore[union-attr]
    config = config_of(int(number) * _UNITS[unit])

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder, Fleet(config, WORKERS) as fleet, Trainer(config, folder) as trainer:
        bench = Bench(fleet, trainer, say)
        found: dict[str, Any] = {"bytes": bench.nbytes, **bench.direct(chosen.repeats)}
        for mode in ("ranklocal", "broadcast"):
            found[f"{mode}_seconds"] = bench.other(mode, max(1, chosen.repeats // 2))
    found |= {"repeats": chosen.repeats, "trainer_ranks": TRAINER_RANKS, "workers": WORKERS}
    found = {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}
    if chosen.json:
        print(json.dumps(found))
        return 0
    for key, value in found.items():
        print(f"{key}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
