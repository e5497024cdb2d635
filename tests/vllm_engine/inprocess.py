"""vLLM behind a ``vllm.LLM`` of the test's own process: started, asked and ended.

It knows vLLM's offline class; it must not know what a test expects. Only one can be alive at a time: ending one takes
vLLM's process groups away from all others in the process.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_engine.servers import PROMPTS, TP1, Generated, Layout, environment_of

#: The engine says no more than it must.
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


@contextlib.contextmanager
def started_llm(
    checkpoint: Path,
    layout: Layout = TP1,
    *,
    backend: str | None = "rankcast",
    separate: bool = False,
    **options: Any,
) -> Iterator[Any]:
    """A ``vllm.LLM`` of ``checkpoint`` with its engine core in this process, or in a ``separate`` one, as is vLLM's
    default; ``options`` go to it."""
    where = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(separate))}
    with tempfile.TemporaryDirectory(prefix="vt-") as room, pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment_of(layout.patches), **_QUIET, **where, "TMPDIR": room}.items():
            patch.setenv(name, value)
        patch.setattr(tempfile, "tempdir", room)  # vLLM leaves files there when it ends
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)  # and replaces this for the whole process
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        given: dict[str, Any] = {
            "dtype": "bfloat16",
            "enable_expert_parallel": layout.expert_parallel,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 32 * 2**20,
            "max_model_len": 512,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 2,
            "skip_tokenizer_init": True,
            "tensor_parallel_size": layout.tp,
            "worker_extension_cls": "vllm_engine.readback.Readback",
        }
        if backend is not None:
            given["weight_transfer_config"] = WeightTransferConfig(backend=backend)
        llm = LLM(str(checkpoint), **{**given, **options})
        # The same as what happens when the object is collected, which may be never, and never twice.
        end = llm.llm_engine.engine_core._finalizer
        try:
            yield llm
        finally:
            del llm
            end()
            gc.collect()


def digests(llm: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = llm.collective_rpc("read_digests")
    return found


def flags(llm: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = llm.collective_rpc("read_flags")
    return found


def probe(llm: Any) -> Generated:
    """Greedy token ids and their log-probs for the fixed prompts, one after the other."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
    said: Generated = []
    for prompt in PROMPTS:
        output = llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)[0].outputs[0]
        ids = tuple(output.token_ids)
        said.append((ids, tuple(place[token].logprob for place, token in zip(output.logprobs, ids, strict=True))))
    return said
