"""``connect``: from a target and a source to a sync that is known to work, or a refusal by name.

This module knows the options and the order in which the two sides are joined. It must not know how a push runs. What
cannot be kept correct is refused here, before any weight moves.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from rankcast.control.addresses import facing
from rankcast.control.egress import TlsVerify
from rankcast.control.http import HttpClient
from rankcast.control.report_channel import ReportChannel
from rankcast.errors import LimitError, UnsupportedError
from rankcast.process import this_process
from rankcast.telemetry.progress import Progress, ProgressCallback
from rankcast.trainer.digests import Checking
from rankcast.trainer.direct import DirectExports
from rankcast.trainer.exports import Exports
from rankcast.trainer.fleet import Fleet
from rankcast.trainer.group import form_group
from rankcast.trainer.leading import ROUTED, Leading
from rankcast.trainer.lending import Lending
from rankcast.trainer.pausing import PAUSE_MODES
from rankcast.trainer.replicas import Replicas
from rankcast.trainer.sources import as_source
from rankcast.trainer.speaker import Speaker
from rankcast.trainer.sync import Sync
from rankcast.trainer.targets import clients, made_here
from rankcast.transports.own_memory import lend
from rankcast.transports.shm import sweep_leftovers
from rankcast.wire.bodies import Owner
from rankcast.wire.codec import Codec, find_secret
from rankcast.wire.payload import ROUTES, check_transport

MODES = ("auto", "direct", "ranklocal", "broadcast")
TRANSPORTS = ("auto", "shm", "file")
CHECKS = ("coverage", "digest")


class _Outcome(msgspec.Struct, frozen=True):
    """What rank 0's meeting with the fleet came to, for the other ranks."""

    kind: str
    connection: str


class _Agreed(msgspec.Struct, frozen=True):
    """Which tensors go by route."""

    direct: tuple[str, ...]


