"""Pushing into running servers: every tensor and every log-prob is a fresh server's, in every layout and mode."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rankcast
from fleets import environment
from vllm_engine.conftest import Bench
from vllm_engine.models import weights_of
from vllm_engine.servers import TP1, TP2

pytestmark = pytest.mark.vllm

ON_TP1_AND_TP2 = pytest.mark.parametrize(
    "bench", [TP1, TP2], indirect=True, ids=lambda layout: layout.name, scope="session"
)


EXPERTS = 8
#: The bytes of each tensor of either checkpoint.
SIZES = {name: tensor.nbytes for name, tensor in weights_of("moe", "b").items()}


def expert_of(name: str) -> int | None:
    """Which expert a tensor belongs to."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def push(bench: Bench, checkpoint: Path, **options: Any) -> rankcast.PushReport:
    with rankcast.connect(bench.server.url, checkpoint, timeout=60, **{"mode": "ranklocal", **options}) as sync:
        return sync.push(weight_version=checkpoint.name)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankcast", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )


def test_two_servers_on_two_checkpoints_differ(bench: Bench) -> None:
    assert bench.at_a.said != bench.at_b.said
    for at_a, at_b in zip(bench.at_a.digests, bench.at_b.digests, strict=True):
        assert at_a.keys() == at_b.keys()
        assert sum(at_a[name] != at_b[name] for name in at_a) > 20


@pytest.mark.parametrize(
    ("mode", "bucket"),
    [
        ("ranklocal", 140_000),
        ("ranklocal", 64 * 2**20),
        ("broadcast", 300_000),
        ("direct", 10**6),
        ("auto", 10**6),
    ],
)
def test_a_push_leaves_what_a_fresh_server_holds_and_says(bench: Bench, mode: str, bucket: int) -> None:
    report = push(bench, bench.b, mode=mode, bucket_bytes=bucket)
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said
    assert bench.server.get("/weight_info") == {"weight_version": bench.b.name}
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert len(report.workers) == bench.layout.tp
    push(bench, bench.a, mode=mode, bucket_bytes=bucket)
    assert bench.server.digests() == bench.at_a.digests
    assert bench.server.probe() == bench.at_a.said


@pytest.mark.parametrize("mode", ["ranklocal", "direct"])
def test_one_connection_pushes_again_and_again(bench: Bench, mode: str) -> None:
    with rankcast.connect(bench.server.url, bench.b, mode=mode, bucket_bytes=200_000, timeout=60) as sync:
        sync.push(weight_version="one")
        assert bench.server.digests() == bench.at_b.digests
        push(bench, bench.a)
        sync.push(weight_version="two")
        assert bench.server.digests() == bench.at_b.digests
        sync.push(weight_version="three")
    assert bench.server.probe() == bench.at_b.said


def test_rank_local_entries_spare_each_worker_what_it_does_not_keep(bench: Bench) -> None:
    reports = {mode: push(bench, bench.b, mode=mode, bucket_bytes=300_000) for mode in ("broadcast", "ranklocal")}
    assert bench.server.digests() == bench.at_b.digests
    push(bench, bench.a)
    broadcast, ranklocal = reports["broadcast"], reports["ranklocal"]
    # As each worker says itself.
    read = {mode: [row.nbytes for row in report.workers] for mode, report in reports.items()}
    assert broadcast.requests == ranklocal.requests
    assert ranklocal.worker_calls <= broadcast.worker_calls
    tp = bench.layout.tp
    assert read["broadcast"] == [sum(SIZES.values())] * tp
    # Of the experts, which weigh more than half of all, a worker reads its own where they are spread.
    share = EXPERTS // tp
    own = [range(rank * share, (rank + 1) * share) for rank in range(tp)]
    if not bench.layout.expert_parallel:
        own = [range(EXPERTS)] * tp
    assert read["ranklocal"] == [
        sum(size for name, size in SIZES.items() if expert_of(name) is None or expert_of(name) in mine) for mine in own
    ]
    # One entry a worker instead of one for all: more bytes of requests, by less than the number of workers.
    assert broadcast.request_bytes < ranklocal.request_bytes or bench.layout.tp == 1
    assert ranklocal.request_bytes < (bench.layout.tp + 1) * broadcast.request_bytes


def test_workers_say_who_they_are(bench: Bench) -> None:
    done = command("status", bench.server.url, "--json")
    status = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    (engine,) = status["engines"]
    workers = [row["worker"] for row in engine["workers"]]
    tp = bench.layout.tp
    assert [(w["rank"], w["tp"], w["dp"], w["pp"], w["workers"]) for w in workers] == [
        (r, r, 0, 0, tp) for r in range(tp)
    ]
    # The group of experts exists without the flag as well, and means nothing then.
    assert [w["ep"] for w in workers] == [rank if bench.layout.expert_parallel else 0 for rank in range(tp)]
    assert len({w["engine"] for w in workers}) == 1
    assert len(workers[0]["engine"]) == 32
    assert {w["process"]["pid"] for w in workers} <= set(bench.server.pids())


@ON_TP1_AND_TP2
def test_the_command_line_pushes_a_checkpoint_and_says_how_it_is(bench: Bench) -> None:
    done = command("push", str(bench.b), bench.server.url, "--weight-version", "by hand", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weight_version"] == "by hand"
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said
    done = command("status", bench.server.url)
    assert done.returncode == 0, done.stderr
    assert "by hand" in done.stderr
    assert "not paused" in done.stderr
