"""From what a user names as a target to one client for each engine.

This module knows URLs, receivers and clients. It must not know what is said through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankcast.control.client import WeightSyncClient
from rankcast.control.http import HttpClient
from rankcast.control.inprocess import InProcessClient
from rankcast.control.llm import LLMClient
from rankcast.errors import UnsupportedError
from rankcast.topology import Worker


def clients(
    target: object,
    *,
    headers: Mapping[str, str] | None,
    tls_verify: bool,
    timeout: float,
    sign: Callable[[str, bytes], str] | None = None,
) -> list[tuple[str, WeightSyncClient]]:
    """One (label, client) for each engine that ``target`` names.

    ``target`` is a URL, a ``vllm.LLM``, a ``Receiver``, a ``WeightSyncClient``, or a list of those; receivers that
    share an engine id are one engine. ``sign`` gives the MAC of a route and a body, for clients made from URLs: those
    are the caller's to close, all others stay with whoever made them. Raises ``UnsupportedError`` for anything else
    and for an engine named twice.
    """
    items = list(target) if isinstance(target, Sequence) and not isinstance(target, str) else [target]
    if not items:
        raise UnsupportedError("connect needs at least one target: a URL, a Receiver, or a WeightSyncClient")
    found: list[tuple[str, WeightSyncClient]] = []
    receivers: dict[str, list[Any]] = {}
    for item in items:
        worker = getattr(item, "worker", None)
        if isinstance(item, str):
            found.append((item, HttpClient(item, headers=headers, tls_verify=tls_verify, timeout=timeout, sign=sign)))
        elif LLMClient.fits(item):
            found.append((f"in-process vLLM {len(found)}", LLMClient(item)))
        elif isinstance(worker, Worker):
            receivers.setdefault(worker.engine, []).append(item)
        elif isinstance(item, WeightSyncClient):
            where = item.url if isinstance(item, HttpClient) else f"{type(item).__name__} {len(found)}"
            found.append((where, item))
        else:
            raise UnsupportedError(
                f"a target is a URL, a vllm.LLM, a Receiver or a WeightSyncClient (any object "
                f"with vLLM's four methods), got {type(item).__name__}"
            )
    urls = [item.rstrip("/") for item in items if isinstance(item, str)]
    if len(set(urls)) != len(urls):
        raise UnsupportedError(f"an engine is named twice among the targets: {', '.join(urls)}")
    found += [(f"in-process engine {engine[:8]}", InProcessClient(group)) for engine, group in receivers.items()]
    return found


def made_here(target: object, over_http: Sequence[HttpClient]) -> list[HttpClient]:
    """Those of ``over_http`` that ``clients`` made from URLs of ``target``."""
    given = list(target) if isinstance(target, Sequence) and not isinstance(target, str) else [target]
    return [client for client in over_http if not any(client is one for one in given)]
