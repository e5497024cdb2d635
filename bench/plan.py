"""How long a plan takes: ``python bench/plan.py --json``, one JSON object on stdout.

This script knows two large cases and what is inside each time. It must not plan anything itself. Both cases plan a
model of a trillion parameters from its ``config.json`` (Kimi-K2; another can be given), with no process but this one.

What is inside, in seconds of wall time on one core (the fastest of some repeats, each from scratch, since other work on
the machine only ever adds):

* ``seconds``: everything from a config.json to a plan that is ready to be sent, which is the sum of the next two;
* ``columns_seconds``: names and shapes of all tensors, every rank's shards, every distinct trace's destinations. In a
  real sync each rank and each worker makes its own part of these;
* ``plan_seconds``: ``make_plan`` (pieces, crossings, the proof of coverage, the choice of replicas) and the plan's
  hash, which takes in every row of every worker.

``median_seconds`` is the median of the repeats, ``cpu_seconds`` the least processor time. Not in any: cutting out and
encoding each worker's rows, and what a network does.

``sender_max_over_mean`` is over all trainer ranks, so it has in it that pipeline stages differ in what they hold;
``replica_max_over_min`` is the worst ratio between ranks that share all boxes that they share with anyone, which is
what a plan can even out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rankcast.cli.plan import peak_rss_mib
from rankcast.plan.families import family_of
from rankcast.plan.grids import RolloutGrid, TrainerGrid
from rankcast.plan.routes import Plan, make_plan
from rankcast.plan.simulated_rollout import rollout_fleet
from rankcast.plan.simulated_trainer import RANKS_PER_HOST, trainer_shards
from rankcast.plan.tensors import tensors_of

#: Facts of a public model, as its config.json has them.
KIMI_K2: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "dtype": "bfloat16",
}

#: Name -> trainer grid, rollout grid, and the seconds that it may all take.
CASES = {
    "1024_ranks_to_32_engines": ("pp=16,ep=64", "dp=32,ep=32,engines=32", 2.0),
    "256_ranks_to_128_workers": ("pp=8,ep=32", "dp=128,ep=128,engines=1", 0.3),
}


def measure(config: dict[str, Any], trainer: str, rollout: str, repeats: int) -> dict[str, Any]:
    """One case, ``repeats`` times from scratch."""
    to, source = RolloutGrid.parse(rollout), TrainerGrid.parse(trainer)
    columns: list[float] = []
    planning: list[float] = []
    processor: list[float] = []
    for _ in range(repeats):
        cpu, began = time.process_time(), time.perf_counter()
        tensors = tensors_of(family_of(config))
        shards = trainer_shards(tensors, source)
        fleet = rollout_fleet(tensors, to, first_host=-(-source.ranks // RANKS_PER_HOST))
        ready = time.perf_counter()
        plan = make_plan(tensors.manifest, shards, fleet)
        digest = plan.hash
        done = time.perf_counter()
        columns.append(ready - began)
        planning.append(done - ready)
        processor.append(time.process_time() - cpu)
    sent = plan.sender_bytes
    whole = np.add(columns, planning).tolist()
    best = int(np.argmin(whole))
    return {
        "trainer": trainer,
        "rollout": rollout,
        "tensors": len(tensors.manifest),
        "shards": len(shards),
        "traces": len(fleet.traces),
        "workers": len(fleet),
        "routes": plan.routes,
        "hash": digest,
        "seconds": round(whole[best], 4),
        "columns_seconds": round(columns[best], 4),
        "plan_seconds": round(planning[best], 4),
        "median_seconds": round(statistics.median(whole), 4),
        "cpu_seconds": round(min(processor), 4),
        "sender_max_over_mean": round(float(sent.max() / sent.mean()), 4),
        "replica_max_over_min": round(replica_max_over_min(plan), 4),
    }


def replica_max_over_min(plan: Plan) -> float:
    """The worst ratio of bytes sent between ranks that share exactly the same boxes with others."""
    shards, pieces = plan.pieces.shards, plan.pieces
    shared = np.repeat(pieces.count > 1, pieces.count)
    keys: dict[bytes, list[int]] = {}
    order = np.argsort(shards.rank[shared], kind="stable")
    ranks, cuts = np.unique(shards.rank[shared][order], return_index=True)
    piece = np.repeat(np.arange(len(pieces.count)), pieces.count)[shared][order]
    for rank, own in zip(ranks.tolist(), np.split(piece, cuts[1:]), strict=True):
        keys.setdefault(np.sort(own).tobytes(), []).append(rank)
    sent = plan.sender_bytes
    groups = [sent[group] for group in keys.values() if len(group) > 1]
    return max((float(group.max() / max(int(group.min()), 1)) for group in groups), default=1.0)


def main() -> int:
    arguments = argparse.ArgumentParser(description="How long a plan takes.")
    arguments.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments.add_argument("--model", type=Path, help="another config.json")
    arguments.add_argument("--repeats", type=int, default=5, help="repeats of each case; the fastest is printed")
    chosen = arguments.parse_args()
    config = KIMI_K2 if chosen.model is None else json.loads(chosen.model.read_text())
    found: dict[str, Any] = {}
    for name, (trainer, rollout, limit) in CASES.items():
        found[name] = {**measure(config, trainer, rollout, chosen.repeats), "target_seconds": limit}
        found[name]["peak_rss_mib"] = round(peak_rss_mib(), 1)  # of the process, so of the largest case so far
    first = found["1024_ranks_to_32_engines"]
    whole = {key: first[key] for key in ("routes", "seconds", "sender_max_over_mean")}
    whole |= {"peak_rss_mib": round(peak_rss_mib(), 1), "cases": found}
    if chosen.json:
        print(json.dumps(whole))
        return 0
    for name, case in found.items():
        print(f"{name}: {case['routes']:,} routes")
        limit = f"at most {case['target_seconds']} s"
        print(f"  {case['seconds']:.2f} s ({limit}), of which {case['columns_seconds']:.2f} s for columns")
        print(f"  processor time {case['cpu_seconds']:.2f} s, peak memory {case['peak_rss_mib']:.0f} MiB")
        print(f"  senders: max/mean {case['sender_max_over_mean']}, equal replicas {case['replica_max_over_min']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
