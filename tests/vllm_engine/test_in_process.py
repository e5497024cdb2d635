"""vLLM in one process: whatever the family, what a push leaves behind is what a fresh engine would hold and say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rankcast
from vllm_engine.conftest import Checkpoints, Reference
from vllm_engine.inprocess import digests, flags, probe, started_llm
from vllm_engine.models import FAMILIES
from vllm_engine.servers import TP1, TP2, TP2_EP, Layout

pytestmark = pytest.mark.vllm

IDLE = {"active": False, "state": "idle", "servable": True, "on_meta": 0, "half_loaded": 0, "kernels_absent": 0}
# The servers of the other tests have "moe" at TP2 and with its experts spread.
CASES = [
    *((family, TP1) for family in FAMILIES),
    *((family, TP2) for family in ("padded", "tied", "llama", "latent")),
    ("padded", TP2_EP),
]


def idle(llm: Any) -> bool:
    return all({key: value for key, value in one.items() if key in IDLE} == IDLE for one in flags(llm))


@pytest.mark.parametrize(("family", "layout"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_push_leaves_what_a_fresh_engine_holds_and_says(
    family: str, layout: Layout, checkpoints: Checkpoints, fresh: Callable[[str, str, Layout], Reference]
) -> None:
    a, b = checkpoints(family, "a"), checkpoints(family, "b")
    at_b = fresh(family, "b", layout)
    with started_llm(a, layout) as llm:
        at_a = Reference(digests(llm), probe(llm))
        assert at_a.said != at_b.said
        for mode, bucket in (("ranklocal", 150_000), ("broadcast", 400_000), ("direct", 2**20), ("auto", 2**20)):
            for path, expected in ((b, at_b), (a, at_a)):
                with rankcast.connect(llm, path, mode=mode, bucket_bytes=bucket, timeout=60) as sync:
                    report = sync.push(weight_version=f"{path.name} by {mode}")
                assert report.rounds > 1 or mode in ("direct", "auto")
                assert digests(llm) == expected.digests
                assert idle(llm)
                assert llm.get_weight_version() == f"{path.name} by {mode}"
            assert probe(llm) == expected.said
        with rankcast.connect(llm, b, timeout=60) as sync:
            sync.push(weight_version="b")
            sync.push(weight_version="b again")
        assert digests(llm) == at_b.digests
        assert probe(llm) == at_b.said


def test_every_weight_of_a_checkpoint_changes_a_digest(
    checkpoints: Checkpoints, fresh: Callable[[str, str, Layout], Reference]
) -> None:
    # What the readback cannot see, no test here would notice.
    for family in FAMILIES:
        (at_a,), (at_b,) = fresh(family, "a", TP1).digests, fresh(family, "b", TP1).digests
        same = {name for name in at_a if at_a[name] == at_b[name]}
        constant = ("_scale", "_scale_cpu (derived)", "cos_sin_cache", "_float", ".beta", ".eps", ".weight")
        assert {name for name in same if not name.endswith(constant)} == set(), family
        emptied = {name for name in same if name.endswith(".weight")}
        assert {name for name in emptied if f"{name} (packed)" not in at_a} == set(), family
