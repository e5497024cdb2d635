"""Whatever is sent to a server, it goes on: old weights serve, flags are alike on all ranks, the next update is exact.

Every fault is sent the way a client without rankcast's protocol would send it, with stock vLLM's consequences named
where they are worse than an error. After each one a whole update follows over the same routes: were any rank's reply
left over, or any rank's flag another than the rest's, it would fail or be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import rankcast
from vllm_engine.conftest import Bench
from vllm_engine.servers import TP1, TP2, VllmServer
from vllm_engine.test_servers import push
from vllm_engine.updates import Entry, Source, bare_update, shared_source

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("bench", [TP1, TP2], indirect=True, ids=lambda layout: layout.name, scope="session"),
]

EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"
NORM = "model.norm.weight"
IDLE = {"active": False, "state": "idle", "servable": True, "on_meta": 0, "half_loaded": 0, "kernels_absent": 0}


@dataclass(frozen=True)
class Room:
    """A paused server on A with the tensors of A and of B to send it."""

    server: VllmServer
    a: Source
    b: Source

    def start(self) -> None:
        assert self.server.post("/start_weight_update").status_code == 200

    def update(self, payload: object) -> str:
        """Send an update that must be refused; what the user reads."""
        return refused(self.server, "/update_weights", {"update_info": payload})


Fault = Callable[[Room], str]


def refused(server: VllmServer, route: str, body: object = None, **query: str) -> str:
    reply = server.post(route, body, **query)
    assert 400 <= reply.status_code < 600, f"{route} was taken: {reply.text}"
    return reply.text


def flags(server: VllmServer) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key in IDLE} for one in server.flags()]


@pytest.fixture(scope="module")
def a() -> Iterator[Source]:
    with shared_source("moe", "a") as source:
        yield source


@pytest.fixture(scope="module")
def b() -> Iterator[Source]:
    with shared_source("moe", "b") as source:
        yield source


@pytest.fixture
def room(bench: Bench, a: Source, b: Source) -> Iterator[Room]:
    """A paused server; afterwards it has taken a whole update by bare entries, and serves A again."""
    server = bench.server
    assert server.post("/pause", mode="keep").status_code == 200
    yield Room(server, a, b)
    if any(one["active"] for one in server.flags()):  # the test failed half-way, and the next must not pay for it
        server.post("/init_weight_transfer_engine", {"init_info": {}})
    bare_update(server, b.entry())
    assert flags(server) == [IDLE] * bench.layout.tp
    assert server.digests() == bench.at_b.digests
    workers = bench.layout.tp
    bare_update(server, [a.entry(list(a.tensors)[:9])] * workers, [a.entry(list(a.tensors)[9:])] * workers)
    assert server.digests() == bench.at_a.digests
    assert server.post("/resume").status_code == 200
    assert "not paused" in refused(server, "/weight_checker", {"action": "reset"})
    assert server.probe() == bench.at_a.said


# -- refused before anything is written ------------------------------------------------------------------------------


def start_twice(room: Room) -> str:
    room.start()
    return refused(room.server, "/start_weight_update")


def update_before_start(room: Room) -> str:
    return room.update(room.b.entry())


def finish_before_start(room: Room) -> str:
    return refused(room.server, "/finish_weight_update")


def draft_update(room: Room) -> str:
    return refused(room.server, "/start_draft_weight_update")


def connection_let_go_of_in_a_session(room: Room) -> str:
    room.start()
    return refused(room.server, "/shutdown_weight_transfer_engine")


def list_too_long(room: Room) -> str:
    room.start()
    return room.update([room.b.entry()] * 3)


def list_too_short(room: Room) -> str:
    room.start()
    return room.update([])


def list_of_something_else(room: Room) -> str:
    # vLLM lets nothing but dicts through, and this is its own reply.
    room.start()
    return room.update(["weights", "weights"])


def nothing_of_an_entry(room: Room) -> str:
    room.start()
    return room.update({"weights": "all of them"})


def another_dtype_label(room: Room) -> str:
    """Stock vLLM: 200, and garbage."""
    room.start()
    entry = room.b.entry()
    entry["dtype_names"][entry["names"].index(KEYS)] = "float16"
    return room.update(entry)


def another_shape(room: Room) -> str:
    """Stock vLLM: the tensor stays buffered, every later update fails, and the next request ends the server."""
    room.start()
    entry = room.b.entry()
    shape = entry["shapes"][entry["names"].index(KEYS)]
    shape[1] //= 2
    return room.update(entry)


def unknown_names_only(room: Room) -> str:
    room.start()
    entry: Entry = room.b.entry([KEYS])
    entry["names"] = ["model.layers.7.self_attn.k_proj.weight"]
    return room.update(entry)


def uneven_columns(room: Room) -> str:
    room.start()
    entry = room.b.entry()
    entry["shapes"].pop()
    return room.update(entry)


def beyond_the_segment(room: Room) -> str:
    room.start()
    entry = room.b.entry()
    entry["locations"][-1] = [0, 2**40]
    return room.update(entry)


def a_segment_that_is_not_there(room: Room) -> str:
    room.start()
    entry = room.b.entry()
    entry["segments"] = [{**room.b.handle, "descriptor": 10**6}]
    return room.update(entry)


def the_same_name_twice(room: Room) -> str:
    room.start()
    return room.update(room.b.entry([KEYS, NORM, KEYS]))


def an_entry_of_nobodys_session(room: Room) -> str:
    room.start()
    return room.update({"rankcast": 1, "entries": {"*": {"body": "{}"}}})


def another_protocol(room: Room) -> str:
    room.start()
    return room.update({"rankcast": 2, "entries": {}})


def an_init_of_another_backend(room: Room) -> str:
    body = {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}}
    return refused(room.server, "/init_weight_transfer_engine", body)


BEFORE_A_WRITE: list[tuple[Fault, str]] = [
    (start_twice, "finish it or abort it first"),
    (update_before_start, "start first"),
    (finish_before_start, "start first"),
    (draft_update, "draft"),
    (connection_let_go_of_in_a_session, "a weight update is open"),
    (list_too_long, "a list payload has 3 entries"),
    (list_too_short, "a list payload has 0 entries"),
    (list_of_something_else, "dict"),
    (nothing_of_an_entry, "malformed"),
    (another_dtype_label, KEYS),
    (another_shape, KEYS),
    (unknown_names_only, "model.layers.7.self_attn.k_proj.weight"),
    (uneven_columns, "shapes"),
    (beyond_the_segment, "segment"),
    (a_segment_that_is_not_there, "its owner closed it"),
    (the_same_name_twice, KEYS),
    (an_entry_of_nobodys_session, "protocol"),
    (another_protocol, "protocol"),
    (an_init_of_another_backend, "init message"),
]


@pytest.mark.parametrize(("fault", "says"), BEFORE_A_WRITE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_before_the_first_write_leaves_the_old_weights(
    bench: Bench, room: Room, fault: Fault, says: str
) -> None:
    said = fault(room)
    assert says in said
    states = room.server.flags()
    assert all(one == states[0] for one in states), states
    assert states[0]["servable"]
    assert room.server.digests() == bench.at_a.digests
    if states[0]["active"]:
        # The session is still open on every rank: it can be ended, empty, like any other.
        bare_update_end(room.server)
    assert flags(room.server) == [IDLE] * bench.layout.tp
    assert room.server.post("/resume").status_code == 200
    assert room.server.probe() == bench.at_a.said
    assert room.server.post("/pause", mode="keep").status_code == 200


def bare_update_end(server: VllmServer) -> None:
    assert server.post("/finish_weight_update").status_code == 200


# -- refused when something is written already: no server may serve it -----------------------------------------------


def an_expert_never_comes(room: Room) -> str:
    """Stock vLLM: 200 throughout, and uninitialised memory in the whole layer."""
    room.start()
    assert room.server.post("/update_weights", {"update_info": room.b.without(EXPERT)}).status_code == 200
    return refused(room.server, "/finish_weight_update")


def keys_never_come(room: Room) -> str:
    """Stock vLLM: 200 throughout, and uninitialised memory in the whole layer."""
    room.start()
    assert room.server.post("/update_weights", {"update_info": room.b.without(KEYS)}).status_code == 200
    return refused(room.server, "/finish_weight_update")


def the_whole_set_twice(room: Room) -> str:
    """Stock vLLM: the next request ends the server."""
    room.start()
    assert room.server.post("/update_weights", {"update_info": room.b.entry()}).status_code == 200
    said = room.update(room.b.entry())
    assert room.server.post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    return said


def a_session_is_left_open(room: Room) -> str:
    """Stock vLLM: the element counters stay, and a later update reports success over uninitialised memory."""
    room.start()
    assert room.server.post("/update_weights", {"update_info": room.b.entry([KEYS, EXPERT])}).status_code == 200
    said = refused(room.server, "/start_weight_update")
    assert room.server.post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    return said


AFTER_A_WRITE: list[tuple[Fault, str]] = [
    (an_expert_never_comes, "experts"),
    (keys_never_come, "qkv_proj"),
    (the_whole_set_twice, "given twice"),
    (a_session_is_left_open, "finish it or abort it first"),
]


@pytest.mark.parametrize(("fault", "says"), AFTER_A_WRITE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_after_the_first_write_keeps_the_server_paused_until_the_next_whole_update(
    bench: Bench, room: Room, fault: Fault, says: str
) -> None:
    said = fault(room)
    assert says in said
    states = room.server.flags()
    assert all(one == states[0] for one in states), states
    assert not states[0]["active"]
    assert not states[0]["servable"]
    assert states[0]["on_meta"] == states[0]["half_loaded"] == 0
    assert "push again" in refused(room.server, "/resume")
    assert "push again" in refused(room.server, "/update_weight_version", {"new_version": "half"})
    assert room.server.get("/is_paused") == {"is_paused": True}


def test_one_rank_alone_refuses_and_the_others_do_not_go_on(bench: Bench, room: Room) -> None:
    """Stock vLLM at TP2: one rank's flag goes off, the replies are out of step, and only a restart helps."""
    if bench.layout.tp == 1:
        said = refuse_on(room, 0, 1)
    else:
        said = [refuse_on(room, rank, bench.layout.tp) for rank in range(bench.layout.tp)]
        assert "worker 0" in said[0]
        assert "worker 1" not in said[0]
        assert "worker 1" in said[1]
        assert "worker 0" not in said[1]
    assert room.server.digests() == bench.at_a.digests


