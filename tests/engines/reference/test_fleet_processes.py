"""Real workers: pauses and updates between forward passes, lost and silent workers, and what is left at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

import oracle
from checkpoints import write_checkpoint
from engines.reference.server_updates import bare_payload, transformers_log_probs
from fleets import environment, wait_gone
from rankcast.engines.reference.fleet import Fleet
from rankcast.engines.reference.request import Ask
from rankcast.errors import NotServableError, SourceError, StateError, UnsupportedError

PROMPT = (3, 99, 0, 41)
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def fleet(first):
    with Fleet(first.directory, tp=2) as fleet:
        yield fleet


@pytest.fixture
def at_first(fleet, first):
    """The fleet, unpaused and with the first checkpoint's weights, whatever the test before it did."""
    yield fleet
    fleet.call("abort")
    update(fleet, first, "first")
    fleet.resume()


def update(fleet, checkpoint, version):
    with bare_payload(checkpoint.weights) as payload:
        for call, argument in (("start", None), ("update", payload)):
            assert [report.faults for report in fleet.call(call, argument)] == [()] * fleet.layout.workers
        assert [report.faults for report in fleet.finish(version)] == [()] * fleet.layout.workers


def begun(fleet, max_tokens=100):
    """A request of which at least one forward pass is done."""
    request = fleet.request(Ask(token_ids=PROMPT, max_tokens=max_tokens))
    # The fleet's thread takes at most one pass between two commands, and one at least when a request is in flight.
    fleet.checksums()
    fleet.checksums()
    assert len(PROMPT) < len(request.sequence) < len(PROMPT) + max_tokens
    return request


def test_a_request_kept_across_an_update_goes_on_with_the_new_weights_and_each_token_says_which(
    at_first, first, second
):
    fleet = at_first
    update(fleet, first, "first")
    kept = begun(fleet, 12)
    fleet.pause("keep")
    at_pause = len(kept.sequence)
    late = fleet.request(Ask(token_ids=PROMPT, max_tokens=2))
    update(fleet, second, "second")
    assert len(kept.sequence) == at_pause, "a forward pass ran during the pause"
    assert not late.future.done()
    fleet.resume()
    result = kept.future.result(60)
    old = at_pause - len(PROMPT)
    assert result.weight_versions == ("first",) * old + ("second",) * (12 - old)
    assert late.future.result(60).weight_versions == ("second", "second")
    tokens = [*PROMPT, *result.token_ids]
    by_version = {
        "first": transformers_log_probs(first.directory, tokens),
        "second": transformers_log_probs(second.directory, tokens),
    }
    for step, (token, log_prob, version) in enumerate(
        zip(result.token_ids, result.log_probs, result.weight_versions, strict=True)
    ):
        row = by_version[version][len(PROMPT) - 1 + step]
        assert abs(row[token].item() - log_prob) < TOLERANCE
        assert row.max().item() - row[token].item() < TOLERANCE
    assert not torch.allclose(by_version["first"], by_version["second"], atol=0.1)


def test_pause_wait_returns_when_requests_in_flight_are_done_and_holds_new_ones(at_first):
    running = begun(at_first, 8)
    at_first.pause("wait")
    assert running.future.result(0).finish_reason == "length"
    assert at_first.paused
    late = at_first.request(Ask(token_ids=PROMPT, max_tokens=1))
    at_first.checksums()
    assert not late.future.done()
    at_first.resume()
    assert late.future.result(60).finish_reason == "length"


def test_pause_abort_ends_requests_in_flight_with_the_tokens_they_have(at_first):
    whole = at_first.generate(PROMPT, 100)
    running = begun(at_first)
    at_first.pause("abort")
    result = running.future.result(0)
    assert result.finish_reason == "abort"
    assert 1 <= len(result.token_ids) < 100
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]


