"""What is refused of a payload: by name, before a byte is written on any worker, with the old weights serving.

Each fault is put into a real push, on its way to the workers; afterwards the same sync pushes again, and must succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rankcast
from checkpoints import as_torch, tiny_config
from fleets_inprocess import Fleet, Trained, WatchedClient, closed, opened
from oracle import unique_weights
from rankcast import PushError
from rankcast.engines.reference.layout import Layout
from rankcast.transports.shm import create_segment
from rankcast.wire.codec import Codec
from rankcast.wire.handles import ShmHandle

CONFIG = tiny_config(num_hidden_layers=2, hidden_size=16, num_experts=4)
LAYOUT = Layout(tp=2, dp=2, expert_parallel=True)
FIRST, SECOND, THIRD = (unique_weights(CONFIG, step) for step in (1, 2, 3))
SECRET = "a secret of the test"
# The worker whose entry is spoiled: not the first, so that others get theirs before it.
VICTIM = "2"

Change = Callable[[dict[str, Any]], None]


class Pushed:
    """A fleet that serves the first weights by a push, and a client that can spoil what comes next."""

    def __init__(self, mode: str = "ranklocal", secret: str | None = None) -> None:
        self.secret = secret
        self.fleet = Fleet(CONFIG, LAYOUT, secret=secret)
        self.client = WatchedClient(self.fleet.receivers)
        self.trained = Trained(FIRST, "float32")
        self.sync = rankcast.connect(self.client, self.trained, mode=mode, bucket_bytes=8192, secret=secret, timeout=20)
        self.sync.push("first")

    def serve_first(self) -> None:
        self.client.change = None
        self.client.before.clear()
        self.trained.become(FIRST)
        self.sync.push("first")

    def forget_schedules(self) -> None:
        """Workers that hold no schedule are sent theirs whole."""
        for receiver in self.fleet.receivers:
            assert receiver._connections.current is not None
            receiver._connections.current._forget()

    def close(self) -> None:
        self.sync.close()
        self.fleet.close()

    def spoil(self, kind: str, change: Callable[[Any], Any]) -> None:
        """Put ``change(payload)`` in place of the next payload of ``kind``."""
        pending = [change]

        def once(call: str, payload: Any) -> Any:
            return pending.pop()(payload) if call == kind and pending else payload

        self.client.change = once

    def refused(self) -> PushError:
        """Push the second weights, which must be refused with nothing written, and the third, which must succeed."""
        before = self.fleet.bits()
        self.trained.become(SECOND)
        with pytest.raises(PushError) as refusal:
            self.sync.push("second")
        assert self.fleet.changed(before) == []
        assert self.fleet.differences(FIRST) == []
        assert self.fleet.servable == [True] * 4
        assert self.fleet.versions == {"first"}
        assert {receiver.state for receiver in self.fleet.receivers} == {"idle"}
        assert not self.client.paused
        assert self.client.weight_version == "first"
        self.client.change = None
        self.trained.become(THIRD)
        self.sync.push("third")
        assert self.fleet.differences(THIRD) == []
        assert self.fleet.versions == {"third"}
        return refusal.value


@pytest.fixture(scope="module")
def unsigned_fleet() -> Iterator[Pushed]:
    made = Pushed()
    yield made
    made.close()


@pytest.fixture(scope="module")
def signed_fleet() -> Iterator[Pushed]:
    made = Pushed(secret=SECRET)
    yield made
    made.close()


# One sync for all faults, one after another: none of them may leave anything behind.


@pytest.fixture
def pushed(unsigned_fleet: Pushed) -> Pushed:
    unsigned_fleet.serve_first()
    return unsigned_fleet


@pytest.fixture
def signed(signed_fleet: Pushed) -> Pushed:
    signed_fleet.serve_first()
    return signed_fleet


def in_entry(change: Change, *, rank: str = VICTIM) -> Callable[[Any], Any]:
    """Change the body of one worker's entry."""

    def spoil(payload: dict[str, Any]) -> dict[str, Any]:
        body = opened(payload["entries"][rank])
        change(body)
        return {**payload, "entries": {**payload["entries"], rank: closed(body)}}

    return spoil


