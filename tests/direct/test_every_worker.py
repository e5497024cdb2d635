"""In the direct mode every worker holds what the oracle says, for models, layouts and sources at random.

Weights are bits of every pattern: NaNs of both kinds, infinities, denormals, -0.0. Nothing is compared as a value.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

import rankcast
from checkpoints import tiny_config
from direct.models import models
from direct.origins import KINDS, Origin
from fleets_inprocess import Fleet, Trained, WatchedClient
from oracle import touched, unique_weights
from rankcast.engines.reference.layout import Layout


def check_report(report: rankcast.PushReport, config: dict[str, Any], layout: Layout) -> None:
    """A report's counts, counted again from what the oracle alone knows."""
    assert report.rounds == 1
    assert report.worker_calls == layout.workers
    # Claim, start, prepare, finish and release.
    assert report.control_calls == 5 * layout.workers
    assert report.through_loader == {}
    assert report.direct_tensors == report.tensors == len(unique_weights(config, 0))
    for row in report.workers:
        assert (row.tensors, row.calls) == (len(touched(config, layout, row.rank)), 1)


@settings(max_examples=30)
@given(model=models(), kind=st.sampled_from(KINDS), mode=st.sampled_from(["direct", "auto"]), seed=st.integers(0, 99))
def test_every_worker_equals_the_oracle_after_each_of_three_pushes(
    model: tuple[dict[str, Any], Layout], kind: str, mode: str, seed: int
) -> None:
    config, layout = model
    with tempfile.TemporaryDirectory() as folder, Fleet(config, layout) as fleet:
        origin = Origin(kind, config, Path(folder), seed=seed)
        sync = None
        for step in (1, 2, 3):
            weights = unique_weights(config, step)
            origin.become(weights, str(step))
            if sync is None or not origin.lasting:
                if sync is not None:
                    sync.close()
                sync = rankcast.connect(fleet.receivers, origin.source, mode=mode, timeout=60)
            report = sync.push(str(step))
            assert fleet.differences(weights) == []
            assert fleet.servable == [True] * layout.workers
            assert fleet.versions == {str(step)}
            check_report(report, config, layout)
            # Only storages that are too small to be shared one by one are copied.
            total = sum(bits.nbytes for bits in weights.values())
            if kind == "separate":
                assert report.staged_bytes == total
            elif kind == "packed experts":
                experts = sum(bits.nbytes for name, bits in weights.items() if ".experts." in name)
                assert report.staged_bytes == experts
            else:
                assert report.staged_bytes == 0
        assert sync is not None
        sync.close()


def steady_request_bytes(config: dict[str, Any], layout: Layout) -> int:
    """The bytes of all that an engine is sent for one push of a connection that has pushed before."""
    weights = unique_weights(config, 1)
    with Fleet(config, layout) as fleet:
        client = WatchedClient(fleet.receivers)
        with rankcast.connect(client, Trained(weights, config["dtype"]), mode="direct", timeout=60) as sync:
            sync.push("1")
            before = len(client.payloads)
            sync.push("2")
            assert fleet.differences(weights) == []
            return sum(len(msgspec.json.encode({"update_info": payload})) for _, payload in client.payloads[before:])


def test_what_a_later_push_sends_is_small_and_does_not_grow_with_the_model() -> None:
    layout = Layout(tp=2, dp=2, expert_parallel=True)
    small = tiny_config(num_hidden_layers=1, num_experts=4, hidden_size=16)
    large = tiny_config(num_hidden_layers=3, num_experts=64, hidden_size=16)
    assert len(unique_weights(large, 0)) > 20 * len(unique_weights(small, 0))
    sent = [steady_request_bytes(config, layout) for config in (small, large)]
    assert sent[0] == sent[1]
    assert sent[0] < 1024 * layout.workers
