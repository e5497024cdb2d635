"""Each row of the table of refusals in docs/rank-local-updates.md, provoked on a fleet of two workers.

It knows one way to provoke each row. Which error must come, it takes from the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

import rankcast
from by_hand import ByHand
from checkpoints import as_torch, scaled_weights, tiny_config
from docs.markdown_pages import ROOT, table, unquoted
from fleets_inprocess import Fleet, closed, opened
from rankcast.engines.reference.layout import Layout
from rankcast.wire.payload import own_payload
from rankcast.wire.reports import Report

ROWS = {row["refused"]: row for row in table(ROOT / "docs" / "rank-local-updates.md", "refused", "error").rows}
CONFIG = tiny_config()
SERVED, SENT = (scaled_weights(CONFIG, seed=seed) for seed in (4, 5))
SECRET = "only for tests"


class Stage:
    """Two workers that serve weights, and a trainer's session made by hand that has others."""

    def __init__(self, fleet: Fleet, secret: str | None) -> None:
        self.fleet = fleet
        self.hand = self.another(secret)

    def another(self, secret: str | None = None) -> ByHand:
        """One more trainer."""
        return ByHand(self.fleet.receivers, as_torch(SENT, CONFIG["dtype"]), secret=secret)

    def bare(self, *payloads: Any) -> Sequence[Report]:
        """Another client's session, with these payloads; the last one's reports."""
        reports = self.hand.start()
        for payload in payloads:
            assert not any(report.faults for report in reports)
            reports = self.hand.deliver(payload)
        return reports

    def whole(self, **changes: Any) -> dict[str, Any]:
        return self.hand.bare(**changes)

    def last(self, column: str, value: Any) -> dict[str, Any]:
        """A bare entry in which the last tensor has another value in one column."""
        entry = self.hand.bare()
        return {**entry, column: [*entry[column][:-1], value]}

    def prepared(self, **changes: Any) -> Sequence[Report]:
        self.hand.open()
        return self.hand.prepare(**changes)


def another_ranks_entry(stage: Stage) -> Sequence[Report]:
    stage.hand.open()
    entries = {r.worker.rank: stage.hand.codec.seal(stage.hand.prepare_body(r)) for r in stage.hand.receivers}
    return stage.hand.deliver(own_payload({0: entries[1], 1: entries[0]}))


def no_entry(stage: Stage) -> Sequence[Report]:
    stage.hand.open()
    return stage.hand.deliver(own_payload({7: stage.hand.codec.seal(stage.hand.prepare_body(stage.hand.receivers[0]))}))


def unknown_field(stage: Stage) -> Sequence[Report]:
    stage.hand.open()
    entries = {
        r.worker.rank: closed({**opened(stage.hand.codec.seal(stage.hand.prepare_body(r))), "colour": "red"})
        for r in stage.hand.receivers
    }
    return stage.hand.deliver(own_payload(entries))


def one_tensor_twice(stage: Stage) -> Sequence[Report]:
    name = stage.hand.manifest.names[0]
    entry = stage.hand.bare([name])
    return stage.bare({key: value * 2 if key != "segments" else value for key, value in entry.items()})


def one_tensor_short(stage: Stage) -> Sequence[Report]:
    schedule = stage.hand.schedule()
    columns = {field: getattr(schedule, field)[:-1] for field in schedule.__struct_fields__}
    return stage.prepared(schedule=msgspec.structs.replace(schedule, **columns))


def gone(stage: Stage) -> Sequence[Report]:
    entry = stage.hand.bare()
    stage.hand.segment.close()
    return stage.bare(entry)


def skipped(stage: Stage) -> Sequence[Report]:
    assert not any(report.faults for report in stage.prepared())
    return stage.hand.install(2)


def started_twice(stage: Stage) -> Sequence[Report]:
    stage.hand.start()
    return stage.hand.start()


