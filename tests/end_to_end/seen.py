"""What can be seen of a fleet and of a process from outside: digests against the oracle, answers, and what is used.

It knows the embedded fleet's routes and ``/proc``. It must not know how weights got there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from oracle import Layout, worker_digests, workers
from rankcast.control.http import HttpClient

PROMPT = [3, 9, 0, 41, 41, 7, 63]


def differences(url: str, config: dict[str, Any], weights: dict[str, Any], layout: Layout) -> list[str]:
    """The parameters in which some worker at ``url`` differs from the oracle; empty when none does."""
    with HttpClient(url) as client:
        rows = client.weight_checker()["workers"]
    assert [row["rank"] for row in rows] == list(range(workers(layout)))
    lines = []
    for row in rows:
        expected = worker_digests(weights, config, layout, row["rank"])
        found = {name: parameter["sha256"] for name, parameter in row["parameters"].items()}
        assert found.keys() == expected.keys()
        lines += [f"worker {row['rank']}: {name}" for name in expected if found[name] != expected[name]]
    return lines


def info(url: str) -> dict[str, Any]:
    """The engine's ``/weight_info``."""
    with HttpClient(url) as client:
        return client.weight_info()


def ask(url: str, tokens: int = 2, **options: Any) -> httpx.Response:
    """The engine's answer to one request for ``tokens`` tokens."""
    body = {"token_ids": PROMPT, "max_tokens": tokens, "ignore_eos": True, **options}
    return httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False)


def answer(url: str, tokens: int = 2, **options: Any) -> dict[str, Any]:
    """What it says, which must be an answer."""
    response = ask(url, tokens, **options)
    assert response.status_code == 200, response.text
    return dict(response.json())


def usage(pid: int) -> dict[str, int]:
    """What a process uses: descriptors, threads, resident bytes; how many of our segments it has, and their bytes."""
    descriptors = {}
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            descriptors[entry.path] = os.readlink(entry.path)
    ours = [path for path, target in descriptors.items() if target.startswith(("/memfd:rankcast", "/dev/shm/rankcast"))]
    sizes = {(status.st_dev, status.st_ino): status.st_size for status in map(os.stat, ours)}
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(descriptors),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "open": len(ours),
        "staged": sum(sizes.values()),
        "mapped": sum("/memfd:rankcast" in line or "/dev/shm/rankcast" in line for line in maps),
        "resident": resident,
    }


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Ask until ``condition`` holds; fails the test when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
