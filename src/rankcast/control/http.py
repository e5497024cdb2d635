"""The HTTP client of one engine: vLLM's routes for weight updates, and what the embedded server adds.

This module knows routes, bodies and how an engine's refusals become errors. It must not know what a payload means, in
which order a push makes its calls, or which way they go. Nothing is ever sent twice: a call that failed half-way may
have been acted on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import msgspec

from rankcast.control.addresses import engine_url, shown_url
from rankcast.control.client import Payload
from rankcast.control.egress import TlsVerify, exchange_with
from rankcast.control.exchange import (
    BrokenConnectionError,
    Call,
    ClosedError,
    LongAnswerError,
    SlowAnswerError,
    SlowConnectionError,
    UnreachableError,
    UntrustedError,
)
from rankcast.control.request_headers import standing_headers
from rankcast.control.said import said
from rankcast.errors import EngineError, PayloadError
from rankcast.wire.codec import MAC_HEADER

#: The longest reply that is read, in bytes: checksums of a large model take some MB.
REPLY_LIMIT = 64 * 2**20
#: How long a connection may take to be made, in seconds; an engine that is up accepts at once.
CONNECT_SECONDS = 5.0
_JSON = (b"Content-Type", b"application/json")
_MAC = MAC_HEADER.encode()

V = TypeVar("V")
#: How the URL ends that clients of OpenAI's API are given; an engine's routes for weights lie beside it.
_OPENAI = "/v1"


class NoRouteError(Exception):
    """The cause of an ``EngineError``: whoever answers does not know the route at all."""


class HttpClient:
    """A ``WeightSyncClient`` over HTTP, with every optional call, on one kept connection per concurrent caller.

    ``timeout`` is how many seconds a call may take in all, its answer included. ``headers`` go with every request.
    ``sign`` makes the MAC of a route and a body (``Codec.sign``), which then goes with every POST as
    ``X-Rankcast-Mac``: the embedded server asks for it where it has a secret, other engines pass over it. Proxies of
    the environment are used for engines elsewhere, never for loopback. Every failure is an ``EngineError`` that names
    the URL, the call, and what the engine said; after one, the next call connects anew. A payload that JSON cannot
    carry is a ``PayloadError``. ``requests`` and ``request_bytes`` count what was sent, bodies only. Thread-safe.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        tls_verify: TlsVerify = True,
        timeout: float = 300.0,
        sign: Callable[[str, bytes], str] | None = None,
    ) -> None:
        base = engine_url(url)
        self.url = shown_url(base)
        self.timeout = timeout
        self.requests = 0
        self.request_bytes = 0
        self._counting = threading.Lock()
        self._prefix = base.raw_path.partition(b"?")[0].decode("ascii").rstrip("/")
        self._sign = sign
        self._headers = standing_headers(base, headers or {})
        # Who sends must not know the password that a URL may carry: it is among the headers.
        self._exchange = exchange_with(base.copy_with(userinfo=b""), tls_verify=tls_verify)

    def __repr__(self) -> str:
        return f"HttpClient({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a call in flight fails."""
        self._exchange.close()

    # -- the four calls of a weight update ---------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: Payload) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})

    # -- vLLM's other routes -----------------------------------------------------------------------------------------

    def update_weight_version(self, weight_version: str) -> None:
        """Name the weights that the engine has now."""
        self._post("/update_weight_version", {"new_version": weight_version})

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """Hold generation up; returns when no forward pass runs. ``mode`` is ``keep``, ``wait`` or ``abort``."""
        self._post("/pause", query={"mode": mode, "clear_cache": _flag(clear_cache)})

    def resume(self) -> None:
        """Go on generating."""
        self._post("/resume")

    def is_paused(self) -> bool:
        """Whether generation is held up."""
        return self._field("/is_paused", self._get("/is_paused"), "is_paused", bool)

    def weight_info(self) -> dict[str, Any]:
        """What the engine says about its weights, among it ``weight_version``."""
        reply = self._get("/weight_info")
        self._field("/weight_info", reply, "weight_version", object)
        return reply

    def weight_checker(self, action: str = "checksum", baseline: dict[str, str] | None = None) -> dict[str, Any]:
        """Checksums of the engine's weights, or a comparison with ``baseline``."""
        body = {"action": action} if baseline is None else {"action": action, "baseline": baseline}
        return self._asked("/weight_checker", body)

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of workers behind this engine, over its data-parallel replicas unless told otherwise."""
        reply = self._get("/get_world_size", {"include_dp": _flag(include_dp)})
        return self._field("/get_world_size", reply, "world_size", int)

    def reset_prefix_cache(self) -> bool:
        """Throw cached prefixes away, also those that lie outside of the engine and those that requests in flight hold,
        which are computed anew; False when the engine says that it could not."""
        query = {"reset_running_requests": "true", "reset_external": "true"}
        reply = self._post("/reset_prefix_cache", query=query)
        if reply is None:  # earlier versions of vLLM answer with an empty body, and only when it worked
            return True
        return self._field("/reset_prefix_cache", reply, "success", bool)

    # -- the embedded server's own -----------------------------------------------------------------------------------

    def abort(self) -> None:
        """End a session from outside of it."""
        self._post("/abort_weight_update", {})

    def generate(self, token_ids: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
        """Decode up to ``max_tokens`` tokens after ``token_ids``; the reply has ids, log-probs and weight versions."""
        body = {"token_ids": token_ids, "max_tokens": max_tokens, **options}
        return self._asked("/generate", body)

    # ----------------------------------------------------------------------------------------------------------------

    def _get(self, route: str, query: dict[str, str] | None = None) -> dict[str, Any]:
        return self._object(route, self._call("GET", route, query=query))

    def _asked(self, route: str, body: object) -> dict[str, Any]:
        reply = self._post(route, body)
        if reply is None:
            raise self._error(route, "answered with nothing")
        return reply

    def _post(self, route: str, body: object = None, *, query: dict[str, str] | None = None) -> dict[str, Any] | None:
        """The answer; ``None`` when it has no body."""
        try:
            content = None if body is None else msgspec.json.encode(body)
        except (TypeError, ValueError, OverflowError, RecursionError) as fault:
            raise PayloadError(f"what {route} of {self.url} should be sent is not JSON: {fault}") from None
        reply = self._call("POST", route, content=content, query=query)
        # Somebody on the way may answer in an engine's place, and well: a page to log in at is no engine's answer.
        return self._object(route, reply) if reply else None

    def _call(
        self, method: str, route: str, *, content: bytes | None = None, query: dict[str, str] | None = None
    ) -> bytes:
        asked = f"{route}?{urlencode(query)}" if query else route
        headers = [*self._headers]
        if content is not None:
            headers.append(_JSON)
        if self._sign is not None and method == "POST":
            # As the engine sees it: what a proxy on the way puts before the route is not signed.
            headers.append((_MAC, self._sign(asked, content or b"").encode()))
        with self._counting:
            self.requests += 1
            self.request_bytes += len(content or b"")
        began = time.monotonic()
        call = Call(
            method=method,
            target=self._prefix + asked,
            headers=headers,
            body=content or b"" if method == "POST" else None,
            connect_by=began + min(CONNECT_SECONDS, self.timeout),
            deadline=began + self.timeout,
            limit=REPLY_LIMIT,
        )
        try:
            answer = self._exchange.send(call)
        except SlowConnectionError as fault:
            raise self._error(route, f"no connection within {min(CONNECT_SECONDS, self.timeout):g} s") from fault
        except SlowAnswerError as fault:
            waited = time.monotonic() - began
            raise self._error(
                route, f"no answer within {waited:.1f} s (timeout={self.timeout:g}); whether it was done is not known"
            ) from fault
        except UntrustedError as fault:
            raise self._error(
                route,
                f"its certificate is not trusted ({fault}): name the file of who signed it, by tls_verify= or in "
                "SSL_CERT_FILE, or pass tls_verify=False",
            ) from fault
        except UnreachableError as fault:
            raise self._error(
                route, f"cannot be reached ({fault}): is the engine up, and is this its address?"
            ) from fault
        except BrokenConnectionError as fault:
            raise self._error(route, f"the connection broke ({fault}); whether it was done is not known") from fault
        except LongAnswerError:
            raise self._error(route, f"answered with more than {REPLY_LIMIT:,} bytes") from None
        except ClosedError as fault:
            raise self._error(route, f"this client is closed ({fault})") from fault
        if answer.encoding.lower() not in ("", "identity"):
            raise self._error(
                route, f"answered {answer.status} in the encoding {answer.encoding!r}, which it was not asked for"
            )
        if answer.status // 100 != 2:
            what = f"answered {answer.status}: {said(answer.body)}{_cure(route, answer.status, self.url)}"
            raise self._error(route, what) from (NoRouteError(route) if answer.status == 404 else None)
        return answer.body

    def _object(self, route: str, reply: bytes) -> dict[str, Any]:
        try:
            value = msgspec.json.decode(reply, type=dict[str, Any])
        except (msgspec.DecodeError, ValueError, RecursionError) as fault:
            raise self._error(
                route,
                f"answered with something else than a JSON object ({fault}): {said(reply)}. Is this an engine, or does "
                "a proxy answer in its place?",
            ) from None
        return value

    def _field(self, route: str, reply: dict[str, Any], name: str, kind: type[V]) -> V:
        value = reply.get(name)
        if name not in reply or not isinstance(value, kind):
            raise self._error(route, f"answered without a fitting {name!r}: {sorted(reply)}")
        return value

    def _error(self, route: str, what: str) -> EngineError:
        return EngineError(f"{route} of {self.url}: {what}")


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _cure(route: str, status: int, url: str) -> str:
    if status != 404:
        return ""
    if url.endswith(_OPENAI):
        return f" ({url} is where OpenAI's clients find an engine: give {url.removesuffix(_OPENAI)})"
    if route in ("/abort_weight_update", "/generate"):
        return " (only rankcast's embedded server has this route)"
    return (
        " (this server does not have the routes for weight updates: start vLLM with VLLM_SERVER_DEV_MODE=1 in its "
        "environment)"
    )
