"""Real vLLM by the direct mode: from files and from a module's memory, what is left is a fresh engine's, to the bit.

``test_in_process`` has every family from files; here are the module, what goes by route and why not, and servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rankcast
from direct.origins import Named
from rankcast.rollout.program import CopyProgram
from vllm_engine.conftest import Bench, Checkpoints, Reference
from vllm_engine.inprocess import digests, probe, started_llm
from vllm_engine.models import weights_of
from vllm_engine.servers import TP1, Layout

pytestmark = pytest.mark.vllm

Fresh = Callable[[str, str, Layout], Reference]


class Policy(Named):
    """A trainer's module that can be at checkpoint a or b of a family; every large parameter has its own storage."""

    def __init__(self, family: str) -> None:
        super().__init__(weights_of(family, "a"))
        self._family = family

    def become(self, which: str) -> None:
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights_of(self._family, which).items():
                own[name].copy_(tensor)


def read_norms(worker: Any) -> dict[str, int]:
    """Where a worker's norms lie."""
    model = worker.model_runner.model
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters() if name.endswith("norm.weight")}


@pytest.mark.parametrize("family", ["moe", "padded", "tied", "latent"])
def test_a_module_is_pushed_step_by_step_out_of_its_own_memory(
    family: str, checkpoints: Checkpoints, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[str]] = []
    bind = CopyProgram.bind
    monkeypatch.setattr(CopyProgram, "bind", lambda self, targets: bound.append(set(targets)) or bind(self, targets))
    at_a, at_b = fresh(family, "a", TP1), fresh(family, "b", TP1)
    policy = Policy(family)
    with started_llm(checkpoints(family, "a"), TP1) as llm:
        norms = llm.collective_rpc(read_norms)
        with rankcast.connect(llm, policy, timeout=60) as sync:
            for step, (which, expected) in enumerate([("b", at_b), ("a", at_a), ("b", at_b)]):
                policy.become(which)
                report = sync.push(weight_version=str(step))
                assert digests(llm) == expected.digests
                assert probe(llm) == expected.said
                assert report.worker_calls == 1
                assert report.through_loader == {}
                assert report.direct_tensors == report.tensors
                # Small storages are packed, and nothing is staged beside them.
                small = sum(t.nbytes for t in policy.parameters() if t.untyped_storage().nbytes() < 64 * 1024)
                assert report.staged_bytes == small
        # What derives nothing is written where it lives, by views that are made once.
        assert llm.collective_rpc(read_norms) == norms
        assert [bound.count({name}) for name in norms[0]] == [1] * len(norms[0])


@pytest.mark.parametrize("mode", ["direct", "auto"])
def test_a_module_is_pushed_into_running_servers(bench: Bench, mode: str) -> None:
    policy = Policy("moe")
    with rankcast.connect(bench.server.url, policy, mode=mode, timeout=120) as sync:
        for which, expected in (("b", bench.at_b), ("a", bench.at_a)):
            policy.become(which)
            report = sync.push(weight_version=which)
            assert bench.server.digests() == expected.digests
            assert bench.server.probe() == expected.said
            assert report.worker_calls == bench.layout.tp
            assert report.direct_tensors == report.tensors
    if bench.layout.expert_parallel:
        whole = sum(parameter.nbytes for parameter in policy.parameters())
        assert all(row.nbytes < 0.75 * whole for row in report.workers)