def refuse_on(room: Room, rank: int, workers: int) -> str:
    room.start()
    entries = [{"names": []} for _ in range(workers)]
    entries[rank] = {"names": [KEYS]}
    said = room.update(entries)
    states = room.server.flags()
    assert all(one == states[0] for one in states), states
    if states[0]["active"]:
        bare_update_end(room.server)
    return said


def test_a_session_that_leaves_one_rank_out_is_never_served(bench: Bench, room: Room) -> None:
    """Empty entries are legal call by call. Stock vLLM: 200, and one rank at each version, under the new name."""
    if bench.layout.tp == 1:
        # Nothing for the only rank is nothing at all, and changes nothing.
        bare_update(room.server, [{"names": []}])
        assert flags(room.server) == [IDLE]
        return
    for rank in range(bench.layout.tp):
        entries: list[object] = [room.b.entry() for _ in range(bench.layout.tp)]
        entries[rank] = {"names": []}
        room.start()
        assert room.server.post("/update_weights", {"update_info": entries}).status_code == 200
        said = refused(room.server, "/finish_weight_update", {"weight_version": "a mix"})
        assert f"nothing for workers [{rank}]" in said
        states = room.server.flags()
        assert all(one == states[0] for one in states), states
        assert not states[0]["active"]
        assert not states[0]["servable"]
        assert room.server.get("/weight_info")["weight_version"] != "a mix"
        assert "push again" in refused(room.server, "/resume")
        # A session that brings nothing makes nothing whole.
        room.start()
        assert "send them all" in refused(room.server, "/finish_weight_update")
        assert "push again" in refused(room.server, "/resume")
        bare_update(room.server, room.a.entry())


