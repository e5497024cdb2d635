"""The way to a server by a proxy that the environment names: httpx goes it.

This module knows how a call becomes one of httpx's, and which of httpx's errors is which. It must not know when a proxy
is asked, nor what is sent. httpx bounds each wait for bytes and not the call: here, and only here, the head of a reply
that trickles in may outlast the call's deadline.
"""

from __future__ import annotations

import ssl
import time

import httpx

from rankcast.control.exchange import (
    KEPT_SECONDS,
    Answer,
    BrokenConnectionError,
    Call,
    ClosedError,
    LongAnswerError,
    SlowAnswerError,
    SlowConnectionError,
    UnreachableError,
    UntrustedError,
)


class ProxiedCalls:
    """An ``Exchange`` with the server of ``url`` by ``proxy``.

    ``trust`` says which certificates of an https server are good. Raises ``ValueError`` when httpx cannot go by such a
    proxy.
    """

    def __init__(self, url: httpx.URL, proxy: str, trust: ssl.SSLContext | None) -> None:
        self._url = url
        try:
            self._client = httpx.Client(
                proxy=proxy,
                verify=False if trust is None else trust,
                trust_env=False,  # which proxy it is was decided
                limits=httpx.Limits(keepalive_expiry=KEPT_SECONDS),
            )
        except (ValueError, ImportError, httpx.InvalidURL) as fault:
            raise ValueError(str(fault)) from None

    def send(self, call: Call) -> Answer:
        """See ``Exchange``."""
        began = time.monotonic()
        request = self._client.build_request(
            call.method,
            self._url.copy_with(raw_path=call.target.encode("ascii")),
            headers=list(call.headers),
            content=call.body,
            timeout=httpx.Timeout(max(0.0, call.deadline - began), connect=max(0.0, call.connect_by - began)),
        )
        try:
            response = self._client.send(request, stream=True)
            try:
                # As it came: an encoding is for the caller to refuse.
                return Answer(response.status_code, _body(response, call), response.headers.get("content-encoding", ""))
            finally:
                response.close()
        except httpx.ConnectTimeout as fault:
            raise SlowConnectionError(str(fault)) from fault
        except httpx.TimeoutException as fault:
            raise SlowAnswerError(str(fault)) from fault
        except httpx.ConnectError as fault:
            untrusted = "CERTIFICATE_VERIFY_FAILED" in str(fault)
            raise (UntrustedError if untrusted else UnreachableError)(str(fault)) from fault
        except (httpx.HTTPError, httpx.InvalidURL) as fault:
            raise BrokenConnectionError(str(fault) or type(fault).__name__) from fault
        except RuntimeError as fault:  # httpx's answer when the client was closed
            raise ClosedError(str(fault)) from fault

    def close(self) -> None:
        """Close the connections; a call in flight fails when httpx notices, which is at its deadline at the latest."""
        self._client.close()


def _body(response: httpx.Response, call: Call) -> bytes:
    body = bytearray()
    for part in response.iter_raw():
        body += part
        if len(body) > call.limit:
            raise LongAnswerError(f"the answer has more than {call.limit:,} bytes")
        if time.monotonic() > call.deadline:
            raise SlowAnswerError("the answer did not end")
    return bytes(body)
