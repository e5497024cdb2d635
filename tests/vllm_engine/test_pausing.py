"""Pausing, caches, sleep: requests in flight survive, nothing old is served, and a pause stays a pause."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

import rankcast
from docs.markdown_pages import ROOT, blocks
from docs.surroundings import CHECKPOINT, URL
from rankcast.control.http import HttpClient
from vllm_engine.conftest import Bench
from vllm_engine.servers import PROMPTS, TP1, TP2, VllmServer
from vllm_engine.test_faults import refused
from vllm_engine.test_servers import command, push

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("bench", [TP1, TP2], indirect=True, ids=lambda layout: layout.name, scope="session"),
]

LONG = 480
#: The engine takes four at a time, and the next as soon as one is done. The first four take a second or two, and on a
#: busy machine they were once over before the pause.
MANY = 20

Answer = Future[tuple[tuple[int, ...], tuple[float, ...]]]


@contextmanager
def long_requests(server: VllmServer, count: int = MANY) -> Iterator[list[Answer]]:
    """``count`` requests of ``LONG`` tokens. The engine is running some of them as long as one is not answered."""
    with ThreadPoolExecutor(count) as pool:
        before = generated(server)
        answers = [pool.submit(server.generate, PROMPTS[0], LONG) for _ in range(count)]
        deadline = time.monotonic() + 60
        while generated(server) <= before:
            assert not all_done(answers), [answer.result() for answer in answers]
            assert time.monotonic() < deadline, "no request runs"
        yield answers


@contextmanager
def long_request(server: VllmServer) -> Iterator[Answer]:
    """One such request, which is running."""
    with long_requests(server, 1) as (answer,):
        yield answer


def all_done(answers: list[Answer]) -> bool:
    return all(answer.done() for answer in answers)


def generated(server: VllmServer) -> float:
    """How many tokens the server has generated so far, as it says itself."""
    return counted(server, "vllm:generation_tokens_total")


def counted(server: VllmServer, name: str) -> float:
    """What the server's counter ``name`` says now."""
    text = server.client.get(server.url + "/metrics").text
    rows = [row for row in text.splitlines() if row.startswith(name + "{")]
    assert rows, f"the server has no counter {name}"
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


class Announcing(HttpClient):
    """A client that calls ``before`` at the last moment before it pauses its engine."""

    def __init__(self, url: str, before: Callable[[], object]) -> None:
        super().__init__(url, timeout=60)
        self._before = before

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        self._before()
        super().pause(mode, clear_cache)


def test_requests_in_flight_survive_a_push(bench: Bench) -> None:
    answers: list[Answer] = []
    ended: list[bool] = []

    def look(progress: rankcast.Progress) -> None:
        if progress.stage == "install":
            ended.append(all_done(answers))

    with ExitStack() as requests:

        def ask() -> None:
            answers.extend(requests.enter_context(long_requests(bench.server)))

        with (
            Announcing(bench.server.url, ask) as client,
            rankcast.connect(
                client, bench.b, mode="ranklocal", bucket_bytes=150_000, timeout=60, progress=look
            ) as sync,
        ):
            sync.push(weight_version="b")
        said = [answer.result(timeout=120) for answer in answers]
    assert len(ended) > 3
    assert not any(ended), "the requests ended before the pause"
    assert [(len(ids), len(log_probs)) for ids, log_probs in said] == [(LONG, LONG)] * MANY
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said


def test_a_request_that_arrives_during_the_pause_is_answered_by_the_new_weights(bench: Bench) -> None:
    arrived: list[Future[object]] = []
    with ThreadPoolExecutor(1) as pool:

        def ask(progress: rankcast.Progress) -> None:
            if progress.stage == "install" and not arrived:
                arrived.append(pool.submit(bench.server.generate, PROMPTS[1]))

        with rankcast.connect(
            bench.server.url, bench.b, mode="ranklocal", bucket_bytes=150_000, timeout=60, progress=ask
        ) as sync:
            sync.push(weight_version="b")
        assert arrived[0].result(timeout=60) == bench.at_b.said[1]


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_no_prefix_of_the_old_weights_is_served(bench: Bench, pause: str) -> None:
    assert bench.server.probe() == bench.at_a.said
    assert bench.server.probe() == bench.at_a.said  # now its blocks are cached
    with rankcast.connect(bench.server.url, bench.b, pause=pause, timeout=60) as sync:
        sync.push(weight_version="b")
    assert bench.server.probe() == bench.at_b.said
    push(bench, bench.a)
    assert bench.server.probe() == bench.at_a.said


