"""Whether every worker holds, bit for bit, what the oracle says, and whether the fleet serves it under its name.

This module knows the oracle, and what an engine answers about itself. It must not know how the weights got there, and
it trusts nothing that a push reports. Every check returns what differs, as lines, and none when nothing does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

import rankcast_oracle as oracle
from rankcast.engines.reference.layout import Layout
from rankcast.errors import RankcastError

Bits = np.ndarray[Any, Any]
Weights = Mapping[str, Bits]

#: How far the fleet's log-probabilities may lie from the trainer's: both compute in float32, in another order.
LOG_PROB_GAP = 1e-3
#: Differences that are told one by one; the others are counted.
TOLD = 10


class Engine(Protocol):
    """What is asked of an engine: the read-only calls of an ``HttpClient`` to the embedded server."""

    def weight_info(self) -> dict[str, Any]: ...
    def weight_checker(self) -> dict[str, Any]: ...
    def generate(self, token_ids: list[int], max_tokens: int, **options: Any) -> dict[str, Any]: ...


class Finding(msgspec.Struct, frozen=True):
    """What was compared after one push, and what differed (nothing, if all is well).

    ``parameters`` and ``nbytes`` are sums over the workers. ``log_prob_gap`` is the largest distance between the
    fleet's and the trainer's log-probability of a token of the probe.
    """

    parameters: int
    nbytes: int
    log_prob_gap: float
    differences: tuple[str, ...]


def read_held(folders: Sequence[Path]) -> tuple[dict[str, Bits], list[str]]:
    """The union of what the trainer ranks saved, one folder for each rank, and what they disagree about.

    Raises ``ValueError`` when a file is not whole.
    """
    weights: dict[str, Bits] = {}
    owner: dict[str, int] = {}
    differences = []
    for rank, folder in enumerate(folders):
        for name, bits in oracle.read_weights(folder).items():
            if name in weights:
                found = oracle.compare({name: weights[name]}, {name: bits})
                differences += [f"trainer ranks {owner[name]} and {rank} disagree about {line}" for line in found]
            else:
                weights[name], owner[name] = bits, rank
    return weights, differences


def unmoved(before: Weights, after: Weights) -> list[str]:
    """Tensors that a training step left as they were: a push that moved nothing would not show in them."""
    return [
        f"{name} is the same before and after a training step"
        for name, bits in after.items()
        if name in before and np.array_equal(before[name], bits)
    ]


def worker_differences(
    weights: Weights, config: Mapping[str, Any], layout: Layout, workers: Sequence[Mapping[str, Any]]
) -> tuple[list[str], int, int]:
    """Compare every parameter of every worker with the oracle.

    ``workers`` is the ``workers`` of an engine's answer to ``/weight_checker``: ``rank``, and ``parameters`` with
    ``sha256`` and ``shape``. Returns the differences, and how many parameters and bytes the oracle expects on all
    workers together. Raises ``ValueError`` when ``weights`` is no complete checkpoint of ``config``.
    """
    differences = []
    count = nbytes = 0
    said = {worker["rank"]: worker["parameters"] for worker in workers}
    if sorted(said) != list(range(layout.workers)) or len(workers) != layout.workers:
        differences.append(f"{len(workers)} workers answered, ranks {sorted(said)}: must be {layout.workers}")
    for rank in range(layout.workers):
        label = layout.place(rank).label
        expected = oracle.worker_parameters(weights, config, layout, rank)
        actual = said.get(rank, {})
        count += len(expected)
        nbytes += sum(bits.nbytes for bits in expected.values())
        differences += [f"{label} holds {name}, and must not" for name in actual if name not in expected]
        for name, bits in expected.items():
            if name not in actual:
                differences.append(f"{label} does not hold {name}")
            elif tuple(actual[name]["shape"]) != bits.shape:
                differences.append(f"{label}: {name} has shape {tuple(actual[name]['shape'])}, must be {bits.shape}")
            elif actual[name]["sha256"] != (digest := oracle.digest(bits)):
                held = actual[name]["sha256"]
                differences.append(f"{label}: {name} has sha256 {held[:16]}..., must be {digest[:16]}...")
    return differences, count, nbytes


def serving_differences(engine: Engine, version: str, layout: Layout, prompt: Sequence[int]) -> list[str]:
    """Whether ``version`` is what the engine says it has, and what every replica generates with."""
    info = engine.weight_info()
    differences = []
    if info["weight_version"] != version:
        differences.append(f"the engine says weight version {info['weight_version']!r}, must be {version!r}")
    differences += [
        f"{row['label']} is not servable ({row['state']})" for row in info["workers"] if not row["servable"]
    ]
    if len({row["generation"] for row in info["workers"]}) != 1:
        differences.append(f"workers are at generations {[row['generation'] for row in info['workers']]}: must be one")
    for replica in range(layout.dp):
        reply = engine.generate(list(prompt), 2, replica=replica, ignore_eos=True)
        if reply["weight_versions"] != [version] * 2:
            differences.append(f"replica {replica} generated with {reply['weight_versions']}, must be {version!r}")
    return differences


def log_prob_gap(engine: Engine, prompt: Sequence[int], trainer: Sequence[float]) -> float:
    """The largest distance between the engine's and the trainer's log-probability of a prompt's token."""
    found = engine.generate(list(prompt), 1, ignore_eos=True, prompt_logprobs=True)["prompt_logprobs"][1:]
    # A NaN comes as null.
    pairs = zip(found, trainer, strict=True)
    return max((math.inf if ours is None else abs(ours - theirs)) for ours, theirs in pairs)


class Verifier:
    """Checks one engine after each push; remembers the weights before, to know that they moved."""

    def __init__(self, engine: Engine, config: Mapping[str, Any], layout: Layout, before: Weights) -> None:
        self._engine = engine
        self._config = config
        self._layout = layout
        self._before = before

    def check(
        self,
        version: str,
        folders: Sequence[Path],
        prompt: Sequence[int],
        log_probs: Sequence[float],
    ) -> Finding:
        """What was found after the push of ``version``, of which each trainer rank saved what it held in its folder."""
        weights, differences = read_held(folders)
        differences += unmoved(self._before, weights)
        self._before = weights
        count = nbytes = 0
        gap = math.inf

        def bits() -> list[str]:
            nonlocal count, nbytes
            answer = self._engine.weight_checker()["workers"]
            found, count, nbytes = worker_differences(weights, self._config, self._layout, answer)
            return found

        def values() -> list[str]:
            nonlocal gap
            gap = log_prob_gap(self._engine, prompt, log_probs)
            return [] if gap < LOG_PROB_GAP else [f"log-probs differ from the trainer's by {gap:g}"]

        differences += _asked(bits)
        differences += _asked(lambda: serving_differences(self._engine, version, self._layout, prompt))
        differences += _asked(values)
        return Finding(count, nbytes, gap, tuple(f"{version}: {line}" for line in differences))


def _asked(check: Callable[[], list[str]]) -> list[str]:
    # An engine that refuses to answer is a finding like any other.
    try:
        return check()
    except (RankcastError, ValueError) as error:
        return [str(error)]