def column(name: str, value: Callable[[Any], Any]) -> Change:
    """Change the last value of a column of the schedule."""

    def change(body: dict[str, Any]) -> None:
        body["schedule"][name][-1] = value(body["schedule"][name][-1])

    return change


def field(name: str, value: Any) -> Change:
    def change(body: dict[str, Any]) -> None:
        body[name] = value

    return change


def without_last(body: dict[str, Any]) -> None:
    for values in body["schedule"].values():
        values.pop()


def uneven(body: dict[str, Any]) -> None:
    body["schedule"]["offsets"].pop()


def twice(body: dict[str, Any]) -> None:
    body["schedule"]["names"][-1] = body["schedule"]["names"][0]


def no_handles(body: dict[str, Any]) -> None:
    body["handles"] = []


def handle(**changes: Any) -> Change:
    def change(body: dict[str, Any]) -> None:
        body["handles"][0].update(changes)

    return change


def closed_segment(body: dict[str, Any]) -> None:
    with create_segment(body["handles"][0]["size"]) as gone:
        assert isinstance(gone.handle, ShmHandle)
        body["handles"][0].update(descriptor=gone.handle.descriptor, inode=gone.handle.inode)


PREPARES: dict[str, tuple[Change, str, str]] = {
    "an unknown name": (column("names", lambda _: "model.no.such.weight"), "manifest", "unknown tensor model.no.such"),
    "a wrong shape": (column("shapes", lambda shape: [*shape, 1]), "manifest", "is announced, but it was"),
    "a wrong dtype": (column("dtypes", lambda _: "int32"), "manifest", "is announced, but it was"),
    "an unknown dtype": (column("dtypes", lambda _: "float12"), "manifest", "unknown dtype 'float12'"),
    "a name twice": (twice, "manifest", "given twice"),
    "a tensor left out": (without_last, "manifest", "missing tensors: "),
    "columns of unequal length": (uneven, "payload", "offsets"),
    "a location behind the end of its segment": (column("offsets", lambda at: at + 2**30), "location", "lie at bytes"),
    "a location before its segment": (column("offsets", lambda at: -4), "location", "offset -4"),
    "a location between elements": (column("offsets", lambda at: at + 1), "location", "no multiple of the 4 bytes"),
    "a segment that nobody sent": (column("segments", lambda _: 99), "location", "lies in segment 99"),
    "a segment before the first": (column("segments", lambda _: -1), "location", "lies in segment -1"),
    "no segments": (no_handles, "location", "0 handles came"),
    "a segment that is closed": (closed_segment, "location", "segment"),
    "a segment of another size": (handle(size=2**20), "location", "its handle says"),
    "a segment of another inode": (handle(inode=1), "location", "its handle says 1"),
    "a handle of another format": (handle(format=99), "location", "format 99"),
    "a round that does not come": (column("rounds", lambda _: 10**6), "payload", "is to come with install 1000000"),
    "an unknown kind": (field("kind", "destroy"), "payload", "malformed"),
    "another protocol": (field("protocol", 99), "payload", "speaks protocol 99"),
    "a field that is not known": (field("extra", 1), "payload", "malformed"),
    "another session": (field("session", "f" * 32), "state", "an entry of session ffffffff came"),
    "another connection": (field("connection", "f" * 32), "state", "does not know connection"),
    "a skipped sequence number": (field("sequence", 1), "state", "prepare with sequence number 1"),
    "another engine": (field("engine", "f" * 32), "payload", "engine ffffffff"),
    "another number of workers": (field("workers", 5), "payload", "of 5 of engine"),
    "another worker": (field("rank", 3), "payload", "an entry for worker 3"),
    "a transport that cannot route": (field("transport", "collective"), "unsupported", "'collective'"),
    "an unknown transport": (field("transport", "pigeon"), "unsupported", "unknown transport 'pigeon'"),
}


@pytest.mark.parametrize("fault", PREPARES)
def test_a_prepare_is_refused_by_name_and_writes_nothing_anywhere(fault: str, pushed: Pushed) -> None:
    change, code, words = PREPARES[fault]
    pushed.forget_schedules()
    pushed.spoil("prepare", in_entry(change))
    refusal = pushed.refused()
    assert code in refusal.codes
    assert words in str(refusal)
    assert f"worker {VICTIM} of 4" in str(refusal)
    assert "every worker still serves the weights it had before" in str(refusal)


