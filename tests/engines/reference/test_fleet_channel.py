"""Frames arrive whole and in order, whatever the socket does, and a peer that is gone is noticed."""

from __future__ import annotations

import socket
import threading

import pytest

from rankcast.engines.reference import channel as channel_module
from rankcast.engines.reference.channel import Channel, ChannelClosed
from rankcast.errors import LimitError

FRAMES = [b"", b"x", bytes(range(256)) * 20_000, b"last"]


@pytest.fixture
def ends():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_frames_larger_than_the_sockets_buffer_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    sender = threading.Thread(target=lambda: [ours.send(frame) for frame in FRAMES])
    sender.start()
    received = [theirs.receive() for _ in FRAMES]
    sender.join(10)
    assert received == FRAMES


def test_flush_and_poll_never_wait_and_lose_nothing(ends):
    ours, theirs = ends
    for frame in FRAMES:
        ours.begin(frame)
    assert not ours.flush(), "the frames must not fit in the socket's buffer, or this tests nothing"
    received = []
    while len(received) < len(FRAMES):
        ours.flush()
        if (frame := theirs.poll()) is not None:
            received.append(frame)
    assert received == FRAMES
    assert ours.flush()
    assert theirs.poll() is None


@pytest.mark.parametrize("use", ["receive", "poll", "send", "flush"])
def test_a_peer_that_is_gone_is_noticed(ends, use):
    ours, theirs = ends
    theirs.close()
    if use == "flush":
        ours.begin(b"hello")
    given = [b"hello"] if use == "send" else []
    with pytest.raises(ChannelClosed):
        getattr(ours, use)(*given)


def test_half_a_frame_before_the_end_is_no_frame():
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall((100).to_bytes(8, "big") + b"half")
    channel = Channel(theirs)
    with pytest.raises(ChannelClosed):
        channel.receive()
    channel.close()


def test_a_frame_over_the_limit_is_refused_on_both_sides(ends, monkeypatch):
    ours, theirs = ends
    ours.send(b"12345678")
    monkeypatch.setattr(channel_module, "FRAME_LIMIT", 7)
    with pytest.raises(LimitError, match="8 bytes"):
        theirs.receive()
    with pytest.raises(LimitError, match="8 bytes"):
        ours.begin(b"12345678")
    assert ours.flush(), "a refused frame must leave nothing to send"
