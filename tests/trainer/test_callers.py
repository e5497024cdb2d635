"""Threads for calls: as many as calls at once, used again, and gone when they are closed."""

from __future__ import annotations

import queue
import threading

from rankcast.trainer.callers import Callers


def test_calls_one_after_the_other_share_a_thread_and_are_named() -> None:
    callers, done = Callers(), queue.SimpleQueue[tuple[int, str]]()
    before = set(threading.enumerate())
    seen = set()
    for number in range(20):
        callers.start(f"call {number}", lambda: (threading.get_ident(), threading.current_thread().name), done.put)
        who, name = done.get(timeout=10)
        assert name == f"call {number}"
        seen.add(who)
    assert len(seen) == 1
    assert len(set(threading.enumerate()) - before) == 1
    callers.close()
    assert set(threading.enumerate()) - before == set()


def test_a_call_that_hangs_holds_up_no_other_and_ends_with_its_thread_after_closing() -> None:
    callers, done, hung = Callers(), queue.SimpleQueue[object](), threading.Event()
    before = set(threading.enumerate())
    callers.start("hangs", hung.wait, done.put)
    callers.start("goes on", lambda: "went on", done.put)
    assert done.get(timeout=10) == "went on"
    (thread,) = [one for one in threading.enumerate() if one.name == "hangs"]
    callers.close()
    assert set(threading.enumerate()) - before == {thread}
    hung.set()
    thread.join(10)
    assert done.get(timeout=10) is True
    assert not thread.is_alive()


def test_after_closing_calls_are_made_in_threads_that_do_not_stay() -> None:
    callers, done = Callers(), queue.SimpleQueue[threading.Thread]()
    callers.close()
    callers.start("late", threading.current_thread, done.put)
    thread = done.get(timeout=10)
    thread.join(10)
    assert not thread.is_alive()