def test_no_prefix_that_a_user_s_pause_kept_is_served(bench: Bench) -> None:
    # The other pauses throw the caches away themselves; after this one only the reset at the end of the push does.
    assert bench.server.generate(PROMPTS[2]) == bench.at_a.said[2]
    hits = counted(bench.server, "vllm:prefix_cache_hits_total")
    assert bench.server.generate(PROMPTS[2]) == bench.at_a.said[2]
    assert counted(bench.server, "vllm:prefix_cache_hits_total") > hits, "no block of the old weights is cached"
    assert bench.server.post("/pause", mode="keep", clear_cache="false").status_code == 200
    push(bench, bench.b)
    assert bench.server.post("/resume").status_code == 200
    assert bench.server.probe() == bench.at_b.said


def test_a_server_that_the_user_paused_stays_paused(bench: Bench) -> None:
    assert bench.server.post("/pause", mode="keep").status_code == 200
    push(bench, bench.b)
    assert bench.server.get("/is_paused") == {"is_paused": True}
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.post("/resume").status_code == 200
    assert bench.server.probe() == bench.at_b.said


def test_a_user_s_pause_that_kept_the_caches_is_no_reason_to_fail(bench: Bench) -> None:
    # What is in flight holds its blocks through such a pause, and vLLM drops none of them unless it is told to.
    with long_request(bench.server) as answer:
        assert bench.server.post("/pause", mode="keep", clear_cache="false").status_code == 200
        push(bench, bench.b)
        assert bench.server.get("/is_paused") == {"is_paused": True}
        assert bench.server.post("/resume").status_code == 200
        assert len(answer.result(timeout=120)[0]) == LONG
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said


def test_a_push_that_must_not_pause_is_refused_unless_the_user_has(bench: Bench) -> None:
    with rankcast.connect(bench.server.url, bench.b, pause=None, timeout=60) as sync:
        with pytest.raises(rankcast.PushError, match="not paused"):
            sync.push(weight_version="b")
        assert bench.server.digests() == bench.at_a.digests
        assert bench.server.probe() == bench.at_a.said
        assert bench.server.post("/pause", mode="keep").status_code == 200
        sync.push(weight_version="b")
        assert bench.server.get("/is_paused") == {"is_paused": True}
        assert bench.server.post("/resume").status_code == 200
    assert bench.server.probe() == bench.at_b.said


def test_a_pause_that_still_waits_for_its_requests_is_not_yet_a_pause(bench: Bench) -> None:
    # vLLM calls itself paused as soon as it takes no new requests, while those in flight still run.
    with long_request(bench.server) as answer, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bench.server.post, "/pause", mode="wait")
        while bench.server.get("/is_paused") != {"is_paused": True}:
            assert not waiting.done()
        said = bench.server.post("/start_weight_update")
        running = not answer.done()
        assert len(answer.result(timeout=120)[0]) == LONG
        assert waiting.result(timeout=120).status_code == 200
    if running:
        assert said.status_code != 200, "an update started while a request was running"
        assert "still running" in said.text
    else:
        assert bench.server.post("/finish_weight_update").status_code == 200
    assert bench.server.post("/resume").status_code == 200
    assert bench.server.probe() == bench.at_a.said


def test_an_engine_whose_weights_sleep_is_refused_and_woken_weights_are_enough(bench: Bench) -> None:
    # On CPU vLLM keeps the memory, and everything else about sleeping is as on a GPU.
    assert bench.server.post("/sleep", level="1").status_code == 200
    try:
        with pytest.raises(rankcast.PushError, match=r"wake_up\?tags=weights"):
            push(bench, bench.b)
        assert "wake_up?tags=weights" in refused(bench.server, "/start_weight_update")
        assert bench.server.digests() == bench.at_a.digests
        assert bench.server.post("/wake_up", tags="weights").status_code == 200
        push(bench, bench.b)
        assert bench.server.digests() == bench.at_b.digests
        assert bench.server.get("/is_sleeping") == {"is_sleeping": True}
    finally:
        assert bench.server.post("/wake_up").status_code == 200
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert bench.server.probe() == bench.at_b.said


