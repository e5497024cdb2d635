"""Requests take turns; each way to pause does what it says to those in flight and to those that come later."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rankcast.engines.reference import turns
from rankcast.engines.reference.request import Ask, Request
from rankcast.engines.reference.turns import RequestQueue
from rankcast.errors import NotServableError, PayloadError, StateError


def request(max_tokens=3):
    return Request(Ask(token_ids=(1, 2), max_tokens=max_tokens))


def step(queue, version="v"):
    """One forward pass, as the fleet's thread does it; who had it."""
    turn = queue.next()
    if turn is not None and (reason := turn.took(9, -0.5, (), version)) is not None:
        queue.remove(turn)
        turn.end(reason)
    return turn


def test_requests_take_turns_and_end_at_their_length():
    queue, a, b = RequestQueue(), request(1), request(2)
    queue.add(a)
    queue.add(b)
    assert [step(queue) for _ in range(4)] == [a, b, b, None]
    assert a.future.result(0).token_ids == (9,)
    assert b.future.result(0).token_ids == (9, 9)
    assert b.future.result(0).finish_reason == "length"


def test_a_stop_token_ends_a_request_with_the_token():
    stopped = Request(Ask(token_ids=(1,), max_tokens=5, stop_token_ids=(9,)))
    queue = RequestQueue()
    queue.add(stopped)
    step(queue)
    assert (stopped.future.result(0).token_ids, stopped.future.result(0).finish_reason) == ((9,), "stop")


@pytest.mark.parametrize(("ignore", "reason"), [(False, "stop"), (True, "length")])
def test_the_checkpoints_end_token_counts_unless_it_is_ignored(ignore, reason):
    ended = Request(Ask(token_ids=(1,), max_tokens=2, ignore_eos=ignore), frozenset({9}))
    queue = RequestQueue()
    queue.add(ended)
    step(queue)
    step(queue)
    assert ended.future.result(0).finish_reason == reason


def test_keep_freezes_those_in_flight_and_holds_new_ones_until_resume():
    queue, old, new, paused = RequestQueue(), request(2), request(1), Future()
    queue.add(old)
    step(queue, "a")
    queue.pause("keep", paused)
    assert paused.done()
    queue.add(new)
    assert queue.next() is None
    queue.resume()
    assert {step(queue, "b"), step(queue, "b")} == {old, new}
    assert old.future.result(0).weight_versions == ("a", "b")


def test_wait_is_done_when_those_in_flight_are_and_new_ones_wait():
    queue, old, new, paused = RequestQueue(), request(2), request(1), Future()
    queue.add(old)
    queue.pause("wait", paused)
    queue.add(new)
    assert not paused.done()
    assert step(queue) is old
    assert not paused.done()
    assert step(queue) is old
    assert paused.done()
    assert queue.next() is None
    queue.resume()
    assert step(queue) is new


def test_abort_ends_those_in_flight_with_what_they_have_and_holds_new_ones():
    queue, old, new, paused = RequestQueue(), request(3), request(1), Future()
    queue.add(old)
    step(queue)
    queue.pause("abort", paused)
    assert paused.done()
    assert (old.future.result(0).token_ids, old.future.result(0).finish_reason) == ((9,), "abort")
    queue.add(new)
    assert queue.next() is None
    assert not new.future.done()


def test_resuming_twice_or_unpaused_is_harmless_and_resuming_a_drain_ends_its_wait():
    queue, old, paused = RequestQueue(), request(2), Future()
    queue.resume()
    queue.add(old)
    queue.pause("wait", paused)
    queue.resume()
    queue.resume()
    with pytest.raises(StateError, match="resumed before"):
        paused.result(0)
    assert not queue.paused
    assert step(queue) is old


def test_a_pause_in_another_mode_takes_hold_of_those_still_in_flight():
    queue, old, kept, aborted = RequestQueue(), request(3), Future(), Future()
    queue.add(old)
    queue.pause("keep", kept)
    queue.pause("abort", aborted)
    assert old.future.result(0).finish_reason == "abort"
    assert aborted.done()


def test_an_unknown_mode_is_refused_and_pauses_nothing():
    queue = RequestQueue()
    with pytest.raises(PayloadError, match="'drop'"):
        queue.pause("drop", Future())
    assert not queue.paused


def test_an_abandoned_request_gets_no_more_passes_and_ends_a_wait():
    queue, gone, paused = RequestQueue(), request(3), Future()
    queue.add(gone)
    queue.pause("wait", paused)
    gone.abandoned = True
    assert queue.next() is None
    assert paused.done()
    assert len(queue) == 0


def test_requests_beyond_the_limit_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(turns, "REQUEST_LIMIT", 1)
    queue, taken, refused = RequestQueue(), request(), request()
    queue.add(taken)
    queue.add(refused)
    with pytest.raises(NotServableError, match="1 requests"):
        refused.future.result(0)
    assert queue.next() is taken


def test_a_request_held_too_long_is_refused_and_one_that_runs_is_not():
    now = [0.0]
    queue, running, held = RequestQueue(clock=lambda: now[0]), request(), request()
    running.arrived = held.arrived = 0.0
    queue.add(running)
    now[0] = turns.HOLD_SECONDS + 1
    queue.expire()
    assert not running.future.done()
    queue.pause("keep", Future())
    queue.add(held)
    queue.expire()
    for late in (running, held):
        with pytest.raises(NotServableError, match="paused for more than"):
            late.future.result(0)
