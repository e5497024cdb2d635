"""Who a worker is, what its model is, and what of vLLM's features a push cannot be kept correct with.

This module knows vLLM's groups and its configuration. It must not know how weights are loaded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rankcast.engines.vllm.plugin import SEED_VARIABLE
from rankcast.errors import UnsupportedError
from rankcast.process import this_process
from rankcast.topology import Worker, engine_rank
from rankcast.trace.fingerprint import Fingerprint, class_name, digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def identity(config: VllmConfig) -> Worker:
    """Who this worker is, asked of vLLM's own groups and configuration; call it once they are initialised."""
    from vllm.distributed import parallel_state

    parallel = config.parallel_config
    world = parallel.world_size
    expert = 0
    # The expert group exists for MoE models without expert parallelism too: only the flag tells.
    if parallel.enable_expert_parallel and parallel_state._EP is not None:
        expert = parallel_state.get_ep_group().rank_in_group
    seed = f"{os.environ.get(SEED_VARIABLE, '')}/{config.instance_id}"
    return Worker(
        engine=hashlib.blake2b(seed.encode(), digest_size=16).hexdigest(),
        rank=engine_rank(dp_index=parallel.data_parallel_index, world_size=world, rank=parallel.rank),
        workers=world * parallel.data_parallel_size,
        dp=parallel.data_parallel_index,
        pp=parallel_state.get_pp_group().rank_in_group,
        tp=parallel_state.get_tp_group().rank_in_group,
        ep=expert,
        device=_device_uuid(),
        process=this_process(),
    )


def _device_uuid() -> str:
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def check_supported(config: VllmConfig) -> None:
    """Raise ``UnsupportedError`` for what a push would get wrong without anybody noticing."""
    parallel, model = config.parallel_config, config.model_config
    wrong = []
    if parallel.enable_eplb:
        wrong.append("expert placement that is rebalanced (enable_eplb): the experts a worker holds change under way")
    if config.lora_config is not None:
        wrong.append("LoRA (enable_lora): its layers wrap the ones that a checkpoint names")
    if config.speculative_config is not None:
        wrong.append("a speculative draft model: it would stay at its old weights")
    if model.quantization is not None:
        wrong.append(f"quantisation ({model.quantization}): what is loaded is not what is kept")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.data_parallel_size > 1:
        wrong.append("external_launcher with data parallelism: its ranks are counted differently")
    if wrong:
        raise UnsupportedError(f"rankcast does not yet support {'; '.join(wrong)}: serve without it")


class ExpertMaps:
    """The map of each layer's experts to their slots, read now, and again only when one was written or replaced.

    Who asks about an engine that sleeps must not make it read what is not there.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._read: tuple[tuple[int, int, int], ...] = ()
        self._digest = ""
        self.digest()

    def digest(self) -> str:
        """Of all maps; empty when no layer has one."""
        maps = list(self._maps())
        # Their counter says when they were written; tensors made in inference mode have none.
        now = tuple((id(one), one.data_ptr(), -1 if one.is_inference() else one._version) for one in maps)
        if now != self._read:
            self._digest = digest([one.tolist() for one in maps]) if maps else ""
            self._read = now
        return self._digest

    def _maps(self) -> Iterator[torch.Tensor]:
        for layer in self._model.modules():
            # A buffer of the layer, and what its loader asks.
            manager = layer.__dict__.get("expert_map_manager")
            for holder in (layer._buffers, layer.__dict__, {"_expert_map": getattr(manager, "_expert_map", None)}):
                slots = holder.get("_expert_map")
                if isinstance(slots, torch.Tensor) and not slots.is_meta:
                    yield slots


def fingerprint(model: torch.nn.Module, config: VllmConfig, experts: ExpertMaps) -> Fingerprint:
    """The model's class, vLLM's version, how it is parallel, and the map of each layer's experts to their slots."""
    import vllm

    parallel, worker = config.parallel_config, identity(config)
    return Fingerprint(
        model=class_name(model),
        engine=f"vllm {vllm.__version__}",
        layout=(
            f"tp {worker.tp} of {parallel.tensor_parallel_size}, pp {worker.pp} of {parallel.pipeline_parallel_size}, "
            f"dp {worker.dp} of {parallel.data_parallel_size}, ep {worker.ep} "
            f"({'on' if parallel.enable_expert_parallel else 'off'})"
        ),
        experts=experts.digest(),
    )


def may_ignore(config: VllmConfig, name: str) -> bool:
    """Whether vLLM's loader passes over checkpoint tensor ``name`` on purpose."""
    hf = config.model_config.hf_config
    return (name == "lm_head.weight" and bool(getattr(hf, "tie_word_embeddings", False))) or (
        "rotary_emb.inv_freq" in name
    )