def sealed_list(payload: dict[str, Any]) -> list[Any]:
    return [payload["entries"][str(rank)] for rank in range(4)]


def test_a_list_of_our_own_entries_is_taken_as_well(pushed: Pushed) -> None:
    pushed.client.change = lambda call, payload: sealed_list(payload) if call in ("prepare", "install") else payload
    pushed.trained.become(SECOND)
    pushed.sync.push("second")
    assert pushed.fleet.differences(SECOND) == []


@pytest.mark.parametrize("length", [0, 1, 3, 5, 8])
def test_a_list_of_the_wrong_length_is_refused_by_every_worker(length: int, pushed: Pushed) -> None:
    pushed.spoil("prepare", lambda payload: (sealed_list(payload) * 2)[:length])
    refusal = pushed.refused()
    assert refusal.codes == ("payload",)
    assert len(refusal.faults) == 4
    assert f"has {length} entries but this engine has 4 workers" in str(refusal)


def test_a_list_in_another_order_is_refused(pushed: Pushed) -> None:
    pushed.spoil("prepare", lambda payload: sealed_list(payload)[::-1])
    refusal = pushed.refused()
    assert refusal.codes == ("payload",)
    assert "an entry for worker 3 of 4" in str(refusal)


def test_a_worker_without_an_entry_is_named(pushed: Pushed) -> None:
    pushed.spoil(
        "prepare", lambda payload: {**payload, "entries": {k: v for k, v in payload["entries"].items() if k != VICTIM}}
    )
    refusal = pushed.refused()
    assert refusal.codes == ("payload",)
    assert "no entry for worker 2 of 4" in str(refusal)


@pytest.mark.parametrize("payload", [None, "text", 7, {"rankcast": 1}, {"rankcast": 2, "entries": {}}, [1, 2, 3, 4]])
def test_a_payload_of_another_form_is_refused(payload: Any, pushed: Pushed) -> None:
    pushed.spoil("prepare", lambda _: payload)
    assert pushed.refused().codes == ("payload",)


def test_a_first_install_that_skips_a_number_is_refused_everywhere(pushed: Pushed) -> None:
    def skip(payload: dict[str, Any]) -> dict[str, Any]:
        for rank in payload["entries"]:
            payload = in_entry(field("sequence", 2), rank=rank)(payload)
        return payload

    pushed.spoil("install", skip)
    refusal = pushed.refused()
    assert "state" in refusal.codes
    assert "install with sequence number 2 came, expected 1" in str(refusal)


def test_an_install_before_prepare_is_refused_everywhere(pushed: Pushed) -> None:
    def jump(payload: dict[str, Any]) -> dict[str, Any]:
        for rank in payload["entries"]:

            def change(body: dict[str, Any]) -> None:
                kept = {key: body[key] for key in ("protocol", "session", "engine", "rank", "workers")}
                body.clear()
                body.update(kept, kind="install", sequence=1, weight_version="second", round=0)

            payload = in_entry(change, rank=rank)(payload)
        return payload

    pushed.spoil("prepare", jump)
    assert "prepare first" in str(pushed.refused())


def test_a_second_start_is_refused(pushed: Pushed) -> None:
    def start_first() -> None:
        pushed.client.before.clear()
        for receiver in pushed.fleet.receivers:
            receiver.start_weight_update()

    pushed.client.before["start"] = start_first
    refusal = pushed.refused()
    assert refusal.codes == ("state",)
    assert "a session is started already" in str(refusal)


def test_a_finish_before_the_last_install_is_refused(pushed: Pushed) -> None:
    def finish_first() -> None:
        pushed.client.before.clear()
        reports = [receiver.handle("finish") for receiver in pushed.fleet.receivers]
        assert all("the session is prepared after 0 of" in report.faults[0].message for report in reports)

    pushed.client.before["install"] = finish_first
    pushed.trained.become(SECOND)
    pushed.sync.push("second")
    assert pushed.fleet.differences(SECOND) == []


