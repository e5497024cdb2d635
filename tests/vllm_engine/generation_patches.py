"""What vLLM 0.32's CPU backend needs in order to *generate* in some layouts; for tests only.

None of this has to do with weights: without it every layout starts, is updated and is read back. It knows vLLM's CPU
kernels; rankcast must never need it. A patch is asked for by name in ``VARIABLE`` and works in the processes of that
server only, so that each test that rests on one can say so.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

#: Names of patches, separated by commas.
VARIABLE = "RANKCAST_TEST_GENERATION_PATCHES"


def apply() -> None:
    """Apply the patches named in the environment of this process; raises ``KeyError`` for an unknown name."""
    known = {"cpu-expert-parallel": _expert_parallel}
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        known[name]()


def _expert_parallel() -> None:
    """The CPU experts take global expert ids for indices into their local weights, and read beyond them.

    Ids become local ones, and a token's share in an expert that lives elsewhere gets weight 0.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply_local(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        local_of = call.arguments.get("expert_map")
        if local_of is not None:
            ids, shares = call.arguments["topk_ids"], call.arguments["topk_weights"]
            local = local_of[ids.long()]
            call.arguments["topk_ids"] = local.clamp(min=0).to(ids.dtype)
            call.arguments["topk_weights"] = torch.where(local < 0, torch.zeros_like(shares), shares)
        return original(*call.args, **call.kwargs)

    CPUUnquantizedExperts.apply = apply_local
