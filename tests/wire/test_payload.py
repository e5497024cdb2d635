"""The forms of a payload: rankcast's own dict, lists and bare entries, and what is refused of each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcast.errors import LocationError, ManifestError, PayloadError, RankcastError, UnsupportedError
from rankcast.topology import Worker
from rankcast.wire.bodies import PROTOCOL, Abort, Install
from rankcast.wire.handles import FORMAT, check_format
from rankcast.wire.payload import (
    EVERYONE,
    ROUTES,
    bare_entry,
    check_addressee,
    check_transport,
    is_bare,
    is_own,
    is_routed,
    narrow,
    own_payload,
    pick,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
COUNTS = st.integers(1, 24)


def worker(rank: int, workers: int, engine: str = "e" * 32) -> Worker:
    return Worker(engine=engine, rank=rank, workers=workers)


@given(count=COUNTS, entries=st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=24, max_size=24))
def test_each_worker_picks_its_own_entry_before_and_after_json_and_narrowing(
    count: int, entries: list[dict[str, Any]]
) -> None:
    payload = own_payload({rank: entries[rank] for rank in range(count)})
    assert is_own(payload)
    again = msgspec.json.decode(msgspec.json.encode(payload))
    assert again == payload
    for rank in range(count):
        who = worker(rank, count)
        assert pick(payload, who) == pick(again, who) == entries[rank]
        narrowed = narrow(again, rank)
        assert pick(narrowed, who) == entries[rank]
        assert set(narrowed["entries"]) == {str(rank)}  # type: ignore[index]


@given(count=st.integers(2, 24), data=st.data())
def test_what_was_narrowed_for_one_worker_is_refused_by_every_other(count: int, data: st.DataObject) -> None:
    kept, other = data.draw(st.permutations(range(count)))[:2]
    narrowed = narrow(own_payload({rank: {"body": str(rank)} for rank in range(count)}), kept)
    with pytest.raises(PayloadError, match=f"no entry for worker {other} of {count}"):
        pick(narrowed, worker(other, count))


@given(count=COUNTS)
def test_the_entry_for_everyone_reaches_everyone_and_is_kept_by_narrowing(count: int) -> None:
    payload = own_payload({None: {"body": "for all"}})
    assert payload["entries"].keys() == {EVERYONE}
    for rank in range(count):
        assert pick(narrow(payload, rank), worker(rank, count)) == {"body": "for all"}


def test_a_workers_own_entry_goes_before_the_one_for_everyone() -> None:
    payload = own_payload({None: {"body": "for all"}, 1: {"body": "for 1"}})
    assert pick(payload, worker(1, 2)) == {"body": "for 1"}
    assert pick(payload, worker(0, 2)) == {"body": "for all"}


@given(JSON)
def test_what_is_not_rankcasts_own_is_never_narrowed(payload: object) -> None:
    if not is_own(payload):
        assert narrow(payload, 0) is payload


@given(payload=JSON, rank=st.integers(0, 2))
def test_any_json_at_all_is_picked_from_or_refused(payload: object, rank: int) -> None:
    fits = isinstance(payload, dict) or (isinstance(payload, list) and len(payload) == 3)
    if fits and isinstance(payload[rank] if isinstance(payload, list) else payload, dict) and not is_own(payload):
        assert isinstance(pick(payload, worker(rank, 3)), dict)
    else:
        with pytest.raises(PayloadError):
            pick(payload, worker(rank, 3))


@given(entry=st.dictionaries(st.sampled_from(["names", "dtype_names", "shapes", "segments", "locations", "x"]), JSON))
def test_any_bare_entry_is_read_or_refused_by_name(entry: dict[str, Any]) -> None:
    assert is_bare(entry)
    try:
        manifest = bare_entry(entry).manifest()
    except (PayloadError, ManifestError):
        return
    assert list(manifest.names) == entry["names"]
    assert "x" not in entry


@pytest.mark.parametrize("payload", [None, 3, "text", b"bytes", True])
def test_a_payload_that_is_neither_dict_nor_list_is_refused_by_its_type(payload: object) -> None:
    with pytest.raises(PayloadError, match=type(payload).__name__):
        pick(payload, worker(0, 1))


@pytest.mark.parametrize("entry", [None, [], "text", 1])
def test_an_entry_that_is_no_dict_is_refused_with_the_worker_named(entry: object) -> None:
    for payload in ([{"names": []}, entry], own_payload({1: entry})):  # type: ignore[dict-item]
        with pytest.raises(PayloadError, match="worker 1 of 2") as caught:
            pick(payload, worker(1, 2))
        assert "engine" in str(caught.value)


@pytest.mark.parametrize(
    "payload",
    [
        {"rankcast": PROTOCOL + 1, "entries": {"0": {}}},
        {"rankcast": "1", "entries": {"0": {}}},
        {"rankcast": None, "entries": {"0": {}}},
        {"rankcast": PROTOCOL},
        {"rankcast": PROTOCOL, "entries": []},
        {"rankcast": PROTOCOL, "entries": {"0": {}}, "more": 1},
        {"rankcast": PROTOCOL, "entries": {}},
        {"rankcast": PROTOCOL, "entries": {"00": {}}},
    ],
)
def test_an_own_payload_of_another_form_is_refused_by_a_worker_that_says_who_it_is(payload: dict[str, Any]) -> None:
    with pytest.raises(PayloadError) as refusal:
        pick(payload, worker(0, 1))
    assert refusal.value.worker == worker(0, 1).label


def test_a_payload_of_another_protocol_says_what_to_do() -> None:
    with pytest.raises(
        PayloadError, match=rf"{PROTOCOL + 1}, worker 0 of 1 .* speaks {PROTOCOL}: use the same rankcast"
    ):
        pick({"rankcast": PROTOCOL + 1, "entries": {"0": {}}}, worker(0, 1))


def test_an_empty_bare_entry_names_nothing() -> None:
    assert len(bare_entry(pick([{"names": ["a"]}, {"names": []}], worker(1, 2))).manifest()) == 0


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"names": ["a"]}, "1 names, 0 dtype_names"),
        ({"names": ["a"], "dtype_names": ["no_such"], "shapes": [[1]], "locations": [[0, 0]]}, "no_such"),
        (
            {"names": ["a", "a"], "dtype_names": ["int8"] * 2, "shapes": [[1]] * 2, "locations": [[0, 0]] * 2},
            "given twice in one session: a",
        ),
        ({"names": ["a"], "dtype_names": ["int8"], "shapes": [[-1]], "locations": [[0, 0]]}, "negative size"),
        ({"names": [1]}, "malformed"),
        ({"names": [], "ipc_handles_pickled": "gASVBAAAAAAAAABLAS4="}, "ipc_handles_pickled"),
        ({"names": [], "segments": [{"kind": "no_such"}]}, "no_such"),
        ({}, "names"),
    ],
)
def test_a_faulty_bare_entry_is_refused_and_the_fault_named(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(RankcastError, match=says):
        bare_entry(entry).manifest()


def test_a_bare_entry_takes_dtypes_with_torchs_prefix() -> None:
    entry = {"names": ["a"], "dtype_names": ["torch.bfloat16"], "shapes": [[2, 3]], "locations": [[0, 0]]}
    assert bare_entry(entry).manifest().dtypes == ("bfloat16",)


def install(**changed: Any) -> Install:
    given = {
        "session": "s",
        "engine": "e" * 32,
        "rank": 1,
        "workers": 4,
        "sequence": 1,
        "weight_version": "1",
        "round": 0,
    }
    return Install(**{**given, **changed})


@pytest.mark.parametrize("changed", [{"engine": "f" * 32}, {"rank": 0}, {"rank": 3}, {"workers": 8}, {"workers": 1}])
def test_an_entry_for_another_worker_or_engine_is_refused_whatever_its_position(changed: dict[str, Any]) -> None:
    with pytest.raises(PayloadError, match="worker 1 of 4"):
        check_addressee(install(**changed), worker(1, 4))


def test_an_entry_for_the_worker_itself_or_for_every_worker_is_taken() -> None:
    check_addressee(install(), worker(1, 4))
    check_addressee(install(rank=None), worker(1, 4))
    everyone = Abort(session="s", engine="f" * 32, rank=None, workers=4, sequence=-1, weight_version="", reason="r")
    with pytest.raises(PayloadError, match="every worker"):
        check_addressee(everyone, worker(1, 4))


@pytest.mark.parametrize("transport", sorted(ROUTES))
@pytest.mark.parametrize(
    ("payload", "routed"),
    [
        ([{"names": []}], True),
        ([], True),
        ({"names": []}, False),
        (own_payload({0: {}, 1: {}}), True),
        (own_payload({None: {}}), False),
        (own_payload({None: {}, 1: {}}), True),
    ],
)
def test_entries_of_their_own_are_refused_over_a_transport_that_cannot_route_them(
    transport: str, payload: Any, routed: bool
) -> None:
    assert is_routed(payload) is routed
    if routed and transport == "collective":
        with pytest.raises(UnsupportedError, match="'collective', which gives every worker the same"):
            check_transport(transport, routed=routed)
    else:
        check_transport(transport, routed=routed)


def test_a_transport_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedError, match=r"'pigeon': known are shm, .*collective"):
        check_transport("pigeon", routed=False)


def test_a_handle_of_another_format_is_refused_with_both_numbers() -> None:
    process = {"host": "h", "namespace": "n", "pid": 1, "start_time": 2}
    handle = {"kind": "shm_name", "format": FORMAT, "owner": process, "name": "x", "size": 1, "inode": 3}
    (read,) = bare_entry({"names": [], "segments": [handle]}).segments
    check_format(read)
    (newer,) = bare_entry({"names": [], "segments": [{**handle, "format": FORMAT + 1}]}).segments
    with pytest.raises(LocationError, match=rf"format {FORMAT + 1} came, this worker reads format {FORMAT}"):
        check_format(newer)
    for odd in ({**handle, "more": 1}, {k: v for k, v in handle.items() if k != "size"}, {**handle, "size": "1"}, []):
        with pytest.raises(PayloadError, match="malformed"):
            bare_entry({"names": [], "segments": [odd]})