@pytest.mark.parametrize("own", [True, False], ids=["rankcast", "bare"])
def test_a_finish_that_fails_on_one_rank_alone_fails_for_all_and_the_next_update_is_exact(
    bench: Bench, room: Room, own: bool
) -> None:
    """Stock vLLM: that rank's flag stays on, its replies are out of step, and MoE layers are left without a kernel."""
    for rank in range(bench.layout.tp):
        room.server.rpc("break_next_finish", rank)
        if own:
            with pytest.raises(rankcast.PushError, match=f"worker {rank}.*the finish broke"):
                push(bench, bench.b)
        else:
            room.start()
            assert room.server.post("/update_weights", {"update_info": room.b.entry()}).status_code == 200
            said = refused(room.server, "/finish_weight_update")
            assert f"worker {rank}" in said
            assert "the finish broke" in said
        states = flags(room.server)
        assert {one["active"] for one in states} == {False}
        assert [one["servable"] for one in states][rank] is False
        assert [(one["on_meta"], one["half_loaded"], one["kernels_absent"]) for one in states] == [
            (0, 0, 0) for _ in states
        ]
        assert "push again" in refused(room.server, "/resume")
        push(bench, bench.b)
        assert room.server.digests() == bench.at_b.digests
        assert room.server.get("/is_paused") == {"is_paused": True}, "the user paused it"
        push(bench, bench.a)