def connect(
    target: object,
    source: object,
    *,
    group: object | None = None,
    mode: str = "auto",
    transport: str = "auto",
    bucket_bytes: int = 512 * 2**20,
    check: Literal["coverage", "digest"] = "coverage",
    on_failure: Literal["mark_unusable"] = "mark_unusable",
    pause: str | None = "keep",
    secret: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    tls_verify: TlsVerify = True,
    listen: str | None = None,
    timeout: float = 300.0,
    progress: Literal[True] | Callable[[Progress], None] | None = None,
) -> Sync:
    """Join a trainer's weights to the engines that are to have them; in an SPMD trainer every rank calls this.

    ``target``: a URL, a list of URLs, a ``vllm.LLM``, ``Receiver`` objects, or any ``WeightSyncClient``; only rank 0's
    counts. ``source``: an ``nn.Module``, a ``WeightSource``, a safetensors checkpoint directory, or a callable that
    returns an iterator of (name, tensor). ``group``: the trainer ranks' process group (default: torch's default group,
    or one process). All ranks must pass the same ``mode``, ``transport``, ``bucket_bytes``, ``pause`` and
    ``check``.

    ``mode``: ``direct`` (workers copy their boxes out of the trainer's memory), ``ranklocal`` (tensors are staged, each
    worker loads those that it touches), ``broadcast`` (everything to everyone), or ``auto``: direct where it is
    possible, ranklocal for the rest. ``transport``: ``shm`` (memory that is shared), ``file`` (workers read files where
    they lie, which everything must; not with modes that stage), or ``auto``, either of them. ``bucket_bytes`` bounds
    each of a rank's two staging buffers; a tensor that is larger gets one of its own. ``check``: ``coverage``, what
    arrived is what was prepared, or ``digest`` besides, every worker took the bytes that the trainer had when the push
    began, and ranks that hold the same hold equal bytes. ``on_failure``: ``mark_unusable``, a worker that was half
    written serves nothing until a push completes. ``pause``: how generation is paused around an update: ``keep``
    running requests and go on with them, ``wait`` for them, ``abort`` them, or ``None``, not at all.

    ``secret``: signs every message, a ``str`` or ``bytes`` (default: ``RANKCAST_SECRET`` or ``RANKCAST_SECRET_FILE``).
    ``headers``: go with every HTTP request to an engine. ``tls_verify``: whether certificates of engines are checked,
    or the path of a file with the certificates of those who may have signed them.
    ``listen``: the address, ``host`` or ``host:port``, on which rank 0 takes reports (default: loopback, or the address
    that faces the engines). ``timeout``: seconds without progress before a wait fails, naming who is waited for.
    ``progress``: a callable that is given ``Progress`` records on rank 0, or True for a live line; one that raises is
    logged, and not called again.

    Clients of URLs are closed with the sync; a ``WeightSyncClient`` or a ``WeightSource`` that was passed in stays
    open, and may be used by several syncs.

    Raises ``UnsupportedError`` for options that do not go together, ``PushError`` naming every tensor that is unknown,
    missing, or differs in shape or dtype, ``LimitError`` when this machine has no room, and ``TrainerError`` when
    another rank failed. Nothing is left open then.
    """
    _check_options(mode, transport, bucket_bytes, check, on_failure, pause, timeout)
    sweep_leftovers()
    ranks = form_group(group, timeout=timeout)
    closing = contextlib.ExitStack()
    closing.callback(ranks.close)
    try:
        ranks.begin("connect")
        found = as_source(source)
        if found is not source:
            # One that was passed in may serve other syncs, and is its owner's to close.
            closing.callback(found.close)
        options = (
            f"mode={mode!r}, transport={transport!r}, bucket_bytes={bucket_bytes}, pause={pause!r}, check={check!r}"
        )
        exports = Exports(found, ranks, options=options, bucket_bytes=bucket_bytes)
        closing.callback(exports.close)
        leading, fleet, connection = None, None, ""
        if ranks.rank == 0:
            codec = Codec(find_secret(secret))
            sign = codec.sign if codec.signed else None
            found_clients = clients(target, headers=headers, tls_verify=tls_verify, timeout=timeout, sign=sign)
            over_http = [client for _, client in found_clients if isinstance(client, HttpClient)]
            for client in made_here(target, over_http):
                closing.callback(client.close)
            channel = ReportChannel(codec, listen=listen or facing([client.url for client in over_http]))
            closing.callback(channel.close)
            channel.start()
            fleet = Fleet(
                found_clients,
                channel,
                timeout=timeout,
                pulse=ranks.pulse,
                check=ranks.check,
                alone=ranks.size == 1,
            )
            closing.callback(fleet.close)
            speaker = Speaker(fleet, codec, channel.url, _owner())
            leading = Leading.meet(
                speaker,
                exports.manifest,
                mode=mode,
                transport=transport,
                pause_mode=pause,
                lease=timeout,
                digests=check == "digest",
            )
            closing.callback(leading.close)
            exports.kind, connection = leading.kind, speaker.connection
        said = ranks.broadcast(msgspec.msgpack.encode(_Outcome(exports.kind, connection)), "the fleet is met")
        outcome = msgspec.msgpack.decode(said, type=_Outcome)
        exports.kind = outcome.kind
        closing.callback(lend(outcome.connection, Lending(found)))
        direct = None
        if mode in ROUTED and exports.kind == "shm":
            direct = DirectExports(found, ranks, exports.manifests, insist=mode == "direct")
            closing.callback(direct.close)
            ways = leading.planning.use(direct).direct if leading is not None else ()
            said = ranks.broadcast(msgspec.msgpack.encode(_Agreed(ways)), "which tensors go by route")
            agreed = msgspec.msgpack.decode(said, type=_Agreed).direct
            exports.narrow(agreed)
            if not agreed:
                direct.close()
                direct = None
        elif mode == "direct" or transport == "file":
            raise UnsupportedError(
                f"mode={mode!r}, transport={transport!r}, but workers cannot open what this trainer has open through "
                "/proc: use 'auto' for both"
            )
        elif mode == "auto" and leading is not None:
            leading.planning.refuse_casts()
        exports.refresh()
        checking = None
        if check == "digest":
            checking = Checking(ranks, fleet, Replicas(ranks, found, exports))
            if leading is not None:
                leading.checking = checking
        return Sync(ranks, found, exports, leading, direct, checking, _shown(progress), closing)
    except BaseException as error:
        ranks.fail(error)
        try:
            closing.close()
        except Exception as fault:
            error.add_note(f"and what was open could not all be closed: {type(fault).__name__}: {fault}")
        raise


def _check_options(
    mode: str, transport: str, bucket_bytes: object, check: str, on_failure: str, pause: str | None, timeout: object
) -> None:
    if mode not in MODES:
        raise UnsupportedError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    if transport in ROUTES:
        check_transport(transport, routed=mode != "broadcast")
    if transport not in TRANSPORTS:
        raise UnsupportedError(f"transport {transport!r} is not one of {', '.join(TRANSPORTS)}")
    if pause not in PAUSE_MODES:
        raise UnsupportedError(f"pause {pause!r} is not one of {', '.join(map(repr, PAUSE_MODES))}")
    if check not in CHECKS:
        raise UnsupportedError(f"check {check!r} is not one of {', '.join(CHECKS)}")
    if on_failure != "mark_unusable":
        raise UnsupportedError(f"on_failure={on_failure!r}: there is 'mark_unusable'")
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise LimitError(
            f"bucket_bytes is {bucket_bytes!r}; it must be a positive number of bytes, such as 512 * 2**20"
        )
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise LimitError(f"timeout is {timeout!r}; it must be a positive number of seconds")
    if transport == "file" and mode not in ROUTED:
        raise UnsupportedError(f"transport='file', but mode={mode!r} stages tensors in memory: use mode='auto'")


def _owner() -> Owner:
    return Owner(secrets.token_hex(16), this_process(), f"the trainer on {socket.gethostname()}, pid {os.getpid()}")


def _shown(progress: Literal[True] | ProgressCallback | None) -> ProgressCallback | None:
    if progress is True:
        from rankcast.telemetry.line import live_line

        return live_line()
    return progress
