"""From what a user names as a target to one client for each engine.

This module knows URLs, receivers and clients. It must not know what is said through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankcast.control.client import WeightSyncClient
from rankcast.control.egress import TlsVerify
from rankcast.control.http import HttpClient
from rankcast.control.inprocess import InProcessClient
from rankcast.control.llm import LLMClient
from rankcast.errors import UnsupportedError
from rankcast.topology import Worker, missing_ranks


def clients(
    target: object,
    *,
    headers: Mapping[str, str] | None,
    tls_verify: TlsVerify,
    timeout: float,
    sign: Callable[[str, bytes], str] | None = None,
) -> list[tuple[str, WeightSyncClient]]:
    """One (label, client) for each engine that ``target`` names.

    ``target`` is a URL, a ``vllm.LLM``, a ``Receiver``, a ``WeightSyncClient``, or a list of those; receivers that
    share an engine id are one engine. ``sign`` gives the MAC of a route and a body, for clients made from URLs: those
    are the caller's to close, all others stay with whoever made them. Raises ``UnsupportedError`` for anything else,
    for an engine or a receiver named twice, and for receivers that are not all workers of their engine.
    """
    items = list(target) if isinstance(target, Sequence) and not isinstance(target, str) else [target]
    if not items:
        raise UnsupportedError("connect needs at least one target: a URL, a Receiver, or a WeightSyncClient")
    found: list[tuple[str, WeightSyncClient]] = []
    receivers: dict[str, list[Any]] = {}
    urls: list[str] = []
    for item in items:
        worker = getattr(item, "worker", None)
        if isinstance(item, str):
            client = HttpClient(item, headers=headers, tls_verify=tls_verify, timeout=timeout, sign=sign)
            # Not as it was given: that may carry a password, and labels are shown.
            found.append((client.url, client))
            urls.append(client.url)
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
    if len(set(urls)) != len(urls):
        raise UnsupportedError(f"an engine is named twice among the targets: {', '.join(urls)}")
    for group in receivers.values():
        _check_group(group)
    found += [(f"in-process engine {engine[:8]}", InProcessClient(group)) for engine, group in receivers.items()]
    return found


def _check_group(receivers: Sequence[Any]) -> None:
    """Refuse receivers with one engine id that are not exactly the workers which they say this engine has.

    Looked at here, because whoever calls can still say what was meant: afterwards a worker is only one that is silent.
    """
    first = receivers[0].worker
    for at, receiver in enumerate(receivers):
        if any(receiver is other for other in receivers[:at]):
            raise UnsupportedError(
                f"the Receiver of {receiver.worker.label} is given twice among the targets: give each Receiver once",
                worker=receiver.worker.label,
            )
    by_rank: dict[int, Worker] = {}
    for receiver in receivers:
        worker = receiver.worker
        if worker.workers != first.workers:
            raise UnsupportedError(
                f"{first.label} and {worker.label} are Receivers of one engine that do not agree on how many workers "
                f"it has, {first.workers} or {worker.workers}: give their Worker records one count",
                worker=worker.label,
            )
        if worker.rank in by_rank:
            raise UnsupportedError(
                f"two Receivers say that they are {worker.label}: give each a Worker of its own rank, "
                f"0 to {first.workers - 1}, or an engine id of its own when they are engines of their own",
                worker=worker.label,
            )
        by_rank[worker.rank] = worker
    absent = missing_ranks(by_rank, first.workers)
    if absent:
        labels = ", ".join(worker.label for worker in by_rank.values())
        raise UnsupportedError(
            f"the Receivers given of engine {first.engine[:8]} are {labels}; rank{'s' * (len(absent) > 1)} "
            f"{', '.join(map(str, absent))} of {first.workers} {'is' if len(absent) == 1 else 'are'} missing: give the "
            "Receivers of all its workers in one list, or make this one with Worker(workers=1) when it is alone",
            worker=first.label,
        )


def made_here(target: object, over_http: Sequence[HttpClient]) -> list[HttpClient]:
    """Those of ``over_http`` that ``clients`` made from URLs of ``target``."""
    given = list(target) if isinstance(target, Sequence) and not isinstance(target, str) else [target]
    return [client for client in over_http if not any(client is one for one in given)]