def bare_in_a_session_of_ours(stage: Stage) -> Sequence[Report]:
    stage.hand.open()
    return stage.hand.deliver(stage.hand.bare())


def second_trainer(stage: Stage) -> Sequence[Report]:
    stage.hand.open()
    with stage.another() as other:
        return other.claim()


def bare_with_a_secret(stage: Stage) -> Sequence[Report]:
    stage.hand.open()
    return stage.hand.deliver(stage.hand.bare())


def wrong_mac(stage: Stage) -> Sequence[Report]:
    stage.hand.open()
    entries = {}
    for receiver in stage.hand.receivers:
        entry = stage.hand.codec.seal(stage.hand.prepare_body(receiver))
        entries[receiver.worker.rank] = (
            {"body": entry["body"], "mac": "0" * 64} if receiver.worker.rank else {"body": entry["body"]}
        )
    return stage.hand.deliver(own_payload(entries))


PROVOKED: dict[str, Callable[[Stage], Sequence[Report]]] = {
    "a list of the wrong length": lambda stage: stage.bare([stage.whole()]),
    "a payload that is neither a dict nor a list of dicts": lambda stage: stage.bare("weights"),
    "an entry for another worker or engine": another_ranks_entry,
    "a payload without an entry for the worker": no_entry,
    "a field, kind or protocol number that is not known": unknown_field,
    "a bare entry with uneven columns": lambda stage: stage.bare(stage.whole(shapes=[])),
    "a list for a transport that cannot route": lambda stage: stage.bare([stage.whole(transport="collective")] * 2),
    "an unknown name": lambda stage: stage.bare(stage.last("names", "model.nothing.weight")),
    "a wrong shape": lambda stage: stage.bare(stage.last("shapes", [1, 1])),
    "a wrong dtype": lambda stage: stage.bare(stage.last("dtype_names", "float16")),
    "a tensor given twice in one session": one_tensor_twice,
    "a missing tensor, in prepare": one_tensor_short,
    "a location outside its segment": lambda stage: stage.bare(stage.last("locations", [0, 2**40])),
    "a segment that is gone": gone,
    "a skipped sequence number": skipped,
    "update before start": lambda stage: stage.hand.deliver(stage.whole()),
    "start twice": started_twice,
    "finish without start": lambda stage: stage.hand.finish(),
    "a bare entry while a session of rankcast's own is open": bare_in_a_session_of_ours,
    "a claim while another trainer holds the fleet": second_trainer,
    "a bare entry while a secret is set": bare_with_a_secret,
    "a wrong or missing MAC while a secret is set": wrong_mac,
}


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[str | None, Fleet]]:
    made: dict[str | None, Fleet] = {secret: Fleet(CONFIG, Layout(tp=2), secret=secret) for secret in (None, SECRET)}
    for fleet in made.values():
        fleet.load(SERVED)
    yield made
    for fleet in made.values():
        fleet.close()


def test_every_row_is_provoked() -> None:
    assert list(ROWS) == list(PROVOKED)


@pytest.mark.parametrize("refused", PROVOKED)
def test_every_worker_refuses_as_the_page_says_and_keeps_its_weights(
    refused: str, fleets: dict[str | None, Fleet]
) -> None:
    secret = SECRET if "secret" in refused else None
    fleet = fleets[secret]
    stage = Stage(fleet, secret)
    try:
        reports = PROVOKED[refused](stage)
        expected = getattr(rankcast, unquoted(ROWS[refused]["error"]))
        assert [[fault.code for fault in report.faults] for report in reports] == [[expected.code]] * 2
        assert fleet.differences(SERVED) == []
        assert fleet.servable == [True, True]
    finally:
        # The fleet is free again for whoever comes next.
        stage.hand.send(stage.hand.abort_body)
        stage.hand.release()
        for receiver in fleet.receivers:
            receiver.handle("abort")
        stage.hand.segment.close()
    assert {receiver.state for receiver in fleet.receivers} == {"idle"}