def test_weights_that_a_deep_sleep_dropped_are_served_by_nobody_until_a_push(bench: Bench) -> None:
    # On CPU the memory stays, so that what counts as dropped is whole: on a GPU it would be garbage.
    assert bench.server.post("/sleep", level="2").status_code == 200
    assert "push again" in refused(bench.server, "/wake_up")
    assert "push again" in refused(bench.server, "/resume")
    assert [one["servable"] for one in bench.server.flags()] == [False] * bench.layout.tp
    assert [one["version"] for one in bench.server.flags()] == [""] * bench.layout.tp
    push(bench, bench.b)
    assert bench.server.get("/is_paused") == {"is_paused": True}, "whoever sent it to sleep wakes it"
    assert bench.server.post("/resume").status_code == 200
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said


def test_a_trainer_that_shares_the_engine_s_devices_pushes_between_two_wakings(bench: Bench) -> None:
    def between(push_now: Callable[[], object]) -> None:
        assert bench.server.post("/sleep", level="2").status_code == 200
        assert bench.server.post("/wake_up", tags="weights").status_code == 200
        push_now()
        assert bench.server.get("/is_paused") == {"is_paused": True}, "its cache is still asleep"
        assert bench.server.post("/resume").status_code == 200
        assert bench.server.get("/is_paused") == {"is_paused": True}, "its cache is still asleep"
        assert bench.server.post("/wake_up", tags="kv_cache").status_code == 200
        assert bench.server.get("/is_paused") == {"is_paused": False}
        assert bench.server.digests() == bench.at_b.digests
        assert bench.server.probe() == bench.at_b.said

    between(lambda: push(bench, bench.b))
    with rankcast.connect(bench.server.url, bench.b, timeout=60) as sync:
        between(lambda: sync.push(weight_version="b"))
        between(lambda: sync.push(weight_version="b again"))


def test_the_page_s_commands_for_a_server_that_sleeps_end_with_the_new_weights_served(bench: Bench) -> None:
    (block,) = [block for block in blocks(ROOT / "docs" / "vllm.md") if "/sleep?" in block.text]
    said = []
    for line in block.text.replace(CHECKPOINT, str(bench.b)).splitlines():
        match shlex.split(line.replace(URL, bench.server.url), comments=True):
            case ["curl", "-X", "POST", url]:
                said.append(bench.server.client.post(url, timeout=60).json())
            case ["rankcast", *arguments]:
                done = command(*arguments)
                assert done.returncode == 0, done.stderr
            case other:
                assert other == []
    assert [one["status"] for one in said] == ["sleeping", "sleeping", "awake"]
    assert bench.server.get("/is_paused") == {"is_paused": False}
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said


def test_nothing_resumes_an_engine_in_the_middle_of_an_update(bench: Bench) -> None:
    # What the user's pause holds would go on in a pause that waits for it, over weights that are half new.
    said: list[str] = []
    once = threading.Lock()

    def meddle(progress: rankcast.Progress) -> None:
        if progress.stage == "install" and once.acquire(blocking=False):
            said.append(refused(bench.server, "/resume"))
            said.append(refused(bench.server, "/wake_up"))
            said.append(refused(bench.server, "/sleep", level="1"))
            said.append(refused(bench.server, "/sleep", level="0", mode="wait"))
            said.append(refused(bench.server, "/pause", mode="wait"))
            said.append(refused(bench.server, "/pause", mode="keep"))

    with long_request(bench.server) as answer:
        assert bench.server.post("/pause", mode="keep").status_code == 200
        with rankcast.connect(
            bench.server.url, bench.b, mode="ranklocal", bucket_bytes=150_000, timeout=60, progress=meddle
        ) as sync:
            sync.push(weight_version="b")
        assert bench.server.post("/resume").status_code == 200
        assert len(answer.result(timeout=120)[0]) == LONG
    assert all("a weight update is open" in one for one in said), said
    assert len(said) == 6
    assert bench.server.digests() == bench.at_b.digests
    assert bench.server.probe() == bench.at_b.said
