"""The headers that go with every request to an engine: whose host it is, who asks, and what the user adds.

This module knows which headers are the client's own and which a user may replace. It must not know routes or bodies. No
error repeats a value: it may be a key.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import h11
import httpx

from rankcast.control.addresses import shown_url
from rankcast.errors import EngineError
from rankcast.wire.codec import MAC_HEADER

# What each call says about itself, and the user cannot say for all of them.
_OF_A_CALL = (b"content-type", b"content-length", b"transfer-encoding", MAC_HEADER.lower().encode())


def standing_headers(url: httpx.URL, given: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    """What goes with every request to ``url``: ``given``, over what is customary, under what must be so.

    The user name and password that ``url`` may carry become basic authentication. Raises ``EngineError`` when HTTP
    does not allow a header.
    """
    headers = {
        b"host": (b"Host", url.netloc),
        b"accept": (b"Accept", b"*/*"),
        b"user-agent": (b"User-Agent", b"rankcast"),
    }
    for name, value in given.items():
        try:
            pair = (name.encode("ascii"), value.encode("ascii"))
            h11.EndOfMessage(headers=[pair])  # checks no more than the form
        except (UnicodeError, h11.LocalProtocolError):
            raise EngineError(
                f"the header {name!r} for {shown_url(url)} has a name or value that HTTP does not allow"
            ) from None
        headers[pair[0].lower()] = pair
    # Replies are small, and a packed one has no bound until it is unpacked.
    headers[b"accept-encoding"] = (b"Accept-Encoding", b"identity")
    if url.username or url.password:
        userinfo = f"{url.username}:{url.password}".encode()
        headers[b"authorization"] = (b"Authorization", b"Basic " + base64.b64encode(userinfo))
    for key in _OF_A_CALL:
        headers.pop(key, None)
    return tuple(headers.values())
