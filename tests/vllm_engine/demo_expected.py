"""Whether a vLLM worker holds what the trainer ranks have, judged by the readback alone.

It knows the oracle's formulas, the four names that vLLM spells otherwise, and that experts lie packed for the machine's
vector unit. It must not know how weights got there, and nothing that a push reports comes in here. How this machine
packs is found out on a server that was started from a checkpoint and has had no push; what no checkpoint fills
(rotary tables, expert maps, scales) must stay as it was then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import oracle
from vllm_engine.readback import _digest as digest

Bits = np.ndarray[Any, Any]
Digests = Sequence[Mapping[str, str]]

#: Ways in which vLLM's CPU backend packs experts, by machine.
WAYS = ("vec", "amx", "neon", "vsx")
_PACKED = " (packed)"
_EXPERTS = ("experts.routed_experts.w13_weight", "experts.routed_experts.w2_weight")


class Expected:
    """What every worker of one server must read back, push after push.

    ``started`` are the digests of the server before any push, ``weights`` the checkpoint it was started from, as raw
    bits. Raises ``RuntimeError`` when they do not belong together, naming what differs.
    """

    def __init__(
        self, config: Mapping[str, Any], layout: oracle.LayoutLike, weights: Mapping[str, Bits], started: Digests
    ) -> None:
        self._config, self._layout, self._started = config, layout, started
        found: list[str] = []
        for self._way in WAYS:
            if not (found := self.differences(weights, started)):
                return
        raise RuntimeError("a fresh server does not hold the checkpoint it was started from: " + "; ".join(found[:10]))

    @property
    def parameters(self) -> int:
        """How many of the tensors that are read back come from the checkpoint, over all workers."""
        return sum(_origin(name) is not None for held in self._started for name in held)

    def nbytes(self, weights: Mapping[str, Bits]) -> int:
        """How many bytes of ``weights`` the workers hold together."""
        return sum(
            bits.nbytes
            for rank in range(oracle.workers(self._layout))
            for bits in oracle.worker_parameters(weights, self._config, self._layout, rank).values()
        )

    def differences(self, weights: Mapping[str, Bits], said: Digests) -> list[str]:
        """Every tensor of every worker that is not what ``weights`` make it, as a line; none when all are."""
        if len(said) != oracle.workers(self._layout):
            return [f"{len(said)} workers answered, must be {oracle.workers(self._layout)}"]
        lines: list[str] = []
        for rank, (held, before) in enumerate(zip(said, self._started, strict=True)):
            bits = oracle.worker_parameters(weights, self._config, self._layout, rank)
            lines += [f"worker {rank}: {name} is gone" for name in before if name not in held]
            shown = set()
            for name, found in held.items():
                origin = _origin(name)
                if origin is None:
                    accepted = {before.get(name)}
                elif origin not in bits:
                    accepted = set()
                else:
                    accepted = {digest(self._stored(name, bits[origin]))}
                    if found in accepted:
                        shown.add(origin)
                    elif name + _PACKED in held:
                        # Where the packed copy is all that there is, the parameter itself is empty.
                        accepted.add(digest(torch.empty(0, dtype=torch.bfloat16)))
                if found not in accepted:
                    lines.append(f"worker {rank}: {name} is not what the trainer ranks hold")
            lines += [f"worker {rank}: {origin} was not read back" for origin in bits if origin not in shown]
        return lines

    def _stored(self, name: str, bits: Bits) -> torch.Tensor:
        whole = torch.from_numpy(bits).view(torch.bfloat16)
        if name.endswith(_EXPERTS):
            from vllm import _custom_ops

            try:
                return _custom_ops.cpu_prepack_moe_weight(whole, self._way)
            except RuntimeError:  # a way of another machine
                return torch.empty(0)
        # Read back by a multiplication, in which a zero has no sign.
        return whole + 0.0 if name.endswith(_PACKED) else whole


def _origin(name: str) -> str | None:
    """The oracle's name of what vLLM calls ``name``, or None for what no checkpoint fills."""
    plain = name.removesuffix(_PACKED)
    if plain.endswith((" (derived)", "cos_sin_cache", "_scale", "_expert_map")):
        return None
    if plain.endswith(_EXPERTS):
        return plain.replace(".routed_experts.", ".")
    # The router is a part of the experts' module as well.
    return plain.replace(".experts.gate.", ".gate.")
