"""``vllm.LLM``, its engine core in the trainer's process or in one of its own: it never generates with weights that are
half new, never waits for them without end, and a pause stays whose it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import rankcast
from vllm_engine.conftest import Checkpoints, Reference
from vllm_engine.inprocess import digests, flags, probe, started_llm
from vllm_engine.models import weights_of
from vllm_engine.servers import PROMPTS, TP1, Layout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

Fresh = Callable[[str, str, Layout], Reference]
Weights = list[tuple[str, torch.Tensor]]


class Stream:
    """A trainer's iterator over B that leaves out its last tensors whenever it is ``short``, but for the dry pass."""

    def __init__(self) -> None:
        self._weights: Weights = list(weights_of("llama", "b").items())
        self._passes = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._passes += 1
        yield from self._weights if self._passes == 1 else self._weights[:-3]


@contextmanager
def half_pushed(llm: Any, pause: str | None) -> Iterator[rankcast.Sync]:
    """The connection of a push that failed after its first writes."""
    with rankcast.connect(llm, Stream(), mode="ranklocal", bucket_bytes=150_000, timeout=60, pause=pause) as sync:
        with pytest.raises(rankcast.RankcastError):
            sync.push(weight_version="half")
        (state,) = flags(llm)
        assert not state["servable"]
        yield sync


def refused(llm: Any, **sampling: Any) -> None:
    """Generating is refused, and nothing of it stays in any part of vLLM."""
    from vllm import SamplingParams

    before = llm.llm_engine.get_num_unfinished_requests()
    with pytest.raises(rankcast.StateError, match="push again"):
        llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS],
            SamplingParams(max_tokens=4, detokenize=False, **sampling),
            use_tqdm=False,
        )
    assert llm.llm_engine.get_num_unfinished_requests() == before


@pytest.mark.parametrize(("separate", "pause"), [(False, None), (False, "keep"), (True, "keep")])
def test_after_a_push_that_failed_half_way_nothing_is_generated_until_a_whole_one(
    separate: bool, pause: str | None, checkpoints: Checkpoints, fresh: Fresh
) -> None:
    at_b = fresh("llama", "b", TP1)
    with started_llm(checkpoints("llama", "a"), separate=separate) as llm:
        assert probe(llm) != at_b.said
        with half_pushed(llm, pause):
            refused(llm)
            refused(llm, n=2)
        refused(llm)
        with rankcast.connect(llm, checkpoints("llama", "b"), timeout=60, pause=pause) as sync:
            sync.push(weight_version="b")
        assert digests(llm) == at_b.digests
        assert probe(llm) == at_b.said
        assert llm.llm_engine.get_num_unfinished_requests() == 0
        assert not llm.llm_engine.is_sleeping()


def test_requests_in_line_are_kept_over_a_failed_push_and_answered_by_the_next_whole_one(
    checkpoints: Checkpoints, fresh: Fresh
) -> None:
    from vllm import RequestOutput, SamplingParams

    at_b = fresh("llama", "b", TP1)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    with started_llm(checkpoints("llama", "a")) as llm:
        llm.enqueue([{"prompt_token_ids": list(PROMPTS[1])}], sampling, use_tqdm=False)
        with half_pushed(llm, "keep"):
            with pytest.raises(rankcast.StateError, match="push again"):
                llm.wait_for_completion(RequestOutput, use_tqdm=False)
            refused(llm)
        with rankcast.connect(llm, checkpoints("llama", "b"), timeout=60) as sync:
            sync.push(weight_version="b")
        (answer,) = llm.wait_for_completion(RequestOutput, use_tqdm=False)
        assert tuple(answer.outputs[0].token_ids) == at_b.said[1][0]


def test_between_start_and_finish_nothing_is_generated(checkpoints: Checkpoints) -> None:
    with started_llm(checkpoints("llama", "a")) as llm:
        before = probe(llm)
        llm.sleep(level=0, mode="keep")
        llm.start_weight_update()
        with pytest.raises(rankcast.StateError, match="a weight update is open"):
            probe(llm)
        llm.finish_weight_update()
        llm.wake_up(tags=["scheduling"])
        assert probe(llm) == before


@pytest.mark.parametrize("separate", [False, True])
def test_an_engine_that_the_user_paused_stays_paused(separate: bool, checkpoints: Checkpoints, fresh: Fresh) -> None:
    at_b = fresh("llama", "b", TP1)
    with started_llm(checkpoints("llama", "a"), separate=separate) as llm:
        llm.sleep(level=0, mode="keep")
        with rankcast.connect(llm, checkpoints("llama", "b"), timeout=60) as sync:
            sync.push(weight_version="b")
            assert llm.llm_engine.is_sleeping()
            llm.wake_up(tags=["scheduling"])
            assert probe(llm) == at_b.said
            sync.push(weight_version="b again")
            assert not llm.llm_engine.is_sleeping()
        assert probe(llm) == at_b.said
