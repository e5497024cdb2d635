"""What the engine may do follows from every worker's last report, and uneven sessions never look whole."""

from __future__ import annotations

import pytest

from rankcast.engines.reference.standing import Standing
from rankcast.errors import NotServableError, StateError
from rankcast.topology import Worker
from rankcast.wire.reports import Fault, Report

FAULT = (Fault("manifest", "wrong"),)


def reports(*rows, wrote=False):
    """One report a worker from (state, servable, faults); ``wrote`` is of them all."""
    return [
        Report(
            call="x",
            worker=Worker(engine="e", rank=rank, workers=len(rows)),
            state=state,
            servable=servable,
            generation=0,
            faults=faults,
            wrote=wrote,
        )
        for rank, (state, servable, faults) in enumerate(rows)
    ]


def both(state, servable=True, faults=(), wrote=False):
    return reports((state, servable, faults), (state, servable, faults), wrote=wrote)


def test_a_whole_session_makes_the_engine_unservable_and_servable_again():
    standing = Standing(2)
    standing.note("start", both("started"))
    standing.check_servable()
    with pytest.raises(StateError, match=r"workers \[0, 1\]"):
        standing.check_resumable()
    standing.note("update", both("installing", False))
    with pytest.raises(NotServableError, match="worker 0"):
        standing.check_servable()
    standing.check_call("finish")
    standing.note("finish", both("idle"))
    standing.check_servable()
    standing.check_resumable()


def test_the_version_is_empty_from_a_session_that_wrote_until_it_is_given():
    standing = Standing(2)
    standing.note("start", both("started"))
    standing.note("finish", both("idle"))
    assert standing.weight_version == "default"
    standing.note("start", both("started"))
    standing.note("update", both("installing", False))
    assert standing.weight_version == "default"
    standing.note("finish", both("idle"))
    assert standing.weight_version == ""


@pytest.mark.parametrize("call", ["start", "update"])
def test_a_session_in_which_workers_went_different_ways_can_only_be_aborted(call):
    standing = Standing(2)
    standing.note("start", both("started"))
    standing.note(call, reports(("installing", False, ()), ("started", True, FAULT)))
    standing.note("update", both("installing", False))
    with pytest.raises(StateError, match=rf"{call} failed on workers \[1\]"):
        standing.check_call("finish")
    standing.note("abort", reports(("unusable", False, ()), ("idle", True, ())))
    standing.check_call("finish")
    standing.note("start", both("started", False))
    standing.check_call("finish")


def test_an_update_that_every_worker_refused_leaves_the_session_as_it_was():
    standing = Standing(2)
    standing.note("start", both("started"))
    standing.note("update", both("started", True, FAULT))
    standing.check_call("finish")


def test_a_finish_on_some_workers_makes_a_mixed_engine_until_all_finish_an_update():
    standing = Standing(2)
    standing.note("start", both("started"))
    standing.note("update", both("installing", False))
    standing.note("finish", reports(("idle", True, ()), ("idle", True, FAULT)))
    with pytest.raises(NotServableError, match=r"finish failed on workers \[1\]"):
        standing.check_servable()
    standing.note("start", both("started"))
    standing.note("update", both("started"))  # with empty entries
    standing.note("finish", both("idle"))
    with pytest.raises(NotServableError, match="different weights"):
        standing.check_servable()
    standing.note("start", both("started"))
    standing.note("update", both("installing", False))
    standing.note("init", both("installing", False))
    standing.note("finish", both("idle", wrote=True))
    standing.check_servable()


def test_a_version_is_not_set_during_a_session_nor_on_incomplete_weights():
    standing = Standing(2)
    standing.check_publishable()
    standing.note("start", both("started"))
    with pytest.raises(StateError, match="while an update session is open"):
        standing.check_publishable()
    standing.note("abort", reports(("idle", True, ()), ("unusable", False, ())))
    with pytest.raises(NotServableError, match="worker 1"):
        standing.check_publishable()
