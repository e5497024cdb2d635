"""Links and groups within this process: who is let in, what a frame may be, and the group of one.

It knows sockets; it must not know torch's process groups.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from end_to_end.seen import wait_until
from rankcast.errors import LimitError, TrainerError, UnsupportedError
from rankcast.trainer import group_link
from rankcast.trainer.group import SingleGroup, StarGroup, form_group
from rankcast.trainer.group_link import Frame, Link, Peer, this_peer

KEY = b"k" * 32


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with dialled, accepted:
        yield dialled, accepted


@pytest.fixture
def links(sockets: tuple[socket.socket, socket.socket]) -> Iterator[tuple[Link, Link]]:
    dialled, accepted = (Link(one, 20.0) for one in sockets)
    yield dialled, accepted
    for link in (dialled, accepted):
        link.shut()
        link.close()


def authenticated(links: tuple[Link, Link], dialling: bytes, listening: bytes) -> list[str]:
    """What went wrong on either end."""
    faults: list[str] = []

    def prove(link: Link, key: bytes, listening: bool) -> None:
        try:
            link.authenticate(key, listening=listening)
        except ConnectionError as fault:
            faults.append(str(fault))
            link.shut()

    other = threading.Thread(target=prove, args=(links[0], dialling, False))
    other.start()
    prove(links[1], listening, True)
    other.join(20.0)
    assert not other.is_alive()
    return faults


def test_both_ends_with_the_key_are_let_in_and_frames_pass(links: tuple[Link, Link]) -> None:
    assert authenticated(links, KEY, KEY) == []
    frames = [Frame(1, "data", "x", bytes(range(256)) * 1000), Frame(2, "pulse"), Frame(3, "fail", "é" * 10)]
    for frame in frames:
        links[0].send(frame)
    assert [links[1].receive(20.0) for _ in frames] == frames


def test_an_end_with_another_key_is_refused_on_both_ends(links: tuple[Link, Link]) -> None:
    assert len(authenticated(links, b"x" * 32, KEY)) == 2


def test_a_stranger_that_talks_something_else_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    stranger, accepted = sockets
    link = Link(accepted, 20.0)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectionError):
        link.authenticate(KEY, listening=True)
    link.close()


def test_a_frame_longer_than_the_limit_is_refused_by_both_ends(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    links[0].send(Frame(1, "data", "manifests", bytes(2000)))
    monkeypatch.setattr(group_link, "FRAME_LIMIT", 1000)
    with pytest.raises(LimitError) as caught:
        links[1].send(Frame(1, "data", "manifests", bytes(2000)))
    assert "manifests" in str(caught.value)
    assert "1,000" in str(caught.value)
    with pytest.raises(OSError):
        links[1].receive(20.0)


def test_a_send_that_nobody_reads_ends_after_the_timeout(sockets: tuple[socket.socket, socket.socket]) -> None:
    link = Link(sockets[0], 0.2)
    with pytest.raises(OSError):
        link.send(Frame(1, "data", "x", bytes(64 * 2**20)))
    assert not link.send_promptly(Frame(1, "pulse"), 0.0)
    link.close()


def two(links: tuple[Link, Link]) -> tuple[StarGroup, Peer]:
    """Rank 0 in this process, and the link at which a test plays rank 1."""
    peers = [this_peer(0), this_peer(1)]
    return StarGroup(0, {1: links[0]}, peers, timeout=20.0), peers[1]


@pytest.mark.parametrize("nonsense", [b"\xc1", b"", b"\x84\xa5epoch\xa1x", b"pickled?"])
def test_a_rank_that_talks_nonsense_counts_as_dead_and_is_named(links: tuple[Link, Link], nonsense: bytes) -> None:
    group, peer = two(links)
    links[1]._connection.send_bytes(nonsense)
    with pytest.raises(TrainerError) as caught:
        group.begin()
    assert peer.label in str(caught.value)
    group.close()


def test_what_comes_late_from_an_earlier_epoch_is_dropped(links: tuple[Link, Link]) -> None:
    group, _ = two(links)
    for epoch in (0, 1):
        links[1].send(Frame(epoch, "begin"))
        group.begin()
    for frame in (
        Frame(1, "data", "gather 'x'", b"old"),
        Frame(1, "fail", "old"),
        Frame(2, "data", "gather 'x'", b"new"),
    ):
        links[1].send(frame)
    assert group.gather(b"mine", "x") == [b"mine", b"new"]
    group.check()
    group.close()
    kinds = [links[1].receive(20.0).kind]
    while kinds[-1] != "close":
        kinds.append(links[1].receive(20.0).kind)
    assert [kind for kind in kinds if kind != "pulse"] == ["go", "go", "close"]


@pytest.mark.parametrize("failed", ["push of '2'", "push of '3'"])
def test_word_of_a_failure_that_comes_after_a_rank_began_counts_only_if_it_is_of_the_same_push(
    links: tuple[Link, Link], failed: str
) -> None:
    group = StarGroup(1, {0: links[0]}, [this_peer(0), this_peer(1)], timeout=20.0)
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(group.begin, "push of '3'")
        assert links[1].receive(20.0).kind == "begin"
        links[1].send(Frame(1, "fail", "rank 1 is missing", failed.encode()))
        if failed == "push of '3'":
            with pytest.raises(TrainerError, match="rank 1 is missing"):
                beginning.result(20)
        else:
            wait_until(lambda: group._epoch == 1)  # before anything follows
            links[1].send(Frame(2, "go"))
            beginning.result(20)
            group.gather(b"mine", "x")
            assert links[1].receive(20.0) == Frame(2, "data", "gather 'x'", b"mine")
    group.close()


def test_failing_and_closing_never_raise_even_when_nobody_is_there(links: tuple[Link, Link]) -> None:
    group, peer = two(links)
    links[1].shut()
    for _ in range(2):
        group.fail(RuntimeError("x"))
        group.pulse()
    with pytest.raises(TrainerError):
        group.check()
    for _ in range(2):
        group.close()
    group.fail(RuntimeError("x"))
    group.pulse()
    with pytest.raises(TrainerError) as caught:
        group.check()
    assert "closed" in str(caught.value)
    assert peer.rank == 1


def test_without_a_process_group_the_trainer_is_a_group_of_one() -> None:
    group = form_group(timeout=20.0)
    assert isinstance(group, SingleGroup)
    assert (group.rank, group.size) == (0, 1)
    group.begin()
    group.fail(ValueError("x"))
    group.begin()
    group.pulse()
    group.check()
    assert group.gather(b"a", "x") == group.exchange(b"a", "x") == [b"a"]
    assert group.broadcast(b"a", "x") == b"a"
    group.close()


def test_something_else_than_a_process_group_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        form_group("default", timeout=20.0)
    assert "str" in str(caught.value)
