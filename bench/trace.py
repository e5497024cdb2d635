"""How long a trace takes: ``python bench/trace.py --json``, one JSON object on stdout.

This script knows two large loaders and which steps follow a trace at connect. It must not know how any of them is done.
Parameters and tensors lie on the meta device, so that no memory and no checkpoint is needed; only the loader's Python
and what a worker makes of it are timed, on one core.

The cases:

* ``experts``: 18,432 tensors of 48 layers of 128 experts, each copied into its part of a fused stack, as vLLM does it;
* ``padded``: one stack of 128 experts whose 256 halves each end in rows of padding, which the loader zeroes.

Seconds, each of the repeat that took the least processor time, by step and in all: ``trace`` is the loader itself, run
and recorded; ``cleared``, ``missing`` and ``overlaps`` judge the writes, ``padding`` lists the constant ones, and
``wanted`` makes boxes of them for a plan. ``cpu_seconds`` is processor time, ``wall_seconds`` what a clock says, in
which there is whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rankcast.manifest import Manifest, TensorMeta
from rankcast.rollout.padding import cleared_by, padding_of
from rankcast.rollout.wanted import wanted_of
from rankcast.trace.record import Trace, trace_loader

Case = tuple[Manifest, Mapping[str, torch.Tensor], Callable[[Iterable[tuple[str, torch.Tensor]]], None]]

LAYERS, EXPERTS, HIDDEN, INNER = 48, 128, 2048, 768
PADDED_ROWS = 8

#: What all of ``experts`` may take, in seconds of processor time.
TARGET_SECONDS = 2.0


def experts() -> Case:
    shapes = {"w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER)}
    stacks = {
        f"{layer}.{kind}": torch.empty(shape, device="meta")
        for layer in range(LAYERS)
        for kind, shape in shapes.items()
    }
    rows = [
        TensorMeta(f"{layer}.{expert}.{kind}", "float32", (HIDDEN, INNER) if kind == "down" else (INNER, HIDDEN))
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for kind in ("gate", "up", "down")
    ]

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            layer, expert, kind = name.split(".")
            if kind == "down":
                stacks[f"{layer}.w2"].data[int(expert)].copy_(tensor)
            else:
                half = stacks[f"{layer}.w13"].data[int(expert)].narrow(0, 0 if kind == "gate" else INNER, INNER)
                half.copy_(tensor)

    return Manifest.of(rows), stacks, load


def padded() -> Case:
    stack = torch.empty((EXPERTS, 2 * INNER, HIDDEN), device="meta")
    held = INNER - PADDED_ROWS
    rows = [TensorMeta(f"{expert}.{at}", "float32", (held, HIDDEN)) for expert in range(EXPERTS) for at in (0, INNER)]

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            expert, at = map(int, name.split("."))
            half = stack.data[expert].narrow(0, at, INNER)
            half[:held].copy_(tensor)
            half[held:].zero_()

    return Manifest.of(rows), {"w13": stack}, load


STEPS: dict[str, Callable[[Trace], object]] = {
    "cleared": cleared_by,
    "missing": Trace.missing,
    "overlaps": Trace.overlaps,
    "padding": padding_of,
    "wanted": lambda trace: wanted_of(trace, {}, {}, whole_modules=False),
}


def measure(case: Case) -> dict[str, Any]:
    """One case, once from scratch."""
    manifest, destinations, load = case
    cpu: dict[str, float] = {}
    wall: dict[str, float] = {}

    def timed(step: str, action: Callable[[], Any]) -> Any:
        began, clock = time.process_time(), time.perf_counter()
        made = action()
        cpu[step] = time.process_time() - began
        wall[step] = time.perf_counter() - clock
        return made

    trace: Trace = timed("trace", lambda: trace_loader(load, destinations, manifest))
    for step, action in STEPS.items():
        timed(step, lambda action=action: action(trace))
    assert trace.missing() == trace.overlaps() == []
    return {
        "tensors": len(manifest),
        "parameters": len(destinations),
        "copies": len(trace.copies),
        "fills": len(trace.fills),
        "hash": trace.hash,
        "cpu_seconds": round(sum(cpu.values()), 4),
        "wall_seconds": round(sum(wall.values()), 4),
        "steps": {
            step: {"cpu_seconds": round(cpu[step], 4), "wall_seconds": round(wall[step], 4)}
            for step in ("trace", *STEPS)
        },
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description="How long a trace takes.")
    arguments.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments.add_argument("--repeats", type=int, default=3, help="repeats of each case; the fastest is printed")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    found = {
        name: min((measure(make()) for _ in range(chosen.repeats)), key=lambda one: one["cpu_seconds"])
        for name, make in (("experts", experts), ("padded", padded))
    }
    first = found["experts"]
    whole = {key: first[key] for key in ("tensors", "cpu_seconds", "wall_seconds")}
    whole |= {"target_cpu_seconds": TARGET_SECONDS, "cases": found}
    if chosen.json:
        print(json.dumps(whole))
        return 0
    for name, case in found.items():
        print(f"{name}: {case['tensors']:,} tensors, {case['copies']:,} copies, {case['fills']:,} fills")
        print(f"  {case['cpu_seconds']:.2f} s of processor time, {case['wall_seconds']:.2f} s of the clock, of which")
        for step, seconds in case["steps"].items():
            print(f"  {step:>10} {seconds['cpu_seconds']:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