def test_a_session_that_leaves_one_worker_out_is_refused_and_the_engine_serves_nothing_until_a_whole_one(
    at_first, second
):
    update(at_first, second, "second")
    for left_out in (0, 1):
        with bare_payload(second.weights) as payload:
            entries = [payload, payload]
            entries[left_out] = {"names": []}
            at_first.call("start")
            assert [report.faults for report in at_first.call("update", entries)] == [(), ()]
            with pytest.raises(StateError, match=rf"nothing for workers \[{left_out}\]"):
                at_first.finish("third")
        assert [worker.servable for worker in at_first.workers()] == [False, False]
        assert at_first.weight_version != "third"
        with pytest.raises(NotServableError, match="push all weights again"):
            at_first.generate(PROMPT, 1)
        # A session that brings nothing to anybody makes nothing whole.
        at_first.call("start")
        assert all("send them all" in report.faults[0].message for report in at_first.finish("fourth"))
        update(at_first, second, "whole")
        assert at_first.generate(PROMPT, 1).weight_versions == ("whole",)


def test_entries_may_be_empty_call_by_call_when_every_worker_gets_its_weights_in_the_session(at_first, second):
    with bare_payload(second.weights) as payload:
        at_first.call("start")
        at_first.call("update", [payload, {"names": []}])
        at_first.call("update", [{"names": []}, payload])
        assert [report.faults for report in at_first.finish("second")] == [(), ()]
    assert at_first.generate(PROMPT, 1).weight_versions == ("second",)


def test_resume_is_refused_while_a_session_is_open_and_harmless_when_repeated(at_first):
    at_first.pause("keep")
    at_first.call("start")
    with pytest.raises(StateError, match="finish or abort it before resuming"):
        at_first.resume()
    assert at_first.paused
    at_first.call("abort")
    at_first.resume()
    at_first.resume()
    assert not at_first.paused


def test_a_request_in_flight_fails_when_an_unpaused_engine_is_written_to(at_first, second):
    running = begun(at_first)
    with bare_payload(second.weights) as payload:
        at_first.call("start")
        at_first.call("update", payload)
        with pytest.raises(NotServableError, match="worker 0"):
            running.future.result(60)
        with pytest.raises(NotServableError, match="worker 1"):
            at_first.generate(PROMPT, 1)


def test_what_came_during_a_pause_is_refused_at_once_when_the_weights_were_lost(at_first, second):
    at_first.pause("keep")
    with bare_payload(second.weights) as payload:
        at_first.call("start")
        at_first.call("update", payload)
    held = at_first.request(Ask(token_ids=PROMPT, max_tokens=1))
    at_first.checksums()
    assert not held.future.done(), "an update in progress may still make the engine servable"
    at_first.call("abort")
    with pytest.raises(NotServableError, match="unusable"):
        at_first.request(Ask(token_ids=PROMPT, max_tokens=1)).future.result(60)


def test_a_finish_with_a_fault_on_a_worker_sets_no_version(at_first):
    at_first.update_weight_version("before")
    reports = at_first.finish("after")
    assert [report.faults[0].code for report in reports] == ["state", "state"]
    assert at_first.weight_version == "before"


@pytest.mark.slow
def test_eight_workers_over_every_kind_of_parallelism_hold_what_the_oracle_says_and_fit_in_3_gib(first):
    layout = {"tp": 2, "pp": 2, "dp": 2, "expert_parallel": True}
    with Fleet(first.directory, **layout) as fleet:
        for rank, held in enumerate(fleet.checksums()):
            digests = oracle.worker_digests(first.weights, first.config, oracle.Layout(**layout), rank)
            assert {name: parameter.sha256 for name, parameter in held.items()} == digests
        resident = 0
        for pid in fleet.pids():
            with open(f"/proc/{pid}/statm") as statm:
                resident += int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert resident < 3 * 2**30
        result = fleet.generate(PROMPT, 3, replica=1, prompt_log_probs=True)
    expected = transformers_log_probs(first.directory, [*PROMPT, *result.token_ids])
    given = torch.tensor([*result.prompt_log_probs, *result.log_probs])
    following = torch.tensor([*PROMPT[1:], *result.token_ids])
    assert torch.allclose(given, expected[: len(given)].gather(1, following[:, None])[:, 0], atol=TOLERANCE, rtol=0)