def test_what_goes_around_rankcast_is_refused_or_makes_the_engine_unservable_until_a_push(
    bench: Bench, room: Room
) -> None:
    """Stock vLLM loads again, over packed layers and under the old name, and serves zeros after a reset."""
    assert "rankcast push CHECKPOINT" in refused(room.server, "/collective_rpc", {"method": "reload_weights"})
    for private in ("disown_weight_update", "abandon_weight_update"):
        assert "own call" in refused(room.server, "/collective_rpc", {"method": private})
    assert room.server.digests() == bench.at_a.digests
    room.start()
    assert "a weight update is open" in refused(room.server, "/weight_checker", {"action": "reset"})
    bare_update_end(room.server)
    assert flags(room.server) == [IDLE] * bench.layout.tp
    assert room.server.post("/weight_checker", {"action": "reset"}).status_code == 200
    assert flags(room.server) == [{**IDLE, "servable": False, "state": "unusable"}] * bench.layout.tp
    assert "push again" in refused(room.server, "/resume")
    push(bench, bench.b)
    assert room.server.digests() == bench.at_b.digests


def test_a_shape_that_fits_one_rank_by_chance_is_never_served(bench: Bench, room: Room) -> None:
    # Half of the rows are just what rank 0 of two takes: it has written when rank 1 refuses.
    room.start()
    entry = room.b.entry()
    shape = entry["shapes"][entry["names"].index(KEYS)]
    shape[0] //= 2
    assert KEYS in room.update(entry)
    states = flags(room.server)
    assert len({one["active"] for one in states}) == 1, states
    if all(one["servable"] for one in states):
        assert room.server.digests() == bench.at_a.digests
    else:
        assert "push again" in refused(room.server, "/resume")


def test_nothing_starts_while_requests_may_run(bench: Bench) -> None:
    """Stock vLLM: a request between start and finish ends the engine, and the server with it."""
    assert "not paused" in refused(bench.server, "/start_weight_update")
    assert bench.server.probe() == bench.at_a.said
    push(bench, bench.b)
    assert bench.server.digests() == bench.at_b.digests