def test_a_repeated_install_is_acknowledged_and_not_applied_twice(pushed: Pushed) -> None:
    repeats: list[bool] = []

    def again(call: str, payload: Any) -> Any:
        if call in ("prepare", "install"):
            for receiver in pushed.fleet.receivers:
                first = receiver.handle("update", payload)
                assert not first.faults
                writes = receiver._writing._installer
                receiver._writing._installer = None  # type: ignore[assignment]  # whatever writes now, fails
                second = receiver.handle("update", payload)
                receiver._writing._installer = writes
                assert second.faults == ()
                assert (second.tensors, second.nbytes) == (first.tensors, first.nbytes)
                repeats.append(second.repeated)
        return payload

    pushed.client.change = again
    pushed.trained.become(SECOND)
    report = pushed.sync.push("second")
    assert repeats
    assert all(repeats)
    assert pushed.fleet.differences(SECOND) == []
    # The report counts what was read, whichever answer came last.
    pushed.client.change = None
    plain = pushed.sync.push("second")
    assert [row.calls for row in report.workers] == [row.calls for row in plain.workers]
    assert sum(row.calls for row in report.workers) == report.worker_calls > 0


def wrong_mac(entry: dict[str, str]) -> dict[str, str]:
    return {**entry, "mac": "0" * 64}


def no_mac(entry: dict[str, str]) -> dict[str, str]:
    return {"body": entry["body"]}


def other_secret(entry: dict[str, str]) -> dict[str, str]:
    return {"body": entry["body"], "mac": Codec(b"another")._mac(entry["body"])}


def changed_body(entry: dict[str, str]) -> dict[str, str]:
    return {**entry, "body": entry["body"].replace('"second"', '"other"')}


@pytest.mark.parametrize("kind", ["prepare", "install"])
@pytest.mark.parametrize("forge", [wrong_mac, no_mac, other_secret, changed_body])
def test_an_entry_that_is_not_signed_with_the_secret_is_refused(forge: Any, kind: str, signed: Pushed) -> None:
    signed.spoil(
        kind, lambda payload: {**payload, "entries": {rank: forge(e) for rank, e in payload["entries"].items()}}
    )
    refusal = signed.refused()
    assert refusal.codes == ("authentication",)
    assert "MAC" in str(refusal)


def test_a_bare_entry_is_refused_while_a_secret_is_set(signed: Pushed) -> None:
    signed.spoil("prepare", lambda _: {"names": []})
    refusal = signed.refused()
    assert refusal.codes == ("authentication",)
    assert "a bare entry came, and this worker has a secret" in str(refusal)


def test_a_bare_entry_in_the_middle_of_our_session_is_refused(pushed: Pushed) -> None:
    pushed.spoil("prepare", lambda _: {"names": []})
    refusal = pushed.refused()
    assert refusal.codes == ("state",)
    assert "a bare entry came, but a rankcast session is open" in str(refusal)


def test_a_session_between_two_others_leaves_nothing_behind(pushed: Pushed) -> None:
    """Refused, refused in another way, then accepted: a retry after a failure is exactly a first try."""
    pushed.spoil("prepare", in_entry(field("workers", 5)))
    pushed.refused()
    pushed.spoil("install", lambda payload: {**payload, "entries": {}})
    pushed.trained.become(SECOND)
    with pytest.raises(PushError):
        pushed.sync.push("second")
    assert pushed.fleet.differences(THIRD) == []
    pushed.client.change = None
    pushed.sync.push("second")
    assert pushed.fleet.differences(SECOND) == []


def test_broadcast_refuses_as_ranklocal_does() -> None:
    made = Pushed(mode="broadcast")
    try:
        made.forget_schedules()
        made.spoil("prepare", in_entry(column("names", lambda _: "nobody"), rank="*"))
        refusal = made.refused()
        assert refusal.codes == ("manifest",)
        assert len(refusal.faults) == 4
    finally:
        made.close()


def test_a_list_for_a_transport_that_cannot_route_is_refused_at_the_trainer() -> None:
    with Fleet(CONFIG) as fleet:
        with pytest.raises(rankcast.UnsupportedError, match=r"collective.*mode='broadcast'"):
            rankcast.connect(
                fleet.receivers, lambda: iter(as_torch(FIRST).items()), mode="ranklocal", transport="collective"
            )