def test_a_worker_killed_in_a_forward_pass_fails_its_request_and_everything_later_by_name(first):
    with Fleet(first.directory, tp=2) as fleet:
        running = begun(fleet)
        victim, other = fleet.pids()[1], fleet.pids()[0]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(NotServableError, match=rf"worker 1 of 2 .*pid {victim}.*signal 9"):
            running.future.result(60)
        assert wait_gone([other]) == [], "a worker without its peers can serve nothing"
        for ask in (fleet.checksums, fleet.resume, lambda: fleet.call("start"), lambda: fleet.generate(PROMPT, 1)):
            with pytest.raises(NotServableError, match="worker 1 of 2"):
                ask()


def test_a_worker_killed_at_rest_is_noticed_and_a_held_request_fails(first):
    with Fleet(first.directory) as fleet:
        fleet.pause("keep")
        held = fleet.request(Ask(token_ids=PROMPT, max_tokens=1))
        os.kill(fleet.pids()[0], signal.SIGKILL)
        with pytest.raises(NotServableError, match="worker 0 of 1"):
            held.future.result(60)


def test_a_worker_that_does_not_answer_is_named_and_ended(first):
    with Fleet(first.directory, call_seconds=0.5) as fleet:
        pids = fleet.pids()
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(NotServableError, match=r"worker 0 of 1 .*did not answer within 0\.5 s"):
            fleet.call("start")
        assert wait_gone(pids) == []


def test_a_closed_fleet_leaves_no_worker_and_no_descriptor_and_refuses_what_is_asked(first):
    descriptors = len(os.listdir("/proc/self/fd"))
    fleet = Fleet(first.directory)
    fleet.start()
    pids = fleet.pids()
    fleet.pause("keep")
    held = fleet.request(Ask(token_ids=PROMPT, max_tokens=1))
    fleet.close()
    fleet.close()
    assert wait_gone(pids) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for ask in (lambda: held.future.result(60), lambda: fleet.call("start")):
        with pytest.raises(NotServableError, match="shutting down"):
            ask()


def test_a_checkpoint_without_a_workers_tensor_is_refused_by_name(first, tmp_path):
    lacking = {
        name: bits for name, bits in first.weights.items() if name != "model.layers.1.mlp.experts.3.up_proj.weight"
    }
    fleet = Fleet(write_checkpoint(tmp_path, first.config, lacking))
    with pytest.raises(SourceError, match=r"experts\.3\.up_proj"):
        fleet.start()
    assert wait_gone(fleet.pids()) == []


def test_a_layout_that_cannot_divide_the_model_is_refused_before_a_process_is_started(first):
    with pytest.raises(UnsupportedError, match="tp=3"):
        Fleet(first.directory, tp=3)


def test_the_end_tokens_of_a_checkpoint_end_a_request(at_first, first, tmp_path):
    update(at_first, first, "first")
    chosen = at_first.generate(PROMPT, 4).token_ids
    config = {**first.config, "eos_token_id": [chosen[0]]}
    with Fleet(write_checkpoint(tmp_path, config, first.weights)) as fleet:
        assert fleet.generate(PROMPT, 4).token_ids == chosen[:1]
        assert fleet.generate(PROMPT, 4, ignore_eos=True).token_ids == chosen


def test_a_worker_loads_no_server_and_no_transformers():
    foreign = {"starlette", "uvicorn", "transformers"}
    code = f"import sys, rankcast.engines.reference.worker; print(sorted(sys.modules.keys() & {foreign!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.stdout.strip() == "[]", done.stderr
