"""Addresses: what counts as loopback, what may be listened on, and which address faces an engine."""

from __future__ import annotations

import pytest

from rankcast.control.addresses import facing, is_loopback, listening_socket, split_listen, url_of
from rankcast.errors import LimitError, UnsupportedError


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "127.0.0.1", "127.8.8.8", "::1", "[::1]"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "10.0.0.1", "::", "localhost.example.org", "127.0.0.1.example.org"])
def test_what_only_looks_like_loopback_is_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        (None, ("127.0.0.1", 0)),
        ("10.1.2.3", ("10.1.2.3", 0)),
        ("10.1.2.3:4567", ("10.1.2.3", 4567)),
        ("trainer-0.example.org:1", ("trainer-0.example.org", 1)),
        ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[fd00::2]:80", ("fd00::2", 80)),
    ],
)
def test_an_address_to_listen_on_is_read(listen: str | None, expected: tuple[str, int]) -> None:
    assert split_listen(listen) == expected


@pytest.mark.parametrize(
    "listen", ["", ":80", "host:", "host:http", "host:65536", "host:-1", "[::1", "[::1]80", "0.0.0.0", "[::]:80", "h:²"]
)
def test_what_is_no_address_or_means_all_of_them_is_refused(listen: str) -> None:
    with pytest.raises(UnsupportedError, match="listen="):
        split_listen(listen)


def test_an_address_that_is_taken_or_not_ours_is_an_error_with_a_way_out() -> None:
    with listening_socket("127.0.0.1", 0, backlog=1) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(LimitError, match=rf"cannot listen on 127.0.0.1:{port}: .*free port"):
            listening_socket("127.0.0.1", port, backlog=1)
    with pytest.raises(LimitError, match=r"cannot listen on 192.0.2.1:0: .*address of this machine"):
        listening_socket("192.0.2.1", 0, backlog=1)


def test_for_engines_on_loopback_no_other_address_is_wanted() -> None:
    assert facing(["http://127.0.0.1:8000", "http://localhost:8001"]) is None
