"""The headers of every request: the user's over what is customary, under what the client must say itself."""

from __future__ import annotations

import httpx
import pytest

from rankcast.control.request_headers import standing_headers
from rankcast.errors import EngineError


def headers(url: str, given: dict[str, str] | None = None) -> dict[bytes, bytes]:
    found = standing_headers(httpx.URL(url), given or {})
    assert len({name.lower() for name, _ in found}) == len(found)
    return {name.lower(): value for name, value in found}


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://engine", b"engine"),
        ("http://engine:80", b"engine"),
        ("https://engine:443", b"engine"),
        ("http://engine:8000/prefix", b"engine:8000"),
        ("http://user:pw@[::1]:8000", b"[::1]:8000"),
        ("http://bücher.example", b"xn--bcher-kva.example"),
    ],
)
def test_the_host_is_as_the_url_has_it_without_the_schemes_own_port(url: str, host: bytes) -> None:
    assert headers(url)[b"host"] == host


def test_the_users_headers_replace_what_is_customary_in_whatever_case() -> None:
    found = headers("http://engine", {"HOST": "other", "user-agent": "mine", "X-Key": "k"})
    assert (found[b"host"], found[b"user-agent"], found[b"x-key"]) == (b"other", b"mine", b"k")


@pytest.mark.parametrize("name", ["Content-Length", "content-type", "Transfer-Encoding", "X-Rankcast-MAC"])
def test_what_a_call_says_about_itself_the_user_cannot_say_for_all(name: str) -> None:
    given = "7" if name == "Content-Length" else "chunked"
    assert name.lower().encode() not in headers("http://engine", {name: given})


def test_no_encoding_is_asked_for() -> None:
    assert headers("http://engine", {"Accept-Encoding": "gzip"})[b"accept-encoding"] == b"identity"


@pytest.mark.parametrize(
    ("url", "given", "value"),
    [
        ("http://user:pw@engine", {}, b"Basic dXNlcjpwdw=="),
        ("http://us%3Aer:p%40w@engine", {}, b"Basic dXM6ZXI6cEB3"),
        ("http://user@engine", {}, b"Basic dXNlcjo="),
        ("http://user:pw@engine", {"authorization": "Bearer key"}, b"Basic dXNlcjpwdw=="),
        ("http://engine", {"authorization": "Bearer key"}, b"Bearer key"),
    ],
)
def test_a_user_in_the_url_is_basic_authentication(url: str, given: dict[str, str], value: bytes) -> None:
    assert headers(url, given)[b"authorization"] == value


@pytest.mark.parametrize("name", ["X Key", "X-Key:", "", "clé"])
def test_a_name_that_http_does_not_allow_is_refused(name: str) -> None:
    with pytest.raises(EngineError, match="has a name or value that HTTP does not allow"):
        headers("http://engine", {name: "value"})


@pytest.mark.parametrize("value", ["Bearer hush\n", "hush\r\nX-Other: y", "hush\x00", "hush€"])
def test_a_value_that_http_does_not_allow_is_refused_without_showing_it(value: str) -> None:
    with pytest.raises(EngineError, match=r"'Authorization' for http://engine ") as caught:
        headers("http://user:hush@engine", {"Authorization": value})
    assert "hush" not in str(caught.value)
